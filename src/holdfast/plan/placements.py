"""Replay of placements: which boxes of a tensor each rank of a mesh holds.

The division is replayed placement by placement: shards by ``torch.chunk``, strided shards by chunks of chunks. A
strided shard may leave a rank with several boxes, where torch's own offset helper knows only one.

Torch also uses a strided shard where the mesh axes divide a tensor in another order than that of the mesh: FSDP2
divides the part that tensor parallelism left to a rank. `division_order` finds that order. Replayed from left to right
over a mesh whose axes are in that order, the placements give the rows that the ranks hold, also where the last chunk is
smaller than the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import prod

import numpy as np

from holdfast.geometry import Box, Int64s, Shape, chunk_cuts
from holdfast.plan.layout import Mesh, Placed, Placement, Replicate, Shard, StridedShard

#: [start, stop) of one tensor axis.
Interval = tuple[int, int]


@dataclass(frozen=True)
class AxisDivision:
    """The division of one tensor axis: non-empty intervals in order, and the mesh coordinates that hold each.

    ``coordinates[i]`` are the coordinates of interval ``i`` along ``mesh_axes``.
    """

    cuts: Int64s
    mesh_axes: tuple[int, ...]
    coordinates: Int64s


@dataclass(frozen=True)
class PlacedCells:
    """A tensor divided by placements: a grid of cells and the ranks that hold each (``[cells, holders]``)."""

    cuts: tuple[Int64s, ...]
    holders: Int64s


def division_order(mesh_shape: Shape, placements: tuple[Placement, ...]) -> tuple[int, ...] | None:
    """All mesh axes: first those that divide a tensor axis, in the order in which they divide it, then the others.

    A strided shard comes after the mesh axes behind it whose sizes make up its split factor. None where no order gives
    the split factor: then the strided shard divides chunks of chunks, as it says.
    """
    orders: dict[int, list[int]] = {}
    for mesh_axis in reversed(range(len(placements))):
        placement = placements[mesh_axis]
        if isinstance(placement, Replicate):
            continue
        order = orders.setdefault(placement.axis, [])
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        before = (at for at in range(len(order) + 1) if prod(mesh_shape[axis] for axis in order[:at]) == factor)
        place = next(before, None)
        if place is None:
            return None
        order.insert(place, mesh_axis)
    dividing = [mesh_axis for _, order in sorted(orders.items()) for mesh_axis in order]
    return (*dividing, *(axis for axis in range(len(placements)) if axis not in dividing))


def placed_cells(spec: Placed, shape: Shape) -> PlacedCells:
    """The grid of cells that `spec` makes of a tensor of `shape`, row-major, and each cell's holders, ascending."""
    mesh_shape = spec.mesh.shape
    divisions = [divide_axis(mesh_shape, spec.placements, axis, extent) for axis, extent in enumerate(shape)]
    counts = [len(division.cuts) - 1 for division in divisions]
    index: list[Int64s | slice] = [slice(None)] * len(mesh_shape)
    for axis, division in enumerate(divisions):
        for column, mesh_axis in enumerate(division.mesh_axes):
            around = [1] * len(counts)
            around[axis] = counts[axis]
            index[mesh_axis] = division.coordinates[:, column].reshape(around)
    ranks = np.asarray(spec.mesh.ranks, np.int64).reshape(mesh_shape)
    sharding = [axis for axis, entry in enumerate(index) if not isinstance(entry, slice)]
    replicating = [axis for axis, entry in enumerate(index) if isinstance(entry, slice)]
    if sharding:
        turned = ranks.transpose([*sharding, *replicating])
        held = turned[tuple(index[axis] for axis in sharding)]
        num_holders = prod(mesh_shape[axis] for axis in replicating)
        held = np.broadcast_to(held, (*counts, *(mesh_shape[axis] for axis in replicating)))
        holders = np.sort(held.reshape(prod(counts), num_holders), axis=1)
    else:
        holders = np.broadcast_to(np.sort(ranks.reshape(-1)), (prod(counts), ranks.size))
    return PlacedCells(tuple(division.cuts for division in divisions), holders)


def local_boxes(spec: Placed, shape: Shape, rank: int) -> list[tuple[Box, Box]]:
    """The boxes that `rank` holds, each as a pair: in global coordinates, and in the rank's local tensor.

    Empty when the rank holds nothing or is not in the mesh.
    """
    coordinates = _coordinates(spec.mesh).get(rank)
    if coordinates is None:
        return []
    per_axis = [
        local_intervals(spec.mesh.shape, spec.placements, axis, extent, coordinates)
        for axis, extent in enumerate(shape)
    ]
    boxes = []
    for pairs in product(*per_axis):
        size = tuple(stop - start for (start, stop), _ in pairs)
        here = Box(tuple(start for (start, _), _ in pairs), size)
        boxes.append((here, Box(tuple(local for _, local in pairs), size)))
    return boxes


