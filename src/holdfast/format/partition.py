"""Partitions of a manifest as cells: each cell's part of the tensor and owner file, and the cells that meet a box."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from holdfast.format.manifest import Boxes, DecodedTable, FlatCuts, Grid, Partition, corrupt
from holdfast.geometry import Box, FlatRange, Int64s, Shape, coverage_fault
from holdfast.wording import count

#: Most numbers (the coordinates of all corners) that the check of a list of boxes may take.
_MAX_CORNER_NUMBERS = 1 << 23


@dataclass(frozen=True)
class _Columns:
    """The fields that all kinds of cells share; arrays have one row per cell, in canonical order."""

    #: File index of each cell.
    owners: Int64s
    #: Elements of each cell; never 0.
    numels: Int64s
    #: Elements of the same tensor in the same file that come before the cell.
    within: Int64s
    #: The shape that a tensor must have to be divided like this, or its ``(numel,)`` for flat cuts.
    extents: Shape


@dataclass(frozen=True)
class GridCells(_Columns):
    """Cells between cut points, row-major."""

    cuts: tuple[Int64s, ...]

    def part(self, cell: int) -> Box:
        """The box of a cell."""
        start, size = [], []
        for cuts in reversed(self.cuts):
            cell, at = divmod(cell, len(cuts) - 1)
            start.append(int(cuts[at]))
            size.append(int(cuts[at + 1] - cuts[at]))
        return Box(tuple(reversed(start)), tuple(reversed(size)))

    def meeting(self, shape: Shape, box: Box) -> Int64s:
        """Numbers of the cells that share elements with `box`."""
        numbers = np.zeros(1, np.int64)
        for cuts, start, stop in zip(self.cuts, box.start, box.stop, strict=True):
            first = int(np.searchsorted(cuts, start, side="right")) - 1
            last = int(np.searchsorted(cuts, stop, side="left"))
            numbers = (numbers[:, None] * (len(cuts) - 1) + np.arange(first, last)).reshape(-1)
        return numbers

    def boxes(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """Starts and sizes of cells, each ``[cells, axes]``."""
        starts, sizes = (np.empty((len(numbers), len(self.cuts)), np.int64) for _ in range(2))
        for axis in reversed(range(len(self.cuts))):
            cuts = self.cuts[axis]
            numbers, at = np.divmod(numbers, len(cuts) - 1)
            starts[:, axis], sizes[:, axis] = cuts[at], cuts[at + 1] - cuts[at]
        return starts, sizes


@dataclass(frozen=True)
class FlatCells(_Columns):
    """Flat ranges between cut points."""

    cuts: Int64s

    def part(self, cell: int) -> FlatRange:
        """The flat range of a cell."""
        return FlatRange(int(self.cuts[cell]), int(self.cuts[cell + 1]))

    def meeting(self, shape: Shape, box: Box) -> Int64s:
        """Numbers of the cells between the first and the last element of `box`; some may share no element with it."""
        low = high = 0
        for extent, start, stop in zip(shape, box.start, box.stop, strict=True):
            low = low * extent + start
            high = high * extent + stop - 1
        first = int(np.searchsorted(self.cuts, low, side="right")) - 1
        return np.arange(first, int(np.searchsorted(self.cuts, high, side="right")), dtype=np.int64)


@dataclass(frozen=True)
class BoxCells(_Columns):
    """Free boxes; arrays of shape ``[cells, axes]``."""

    starts: Int64s
    sizes: Int64s

    def part(self, cell: int) -> Box:
        """The box of a cell."""
        return Box(tuple(self.starts[cell].tolist()), tuple(self.sizes[cell].tolist()))

    def meeting(self, shape: Shape, box: Box) -> Int64s:
        """Numbers of the cells that share elements with `box`."""
        meets = (self.starts < np.asarray(box.stop)) & (self.starts + self.sizes > np.asarray(box.start))
        return np.flatnonzero(meets.all(axis=1))

    def boxes(self, numbers: Int64s) -> tuple[Int64s, Int64s]:
        """Starts and sizes of cells, each ``[cells, axes]``."""
        return self.starts[numbers], self.sizes[numbers]


Cells = GridCells | FlatCells | BoxCells


def cells_of(manifest: DecodedTable, partition: Partition) -> Cells:
    """Decode one partition, and check that its cells cover a tensor exactly once and belong to files that exist.

    Raises:
        CorruptError: the partition does not describe a division of any tensor.
    """
    owners = manifest.sequence(partition.owners)
    if len(owners) and not (owners.min() >= 0 and owners.max() < manifest.body.num_files):
        raise corrupt("a cell belongs to a file that does not exist")
    if isinstance(partition, Grid):
        return _grid(tuple(manifest.sequence(index) for index in partition.cuts), owners)
    if isinstance(partition, FlatCuts):
        return _flat(manifest.sequence(partition.cuts), owners)
    return _boxes(manifest, partition, owners)


def _grid(cuts: tuple[Int64s, ...], owners: Int64s) -> GridCells:
    for axis in cuts:
        _check_cuts(axis)
    if len(owners) != prod(len(axis) - 1 for axis in cuts):
        raise corrupt(f"a grid has {count(len(owners), 'owner')} for another number of cells")
    numels = np.ones(1, np.int64)
    for axis in cuts:
        numels = (numels[:, None] * np.diff(axis)).reshape(-1)
    return GridCells(owners, numels, _within(owners, numels), tuple(int(axis[-1]) for axis in cuts), cuts)


def _flat(cuts: Int64s, owners: Int64s) -> FlatCells:
    _check_cuts(cuts)
    if len(owners) != len(cuts) - 1:
        raise corrupt(f"flat cuts have {count(len(owners), 'owner')} for {count(len(cuts) - 1, 'range')}")
    numels = np.diff(cuts)
    return FlatCells(owners, numels, _within(owners, numels), (int(cuts[-1]),), cuts)


def _boxes(manifest: DecodedTable, partition: Boxes, owners: Int64s) -> BoxCells:
    columns = [manifest.sequence(index) for index in (*partition.starts, *partition.sizes)]
    num_axes = len(partition.starts)
    if not len(owners):
        raise corrupt("a list of boxes is empty")
    if len(partition.sizes) != num_axes or not num_axes or any(len(column) != len(owners) for column in columns):
        raise corrupt("the columns of a box list have different lengths")
    starts = np.stack(columns[:num_axes], axis=1)
    sizes = np.stack(columns[num_axes:], axis=1)
    if (starts < 0).any() or (sizes <= 0).any() or (starts > 2**62 - sizes).any():
        raise corrupt("a box is empty or begins below 0")
    if is_too_long(len(starts), num_axes):
        boxes = f"{count(len(starts), 'box', 'boxes')} with {count(num_axes, 'axis', 'axes')}"
        raise corrupt(f"a list of {boxes} is longer than a reader can check")
    extents = tuple((starts + sizes).max(axis=0).tolist())
    fault = coverage_fault([extents], np.zeros(len(starts), np.int64), starts, sizes)
    if fault is not None:
        raise corrupt(f"element {list(fault.index)} of a tensor is stored {fault.times} times")
    numels = sizes.prod(axis=1)
    return BoxCells(owners, numels, _within(owners, numels), extents, starts, sizes)


def is_too_long(num_boxes: int, num_axes: int) -> bool:
    """Whether a list of this many boxes would take too much memory to check; readers refuse such a list."""
    return num_boxes * (num_axes + 1) << num_axes > _MAX_CORNER_NUMBERS


def _check_cuts(cuts: Int64s) -> None:
    if not len(cuts) or cuts[0] != 0 or (cuts[1:] <= cuts[:-1]).any():  # differences could overflow
        raise corrupt("cut points do not rise strictly from 0")


def _within(owners: Int64s, numels: Int64s) -> Int64s:
    """Running sum of `numels` per owner, exclusive."""
    if (np.diff(owners) > 0).all():
        return np.zeros_like(numels)  # at most one cell per file
    order = np.argsort(owners, kind="stable")
    totals = np.cumsum(numels[order])
    before = totals - numels[order]
    heads = np.flatnonzero(np.r_[True, np.diff(owners[order]) != 0]) if len(owners) else order
    before -= np.repeat(before[heads], np.diff(np.r_[heads, len(owners)]))
    within = np.empty_like(before)
    within[order] = before
    return within
