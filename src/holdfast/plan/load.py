"""The load plan: from a manifest and the boxes that a rank wants to the reads that fill them. Pure.

Stored cells and wanted boxes are intersected in global coordinates, so it does not matter how either side was divided.
A plan is columns of numbers. Intersections are computed once for all tensors that are divided and wanted alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from holdfast.format.container import FilePlaces, StoredCells
from holdfast.format.partition import Cells, FlatCells
from holdfast.geometry import Box, FlatRange, Int64s, Shape, flat_boxes, intersect
from holdfast.plan.strided_runs import StridedRun, shared

#: Offsets are computed for this many files at once (bounds memory).
_FILES_AT_ONCE = 256


class ReadRequest(msgspec.Struct, frozen=True, gc=False):
    """A box of a tensor that a caller wants to read."""

    tensor: int
    box: Box


class ByteRead(NamedTuple):
    """Bytes ``[start, stop)`` of a file's data section: the intersection of want number `want` and a stored cell.

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
class _MeetingCells:
    """The cells that share elements with a wanted box.

    For each cell: its number, the span of its row-major order from the first to the last shared element, and, as a row
    of `StridedRun`, the positions of the shared elements in cell and box.
    """

    cells: Cells
    shape: Shape
    numbers: Int64s
    firsts: Int64s
    lasts: Int64s
    runs: Int64s
    #: Number of elements of the wanted box.
    numel: int
    #: Whether the wanted box equals one cell.
    alike: bool

    def frame(self, cell: int) -> tuple[int, Shape, Shape]:
        """The box that a cell's elements count in: the elements before the cell, the shape and the origin of the box.

        That is the cell's own box, or for a flat range the whole tensor.
        """
        part = self.cells.part(cell)
        if isinstance(part, FlatRange):
            return part.start, self.shape, (0,) * len(self.shape)
        return 0, part.size, part.start


@dataclass(frozen=True)
class FileReads:
    """All reads from one data file, ascending; ``data_start`` and ``data_nbytes`` are the file's.

    Read ``i`` is bytes ``[starts[i], stops[i])`` of the data section, for want number ``wants[i]``. Where
    ``straight[i]`` is true, these bytes are exactly the elements of that want in row-major order. Where ``odd[i]`` is
    true, the read does not begin at a multiple of its element size, so chunks of the file may cut its elements.
    """

    file: int
    data_start: int
    data_nbytes: int
    starts: Int64s
    stops: Int64s
    wants: Int64s
    straight: npt.NDArray[np.bool_]
    odd: npt.NDArray[np.bool_]
    _plan: _Plan
    _rows: Int64s

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> ByteRead:
        """Read number `index` in full."""
        row = int(self._rows[index])
        meeting = self._plan.meetings[int(self._plan.meeting_of[row])]
        before, shape, origin = meeting.frame(int(self._plan.cells[row]))
        first = before + int(self._plan.firsts[row])
        return ByteRead(int(self.wants[index]), int(self.starts[index]), int(self.stops[index]), first, shape, origin)

    def strided_run(self, index: int) -> StridedRun | None:
        """The runs in which read number `index` and its want share elements, from the read's first byte on.

        None where the shared elements are not runs.
        """
        place, size, step, pitch = self._plan.runs[self._rows[index]].tolist()
        return None if place < 0 else StridedRun(place, size, step, pitch)


@dataclass(frozen=True)
class _Plan:
    """All reads as columns, with one row per read in the order of wants; `firsts` and `lasts` count in the cell."""

    meetings: Sequence[_MeetingCells]
    meeting_of: Int64s
    wants: Int64s
    tensors: Int64s
    cells: Int64s
    owners: Int64s
    withins: Int64s
    firsts: Int64s
    lasts: Int64s
    runs: Int64s
    straight: npt.NDArray[np.bool_]


def plan_load(files: FilePlaces, wants: Sequence[ReadRequest], *, first_file: int = 0) -> Iterator[FileReads]:
    """The reads that fill `wants`, file by file, beginning with `first_file` (ranks begin with different files)."""
    plan = _plan(files, wants)
    needed, at = np.unique(plan.owners, return_inverse=True)
    order = np.argsort(at, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(at[order])) + 1)
    turn = int(np.searchsorted(needed, first_file))
    sequence = [*range(turn, len(needed)), *range(turn)]
    for low in range(0, len(sequence), _FILES_AT_ONCE):
        chunk = sequence[low : low + _FILES_AT_ONCE]
        held = [
            StoredCells(plan.tensors[rows], plan.cells[rows], plan.withins[rows])
            for rows in map(groups.__getitem__, chunk)
        ]
        for number, placed in zip(chunk, files.place(needed[chunk], held), strict=True):
            rows = groups[number]
            itemsizes = files.itemsizes[plan.tensors[rows]]
            starts = placed.offsets + plan.firsts[rows] * itemsizes
            stops = placed.offsets + plan.lasts[rows] * itemsizes
            ascending = np.argsort(starts, kind="stable")
            rows = rows[ascending]
            yield FileReads(
                int(needed[number]),
                placed.data_start,
                placed.data_nbytes,
                starts[ascending],
                stops[ascending],
                plan.wants[rows],
                plan.straight[rows],
                (starts % itemsizes != 0)[ascending],
                plan,
                rows,
            )


def resharded(files: FilePlaces, wants: Sequence[ReadRequest]) -> list[int]:
    """Indexes of those of `wants` that do not equal one stored cell."""
    meetings, meeting_of = _meetings(files, wants)
    apart = np.asarray([not meeting.alike for meeting in meetings], np.bool_)
    return np.flatnonzero(apart[np.asarray(meeting_of, np.int64)]).tolist()


