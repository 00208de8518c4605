"""Slots of factored optimizers, which have another shape than their parameter, over DTensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from itertools import combinations
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def factor_like(parameter: torch.Tensor, shape: torch.Size) -> torch.Tensor | None:
    """The placement of a slot (a factor) whose shape differs from its parameter's, as a DTensor without memory; None
    for plain memory.

    An optimizer that computes on DTensors keeps DTensors, and torch does not mix them with plain tensors. A factor is
    divided as its parameter along the axes that they share. Along all others, and where the shared axes are not clear,
    it is replicated.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(parameter, module.DTensor) or not shape or shape == parameter.shape:
        return None
    sharded = cast("DTensor", parameter)
    axes = _shared_axes(sharded.shape, shape)
    local = list(shape)
    for mine, theirs in axes.items():
        local[theirs] = sharded._local_tensor.shape[mine]  # noqa: SLF001
    return cast("DTensor", module.DTensor).from_local(
        torch.empty(local, device="meta"),
        sharded.device_mesh,
        [_moved(placement, axes) for placement in sharded.placements],
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )


def _shared_axes(whole: torch.Size, factor: torch.Size) -> dict[int, int]:
    """The axes of a parameter that a factor shares, each with its position in the factor; the others were dropped or
    have one element."""
    if len(factor) == len(whole):
        reduced = all(extent in (1, full) for extent, full in zip(factor, whole, strict=True))
        return {axis: axis for axis, extent in enumerate(factor) if extent == whole[axis]} if reduced else {}
    candidates = combinations(range(len(whole)), len(factor))
    kept = [axes for axes in candidates if tuple(whole[axis] for axis in axes) == tuple(factor)]
    return {axis: position for position, axis in enumerate(kept[0])} if len(kept) == 1 else {}


def _moved(placement: Placement, axes: Mapping[int, int]) -> Placement:
    """The placement of a factor for a parameter's `placement`; `axes` are the axes that they share."""
    types = sys.modules["torch.distributed.tensor.placement_types"]
    axis = axes.get(getattr(placement, "dim", -1))
    if axis is None:
        moved = types.Replicate()
    elif isinstance(placement, types._StridedShard):  # noqa: SLF001
        moved = types._StridedShard(axis, split_factor=placement.split_factor)  # noqa: SLF001
    else:
        moved = types.Shard(axis)
    return cast("Placement", moved)