def local_shape(spec: Placed, shape: Shape, rank: int) -> Shape:
    """The shape of the local tensor of `rank`, which must be in the mesh."""
    coordinates = _coordinates(spec.mesh)[rank]
    per_axis = (
        local_intervals(spec.mesh.shape, spec.placements, axis, extent, coordinates)
        for axis, extent in enumerate(shape)
    )
    return tuple(sum(stop - start for (start, stop), _ in intervals) for intervals in per_axis)


@lru_cache(maxsize=4096)
def local_intervals(
    mesh_shape: Shape, placements: tuple[Placement, ...], axis: int, extent: int, coordinates: Shape
) -> list[tuple[Interval, int]]:
    """Non-empty intervals of tensor axis `axis` at mesh `coordinates`, each with its offset in the local tensor."""
    intervals: list[Interval] = [(0, extent)]
    for mesh_axis, placement in enumerate(placements):
        if not isinstance(placement, Replicate) and placement.axis == axis:
            intervals = _divide(intervals, placement, mesh_shape[mesh_axis])[coordinates[mesh_axis]]
    pairs, offset = [], 0
    for start, stop in intervals:
        pairs.append(((start, stop), offset))
        offset += stop - start
    return pairs


@lru_cache(maxsize=4096)
def divide_axis(mesh_shape: Shape, placements: tuple[Placement, ...], axis: int, extent: int) -> AxisDivision:
    """The division of tensor axis `axis` among all mesh coordinates."""
    mesh_axes = [m for m, p in enumerate(placements) if not isinstance(p, Replicate) and p.axis == axis]
    if len(mesh_axes) == 1 and isinstance(placements[mesh_axes[0]], Shard):
        cuts = np.unique(chunk_cuts(extent, mesh_shape[mesh_axes[0]]))
        return AxisDivision(cuts, tuple(mesh_axes), np.arange(len(cuts) - 1, dtype=np.int64)[:, None])
    held: list[tuple[Interval, Shape]] = [((0, extent), ())] if extent else []
    groups: list[tuple[list[Interval], Shape]] = [([interval], at) for interval, at in held]
    for mesh_axis in mesh_axes:
        placement = placements[mesh_axis]
        assert not isinstance(placement, Replicate)
        groups = [
            (part, (*at, coordinate))
            for intervals, at in groups
            for coordinate, part in enumerate(_divide(intervals, placement, mesh_shape[mesh_axis]))
        ]
    flat = sorted((interval, at) for intervals, at in groups for interval in intervals)
    cuts = np.asarray([0, *(stop for (_, stop), _ in flat)], np.int64)
    coordinates = np.asarray([at for _, at in flat], np.int64).reshape(len(flat), len(mesh_axes))
    return AxisDivision(cuts, tuple(mesh_axes), coordinates)


def _divide(intervals: list[Interval], placement: Shard | StridedShard, parts: int) -> list[list[Interval]]:
    """The concatenation of `intervals` divided among `parts` coordinates, as torch divides a local tensor."""
    if isinstance(placement, Shard):
        return _chunk(intervals, parts)
    rows: list[list[Interval]] = [[] for _ in range(parts)]
    for chunk in _chunk(intervals, placement.split_factor):
        for row, piece in zip(rows, _chunk(chunk, parts), strict=True):
            row.extend(piece)
    return rows


def _chunk(intervals: list[Interval], parts: int) -> list[list[Interval]]:
    cuts = chunk_cuts(sum(stop - start for start, stop in intervals), parts).tolist()
    return [_cut_out(intervals, low, high) for low, high in pairwise(cuts)]


def _cut_out(intervals: list[Interval], low: int, high: int) -> list[Interval]:
    """Elements ``[low, high)`` of the concatenation of `intervals`."""
    taken, at = [], 0
    for start, stop in intervals:
        first, last = max(low - at, 0), min(high - at, stop - start)
        if first < last:
            taken.append((start + first, start + last))
        at += stop - start
    return taken


@lru_cache(maxsize=256)
def _coordinates(mesh: Mesh) -> dict[int, Shape]:
    """Coordinates of each rank of a mesh."""
    return {rank: tuple(int(c) for c in np.unravel_index(i, mesh.shape)) for i, rank in enumerate(mesh.ranks)}
