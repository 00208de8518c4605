"""The load plan: from a manifest and the boxes that a rank wants to the reads that bring them. Pure.

Stored cells and wanted boxes meet in global coordinates, so it does not matter how either side was divided. A plan is
columns of numbers; what is the same for all tensors that are divided and wanted alike is worked out once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from holdfast.format.container import Files
from holdfast.format.partition import Cells, FlatCells, GridCells
from holdfast.geometry import Box, FlatRange, Int64s, Shape, flat_boxes, intersect

#: Offsets of all tensors are computed for this many files at once (bounds memory).
_FILES_AT_ONCE = 256


class Want(NamedTuple):
    """A box of a tensor that somebody wants."""

    tensor: int
    box: Box


class Read(NamedTuple):
    """Bytes ``[start, stop)`` of a file's data section, which hold what want number `want` and a stored cell share.

    The bytes are elements `first` and following of the row-major order of `shape`, a box of the tensor that begins
    at `origin`.
    """

    want: int
    start: int
    stop: int
    first: int
    shape: Shape
    origin: Shape


@dataclass(frozen=True)
class _Meeting:
    """Cells that share elements with a wanted box: for each its number, and the span of the cell's row-major order
    from the first to the last shared element."""

    cells: Cells
    shape: Shape
    numbers: Int64s
    firsts: Int64s
    lasts: Int64s

    def frame(self, cell: int) -> tuple[int, Shape, Shape]:
        """What a cell's elements are elements of: how many come before, and shape and origin of the box."""
        part = self.cells.part(cell)
        if isinstance(part, FlatRange):
            return part.start, self.shape, (0,) * len(self.shape)
        return 0, part.size, part.start


@dataclass(frozen=True)
class FileReads:
    """All reads from one data file, ascending; ``data_start`` and ``data_nbytes`` are the file's."""

    file: int
    data_start: int
    data_nbytes: int
    starts: Int64s
    stops: Int64s
    _plan: _Plan
    _rows: Int64s

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Read:
        """Read number `index` in full."""
        row = int(self._rows[index])
        meeting = self._plan.meetings[int(self._plan.meeting_of[row])]
        before, shape, origin = meeting.frame(int(self._plan.cells[row]))
        first = before + int(self._plan.firsts[row])
        return Read(int(self._plan.wants[row]), int(self.starts[index]), int(self.stops[index]), first, shape, origin)


@dataclass(frozen=True)
class _Plan:
    """One row per read, in order of wants; `firsts` and `lasts` are elements of the cell."""

    meetings: Sequence[_Meeting]
    meeting_of: Int64s
    wants: Int64s
    tensors: Int64s
    cells: Int64s
    owners: Int64s
    withins: Int64s
    firsts: Int64s
    lasts: Int64s


def plan_load(files: Files, wants: Sequence[Want], *, first_file: int = 0) -> Iterator[FileReads]:
    """The reads that fill `wants`, file by file, beginning with `first_file` (ranks begin at different ones)."""
    plan = _plan(files, wants)
    needed, at = np.unique(plan.owners, return_inverse=True)
    order = np.argsort(at, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(at[order])) + 1)
    turn = int(np.searchsorted(needed, first_file))
    sequence = [*range(turn, len(needed)), *range(turn)]
    for low in range(0, len(sequence), _FILES_AT_ONCE):
        chunk = sequence[low : low + _FILES_AT_ONCE]
        columns = files.columns(needed[chunk])
        for column, number in enumerate(chunk):
            rows = groups[number]
            tensors = plan.tensors[rows]
            itemsizes = files.itemsizes[tensors]
            bases = columns.offsets[column, files.position[tensors]] + plan.withins[rows] * itemsizes
            starts, stops = bases + plan.firsts[rows] * itemsizes, bases + plan.lasts[rows] * itemsizes
            ascending = np.argsort(starts, kind="stable")
            yield FileReads(
                int(needed[number]),
                int(columns.data_starts[column]),
                int(columns.data_nbytes[column]),
                starts[ascending],
                stops[ascending],
                plan,
                rows[ascending],
            )


def resharded(files: Files, wants: Sequence[Want]) -> Iterator[Want]:
    """Those of `wants` that are not just one stored cell."""
    exact: dict[tuple[int, Box], bool] = {}
    for want in wants:
        if not want.box.numel:
            continue
        key = (files.manifest.body.partitions[want.tensor], want.box)
        if key not in exact:
            cells = files.cells(want.tensor)
            met = cells.meeting(files.manifest.shape(want.tensor), want.box)
            exact[key] = len(met) == 1 and cells.part(int(met[0])) == want.box
        if not exact[key]:
            yield want


