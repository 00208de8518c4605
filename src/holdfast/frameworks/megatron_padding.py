"""Tensors that Megatron pads: the part of a live tensor that a stored one of another padding fills, and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from holdfast.frameworks.piecewise import Piecewise
from holdfast.geometry import Box, FlatRange, Shape, intersect, subtract, whole


class FittedTensor(NamedTuple):
    """The pieces that a stored tensor fills, as a tensor of its shape, and the memory that it does not fill."""

    tensor: Piecewise
    rest: Sequence[torch.Tensor]


def fitted(tensor: Piecewise, shape: Shape) -> FittedTensor | None:
    """The parts of `tensor` that a tensor of `shape` fills, whose elements have the same coordinates.

    None where the shapes are equal, or where a part would be none of the stored tensor: it has another number of axes,
    or `tensor` has flat ranges, and an axis other than the first differs.
    """
    if tensor.shape == shape or len(tensor.shape) != len(shape):
        return None
    is_flat = any(isinstance(part, FlatRange) for part, _ in tensor.pieces)
    if is_flat and tensor.shape[1:] != shape[1:]:
        return None
    kept: list[tuple[FlatRange | Box, torch.Tensor]] = []
    rest: list[torch.Tensor] = []
    for part, memory in tensor.pieces:
        if isinstance(part, FlatRange):
            numel = min(max(prod(shape) - part.start, 0), part.numel)
            if numel:
                kept.append((FlatRange(part.start, part.start + numel), memory[:numel]))
            rest.append(memory[numel:])
        else:
            common = intersect(part, whole(shape))
            if common is not None:
                kept.append((common, memory[common.relative_to(part.start).slices()]))
            outside = [part] if common is None else subtract(part, common)
            rest += [memory[box.relative_to(part.start).slices()] for box in outside]
    return FittedTensor(Piecewise(shape, kept, dtype=tensor.dtype, replicas=tensor.replicas), rest)
