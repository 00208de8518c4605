"""The load plan: from a manifest and the boxes that a rank wants to the reads that bring them. Pure.

Stored cells and wanted boxes meet in global coordinates, so it does not matter how either side was divided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from holdfast.format.container import Files
from holdfast.format.partition import Cells
from holdfast.geometry import Box, FlatRange, Int64s, Shape, flat_boxes, intersect

#: Offsets of all tensors are computed for this many files at once (bounds memory).
_FILES_AT_ONCE = 256


class Want(NamedTuple):
    """A box of a tensor that somebody wants."""

    tensor: int
    box: Box


@dataclass(frozen=True, slots=True)
class Read:
    """Bytes ``[start, stop)`` of a file's data section, which hold what want number `want` and a stored cell share.

    The bytes are elements ``first`` and following of the row-major order of `shape`, a box of the tensor that begins
    at `origin`.
    """

    want: int
    start: int
    stop: int
    first: int
    shape: Shape
    origin: Shape


@dataclass(frozen=True)
class FileReads:
    """All reads from one data file, by `start`; ``data_start`` and ``data_nbytes`` are the file's."""

    file: int
    data_start: int
    data_nbytes: int
    reads: tuple[Read, ...]


def plan_load(files: Files, wants: Sequence[Want], *, first_file: int = 0) -> Iterator[FileReads]:
    """The reads that fill `wants`, file by file, beginning with `first_file` (ranks begin at different ones)."""
    tensors, numbers, cells = _meetings(files, wants)
    owners = np.concatenate(
        [files.cells(wants[number].tensor).owners[met] for number, met in zip(numbers, cells, strict=True)]
        or [np.zeros(0, np.int64)]
    )
    counts = [len(met) for met in cells]
    number_of = np.repeat(np.asarray(numbers, np.int64), counts)
    tensor_of = np.repeat(np.asarray(tensors, np.int64), counts)
    cell_of = np.concatenate(cells or [np.zeros(0, np.int64)])
    needed, at = np.unique(owners, return_inverse=True)
    needed = np.roll(needed, -int(np.searchsorted(needed, first_file)))
    order = np.argsort(at, kind="stable")
    bounds = {
        int(owners[group[0]]): group for group in np.split(order, np.flatnonzero(np.diff(at[order])) + 1) if len(group)
    }
    for low in range(0, len(needed), _FILES_AT_ONCE):
        chunk = needed[low : low + _FILES_AT_ONCE]
        columns = files.columns(chunk)
        for column, file in enumerate(chunk.tolist()):
            group = bounds[file]
            offsets = columns.offsets[tensor_of[group], column]
            rows = zip(
                *(a.tolist() for a in (number_of[group], tensor_of[group], cell_of[group], offsets)), strict=True
            )
            reads = (_read(files, wants, *row) for row in rows)
            found = tuple(sorted((read for read in reads if read is not None), key=lambda read: read.start))
            if found:
                yield FileReads(file, int(columns.data_starts[column]), int(columns.data_nbytes[column]), found)


def _meetings(files: Files, wants: Sequence[Want]) -> tuple[list[int], list[int], list[Int64s]]:
    """Which cells meet each want; looked up once for all tensors that are divided and wanted alike."""
    known: dict[tuple[int, Shape, Box], Int64s] = {}
    tensors, numbers, cells = [], [], []
    for number, (tensor, box) in enumerate(wants):
        if not box.numel:
            continue
        shape = files.manifest.shape(tensor)
        key = (files.manifest.body.partitions[tensor], shape, box)
        met = known.get(key)
        if met is None:
            met = known[key] = files.cells(tensor).meeting(shape, box)
        tensors.append(tensor)
        numbers.append(number)
        cells.append(met)
    return tensors, numbers, cells


def _read(files: Files, wants: Sequence[Want], number: int, tensor: int, cell: int, offset: int) -> Read | None:
    cells: Cells = files.cells(tensor)
    part, box = cells.part(cell), wants[number].box
    itemsize = int(files.itemsizes[tensor])
    base = offset + int(cells.within[cell]) * itemsize
    if isinstance(part, FlatRange):
        return _read_range(number, files.manifest.shape(tensor), part, box, base, itemsize)
    common = intersect(part, box)
    if common is None:
        return None
    inner = common.relative_to(part.start)
    first, last = _span(part.size, inner)
    return Read(number, base + first * itemsize, base + last * itemsize, first, part.size, part.start)


def _read_range(number: int, shape: Shape, part: FlatRange, box: Box, base: int, itemsize: int) -> Read | None:
    low, high = _span(shape, box)
    first, last = max(part.start, low), min(part.stop, high)
    if not any(intersect(piece, box) for _, piece in flat_boxes(shape, first, last)):
        return None
    start = base + (first - part.start) * itemsize
    return Read(number, start, start + (last - first) * itemsize, first, shape, (0,) * len(shape))


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
