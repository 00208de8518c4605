"""Read requirements of all ranks of a job, grouped by kinds of tensors: those sharded and stored alike. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from holdfast.format.container import Files
from holdfast.geometry import Box, Int64s, Shape
from holdfast.mapping.parts import NO_AXIS, MappedPart
from holdfast.plan.exchange import Bools
from holdfast.plan.intersect import intersect
from holdfast.plan.layout_rules import HeldTensor, Place
from holdfast.plan.placements import placed_cells


class WantedKind(NamedTuple):
    """The read requirements for all `tensors` of one kind, as columns.

    For each of the tensors, the nodes of set number ``sets`` want elements ``[firsts, lasts)`` of those that file
    ``owners`` (ascending) holds of it.
    """

    tensors: Int64s
    owners: Int64s
    sets: Int64s
    firsts: Int64s
    lasts: Int64s


class _Geometry(NamedTuple):
    """The placement of a part of a tensor on ranks: all that determines the wanted boxes of the stored tensor."""

    places: tuple[Place, ...]
    shape: Shape
    box: Box
    start: Shape
    axes: tuple[int, ...]


class _Kind(NamedTuple):
    """The key of stored tensors that have one partition and shape, and that ranks hold alike."""

    geometry: _Geometry
    partition: int
    shape: int


class _Cells(NamedTuple):
    """The boxes of a tensor that ranks hold: the ranks that hold each box, and the number of the set of their nodes."""

    starts: Int64s
    stops: Int64s
    holders: Int64s
    sets: Int64s


class _WantedBoxes(NamedTuple):
    """The wanted boxes of stored tensors, the set of nodes that wants each, and the elements that each rank needs."""

    starts: Int64s
    sizes: Int64s
    sets: Int64s
    numels: Int64s


class ReadRequirements:
    """The read requirements of a mesh of all ranks, by kinds of tensors; rank ``r`` is on node ``node_of[r]``."""

    def __init__(self, files: Files, mesh_shape: Shape, node_of: Int64s) -> None:
        self._files = files
        self._mesh_shape = mesh_shape
        self._node_of = node_of
        self._num_nodes = int(node_of.max()) + 1
        self._numbers = {name: number for number, name in enumerate(files.manifest.body.names)}
        self._sets: dict[bytes, int] = {}
        self._cells: dict[tuple[tuple[Place, ...], Shape], _Cells] = {}
        self._boxes: dict[_Geometry, _WantedBoxes] = {}
        self._tensors: dict[_Kind, list[int]] = {}

    def add(self, held: HeldTensor, shape: Shape, part: MappedPart, source: str) -> None:
        """Add the stored part `part`, of stored tensor `source`, of a tensor of `shape` that ranks hold as `held`."""
        body, number = self._files.manifest.body, self._numbers[source]
        geometry = _Geometry(held.places, shape, part.box, part.start, part.axes)
        if geometry not in self._boxes:
            self._boxes[geometry] = self._part(self._held(held, shape), part)
        kind = _Kind(geometry, body.partitions[number], body.shapes[number])
        self._tensors.setdefault(kind, []).append(number)

    def needed(self) -> Int64s:
        """Stored bytes that each rank needs."""
        total = np.zeros(len(self._node_of), np.int64)
        for kind, numbers in self._tensors.items():
            total += self._boxes[kind.geometry].numels * int(self._files.itemsizes[numbers].sum())
        return total

    def wants(self) -> list[WantedKind]:
        """The requirements of all kinds of tensors."""
        return [self._meet(self._boxes[kind.geometry], numbers) for kind, numbers in self._tensors.items()]

    def members(self) -> Bools:
        """For each set of nodes (rows), which nodes are in it."""
        return np.frombuffer(b"".join(self._sets), np.bool_).reshape(len(self._sets), self._num_nodes)

    def _meet(self, boxes: _WantedBoxes, numbers: list[int]) -> WantedKind:
        """The requirements of one kind of tensors: the spans of stored cells that `boxes` share elements with."""
        cells = self._files.cells(numbers[0])
        spans = intersect(cells, self._files.manifest.shape(numbers[0]), boxes.starts, boxes.sizes)
        within = cells.within[spans.cells]
        rows = _merged(cells.owners[spans.cells], boxes.sets[spans.boxes], within + spans.firsts, within + spans.lasts)
        return WantedKind(np.asarray(numbers, np.int64), *rows)

    def _held(self, held: HeldTensor, shape: Shape) -> _Cells:
        """The boxes in which ranks hold a tensor of `shape`, with their holders."""
        key = held.places, shape
        if key not in self._cells:
            placed = placed_cells(held.placed(self._mesh_shape), shape)
            lows = np.meshgrid(*(cuts[:-1] for cuts in placed.cuts), indexing="ij")
            highs = np.meshgrid(*(cuts[1:] for cuts in placed.cuts), indexing="ij")
            starts, stops = (_columns(each, len(placed.holders)) for each in (lows, highs))
            self._cells[key] = _Cells(starts, stops, placed.holders, self._sets_of(placed.holders))
        return self._cells[key]

    def _sets_of(self, holders: Int64s) -> Int64s:
        """The number of the set of nodes of each row of ranks."""
        nodes = np.zeros((len(holders), self._num_nodes), np.bool_)
        nodes[np.arange(len(holders))[:, None], self._node_of[holders]] = True
        return np.asarray([self._sets.setdefault(row.tobytes(), len(self._sets)) for row in nodes], np.int64)

    def _part(self, held: _Cells, part: MappedPart) -> _WantedBoxes:
        """The boxes that ranks hold of one part of the tensor, in the coordinates of the stored tensor."""
        low = np.asarray(part.box.start, np.int64)
        starts = np.maximum(held.starts, low)
        sizes = np.minimum(held.stops, low + np.asarray(part.box.size, np.int64)) - starts
        met = (sizes > 0).all(axis=1)
        starts, sizes, holders = starts[met] - low, sizes[met], held.holders[met]
        numels = np.zeros(len(self._node_of), np.int64)
        np.add.at(numels, holders, sizes.prod(axis=1)[:, None])
        source = np.broadcast_to(np.asarray(part.start, np.int64), (len(starts), len(part.start))).copy()
        extents = np.ones_like(source)
        for axis, mine in enumerate(part.axes):
            if mine != NO_AXIS:
                source[:, axis] += starts[:, mine]
                extents[:, axis] = sizes[:, mine]
        return _WantedBoxes(source, extents, held.sets[met], numels)


def _merged(owners: Int64s, sets: Int64s, firsts: Int64s, lasts: Int64s) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """Sort the rows, and merge rows of one file and set that overlap or follow each other without a gap."""
    order = np.lexsort((firsts, sets, owners))
    owners, sets, firsts, lasts = owners[order], sets[order], firsts[order], lasts[order]
    if not len(order):
        return owners, sets, firsts, lasts
    # The furthest element so far of the same file and set. The elements of each file and set are lifted above those
    # before them, so that one running maximum serves all.
    turn = np.r_[0, np.cumsum((owners[1:] != owners[:-1]) | (sets[1:] != sets[:-1]))]
    lift = turn * (int(lasts.max()) + 1)
    reach = np.maximum.accumulate(lasts + lift) - lift
    fresh = np.flatnonzero(np.r_[True, (turn[1:] != turn[:-1]) | (firsts[1:] > reach[:-1])])
    return owners[fresh], sets[fresh], firsts[fresh], reach[np.append(fresh[1:], len(order)) - 1]


def _columns(axes: Sequence[Int64s], num_rows: int) -> Int64s:
    """The points of a grid as rows of coordinates. A grid without axes has one point."""
    return np.stack(axes, axis=-1).reshape(num_rows, len(axes)) if axes else np.zeros((num_rows, 0), np.int64)
