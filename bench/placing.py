"""The placement of a state's tensors on the ranks that hold them."""

from __future__ import annotations

from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

#: Shards of rows (FSDP) or of columns; FSDP over tensor parallelism; or plain tensors that every rank holds (DDP).
Layout = Literal["rows", "columns", "fsdp-tp", "replicas"]

#: Tensor-parallel ranks under "fsdp-tp", and the weights of which they hold columns rather than rows.
TP = 2
_BY_COLUMNS = ("attention.wo", "mlp.down")


def mesh_shape(layout: Layout, world: int) -> tuple[int, ...]:
    """The shape of the device mesh of `layout` over `world` ranks."""
    return (world // TP, TP) if layout == "fsdp-tp" else (world,)


def place(whole: torch.Tensor, name: str, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """The part of the parameter `name`, or of a moment of it, that a rank of `mesh` holds, given the `whole` tensor."""
    if layout == "replicas":
        return whole
    return distribute_tensor(whole, mesh, _placements(name, whole.ndim, layout), src_data_rank=None)


def box(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(start, size) of what this rank holds of `tensor`, which no layout makes more than one block."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(start), tuple(size)


def _placements(name: str, num_axes: int, layout: Layout) -> tuple[Placement, ...]:
    if layout == "columns":
        return (Shard(num_axes - 1),)
    if layout == "fsdp-tp":
        # As FSDP2 has it: it cuts the rows of what tensor parallelism left to this rank.
        by_columns = name.endswith(_BY_COLUMNS)
        return (Shard(0), Shard(1)) if by_columns else (_StridedShard(0, split_factor=TP), Shard(0))
    return (Shard(0),)