def _plan(files: FilePlaces, wants: Sequence[ReadRequest]) -> _Plan:
    meetings, meeting_of = _meetings(files, wants)
    # The cells of all meetings stand in one line; each want takes the cells of its meeting.
    counts = np.asarray([len(meeting.numbers) for meeting in meetings], np.int64)
    heads = np.cumsum(counts) - counts
    of_want = np.asarray(meeting_of, np.int64)
    per_want = counts[of_want]
    want_of = np.repeat(np.arange(len(wants)), per_want)
    within_want = np.arange(len(want_of)) - np.repeat(np.cumsum(per_want) - per_want, per_want)
    taken = heads[of_want][want_of] + within_want
    columns = (
        [meeting.numbers for meeting in meetings],
        [meeting.cells.owners[meeting.numbers] for meeting in meetings],
        [meeting.cells.within[meeting.numbers] for meeting in meetings],
        [meeting.firsts for meeting in meetings],
        [meeting.lasts for meeting in meetings],
    )
    nothing = np.zeros(0, np.int64)
    cells, owners, withins, firsts, lasts = (np.concatenate([nothing, *column])[taken] for column in columns)
    runs = np.concatenate([np.zeros((0, 4), np.int64), *(meeting.runs for meeting in meetings)])[taken]
    tensors = np.asarray([want.tensor for want in wants], np.int64)[want_of]
    met = of_want[want_of]
    numels = np.asarray([meeting.numel for meeting in meetings], np.int64)[met]
    straight = (runs[:, 0] == 0) & (runs[:, 1] == numels)
    return _Plan(meetings, met, want_of, tensors, cells, owners, withins, firsts, lasts, runs, straight)


def _meetings(files: FilePlaces, wants: Sequence[ReadRequest]) -> tuple[list[_MeetingCells], list[int]]:
    """The distinct intersections of wanted boxes with stored cells, and for each want the index of its own."""
    partitions, shapes = files.manifest.body.partitions, files.manifest.body.shapes
    known: dict[tuple[int, int, Box], int] = {}
    #: The same by the id of the box: equal boxes are mostly one object, and a box is slow to hash.
    seen: dict[tuple[int, int, int], int] = {}
    meetings: list[_MeetingCells] = []
    meeting_of: list[int] = []
    for want in wants:
        tensor, box = want.tensor, want.box
        kind = (partitions[tensor], shapes[tensor], id(box))
        index = seen.get(kind)
        if index is None:
            index = seen[kind] = known.setdefault((partitions[tensor], shapes[tensor], box), len(meetings))
            if index == len(meetings):
                meetings.append(_meet(files.cells(tensor), files.manifest.shape(tensor), box))
        meeting_of.append(index)
    return meetings, meeting_of


def _meet(cells: Cells, shape: Shape, box: Box) -> _MeetingCells:
    if not box.numel:
        nothing = np.zeros(0, np.int64)
        return _MeetingCells(cells, shape, nothing, nothing, nothing, nothing.reshape(0, 4), 0, alike=True)
    numbers = cells.meeting(shape, box)
    if not isinstance(cells, FlatCells):
        spans = shared(*cells.boxes(numbers), box)
        alike = len(numbers) == 1 and cells.part(int(numbers[0])) == box
        return _MeetingCells(cells, shape, numbers, *spans, box.numel, alike=alike)
    return _MeetingCells(cells, shape, *_flat_spans(cells, numbers, shape, box), box.numel, alike=False)


def _flat_spans(cells: FlatCells, numbers: Int64s, shape: Shape, box: Box) -> tuple[Int64s, Int64s, Int64s, Int64s]:
    """The numbers of the flat ranges that share elements with `box`, followed by the columns that `shared` returns."""
    low, high = _span(shape, box)
    begins, ends = cells.cuts[numbers], cells.cuts[numbers + 1]
    firsts, lasts = np.maximum(low - begins, 0), np.minimum(high, ends) - begins
    is_run = high - low == box.numel  # then every range between shares elements with the box
    if not is_run:
        spans = np.stack([begins + firsts, begins + lasts], axis=1).tolist()
        kept = np.asarray([_meets(shape, box, *span) for span in spans], np.bool_)
        numbers, begins, firsts, lasts = numbers[kept], begins[kept], firsts[kept], lasts[kept]
    places = np.maximum(begins - low, 0) if is_run else np.full(len(numbers), -1)
    sizes = lasts - firsts
    return numbers, firsts, lasts, np.stack([places, sizes, sizes, sizes], axis=1)


def _meets(shape: Shape, box: Box, start: int, stop: int) -> bool:
    return any(intersect(piece, box) for _, piece in flat_boxes(shape, start, stop))


def _span(shape: Shape, box: Box) -> tuple[int, int]:
    """The flat range of a tensor of `shape` from the first to the last element of `box`."""
    first = last = 0
    for extent, start, size in zip(shape, box.start, box.size, strict=True):
        first = first * extent + start
        last = last * extent + start + size - 1
    return first, last + 1


def pieces(read: ByteRead, box: Box, skipped: int, count: int) -> Iterator[tuple[int, Box, Box, Box]]:
    """The places in the wanted `box` of `count` elements of `read` after the first `skipped` ones.

    Yields ``(offset, stored, source, target)``: elements from `offset` on are box `stored` in row-major order; of
    it, `source` (relative to `stored`) goes to `target` (relative to the wanted box).
    """
    first = read.first + skipped
    for offset, local in flat_boxes(read.shape, first, first + count):
        stored = Box(tuple(a + o for a, o in zip(local.start, read.origin, strict=True)), local.size)
        common = intersect(stored, box)
        if common is not None:
            yield offset, stored, common.relative_to(stored.start), common.relative_to(box.start)