def _plan(files: Files, wants: Sequence[Want]) -> _Plan:
    meetings: list[_Meeting] = []
    known: dict[tuple[int, Shape, Box], int] = {}
    pairs: list[tuple[int, int]] = []
    for number, (tensor, box) in enumerate(wants):
        if not box.numel:
            continue
        shape = files.manifest.shape(tensor)
        key = (files.manifest.body.partitions[tensor], shape, box)
        index = known.get(key)
        if index is None:
            index = known[key] = len(meetings)
            meetings.append(_meet(files.cells(tensor), shape, box))
        pairs.append((number, index))
    counts = np.asarray([len(meeting.numbers) for meeting in meetings], np.int64)
    numbers, indexes = np.asarray(pairs, np.int64).reshape(-1, 2).T
    per_want = counts[indexes] if meetings else numbers
    tensors = np.asarray([want.tensor for want in wants], np.int64)
    columns = [(m.numbers, m.cells.owners[m.numbers], m.cells.within[m.numbers], m.firsts, m.lasts) for m in meetings]
    cells, owners, withins, firsts, lasts = (
        np.concatenate([columns[index][k] for index in indexes.tolist()] or [np.zeros(0, np.int64)]) for k in range(5)
    )
    want_of = np.repeat(numbers, per_want)
    return _Plan(
        meetings, np.repeat(indexes, per_want), want_of, tensors[want_of], cells, owners, withins, firsts, lasts
    )


def _meet(cells: Cells, shape: Shape, box: Box) -> _Meeting:
    numbers = cells.meeting(shape, box)
    if isinstance(cells, GridCells):
        firsts, lasts = _grid_spans(cells, box)
        return _Meeting(cells, shape, numbers, firsts, lasts)
    low, high = _span(shape, box)
    if isinstance(cells, FlatCells) and high - low == box.numel:  # one run of the flat order: every range meets it
        begins, ends = cells.cuts[numbers], cells.cuts[numbers + 1]
        return _Meeting(cells, shape, numbers, np.maximum(low - begins, 0), np.minimum(high, ends) - begins)
    spans = [_span_in(cells.part(number), shape, box) for number in numbers.tolist()]
    kept = [index for index, span in enumerate(spans) if span is not None]
    rows = np.asarray([spans[index] for index in kept], np.int64).reshape(-1, 2)
    return _Meeting(cells, shape, numbers[kept], rows[:, 0], rows[:, 1])


def _grid_spans(cells: GridCells, box: Box) -> tuple[Int64s, Int64s]:
    """Spans of all grid cells that meet `box`, in row-major order of the cells."""
    firsts = np.zeros(1, np.int64)
    lasts = np.zeros(1, np.int64)
    for cuts, start, stop in zip(cells.cuts, box.start, box.stop, strict=True):
        low, high = int(np.searchsorted(cuts, start, side="right")) - 1, int(np.searchsorted(cuts, stop, side="left"))
        begins, ends = cuts[low:high], cuts[low + 1 : high + 1]
        firsts = (firsts[:, None] * (ends - begins) + np.maximum(start - begins, 0)).reshape(-1)
        lasts = (lasts[:, None] * (ends - begins) + np.minimum(stop, ends) - 1 - begins).reshape(-1)
    return firsts, lasts + 1


def _span_in(part: Box | FlatRange, shape: Shape, box: Box) -> tuple[int, int] | None:
    """The span of `part`'s own row-major order from the first to the last element that it shares with `box`."""
    if isinstance(part, FlatRange):
        low, high = _span(shape, box)
        first, last = max(part.start, low), min(part.stop, high)
        if not any(intersect(piece, box) for _, piece in flat_boxes(shape, first, last)):
            return None
        return first - part.start, last - part.start
    common = intersect(part, box)
    return None if common is None else _span(part.size, common.relative_to(part.start))


def _span(shape: Shape, box: Box) -> tuple[int, int]:
    """The flat range of a tensor of `shape` from the first to the last element of `box`."""
    first = last = 0
    for extent, start, size in zip(shape, box.start, box.size, strict=True):
        first = first * extent + start
        last = last * extent + start + size - 1
    return first, last + 1


def pieces(read: Read, box: Box, skipped: int, count: int) -> Iterator[tuple[int, Box, Box, Box]]:
    """Where `count` elements of `read`, after the `skipped` first ones, go in the wanted `box`.

    Yields ``(offset, stored, source, target)``: elements from `offset` on are box `stored` in row-major order; of
    it, `source` (relative to `stored`) goes to `target` (relative to the wanted box).
    """
    first = read.first + skipped
    for offset, local in flat_boxes(read.shape, first, first + count):
        stored = Box(tuple(a + o for a, o in zip(local.start, read.origin, strict=True)), local.size)
        common = intersect(stored, box)
        if common is not None:
            yield offset, stored, common.relative_to(stored.start), common.relative_to(box.start)
