"""The intersection of a stored cell and a wanted box, as strided runs of elements that are adjacent in both. Pure.

Nearly all intersections in resharding are like this: rows or columns of a matrix, or slices along any one axis. Four
numbers describe one, whatever the shapes are, and few calls copy it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.geometry import Box, Int64s

Bools = npt.NDArray[np.bool_]


class StridedRun(NamedTuple):
    """Runs of `size` elements that begin `step` elements apart in the cell and `pitch` elements apart in the box.

    Both in row-major order; the first run begins at element `place` of the box.
    """

    place: int
    size: int
    step: int
    pitch: int

    def in_bytes(self, itemsize: int) -> StridedRun:
        """The same runs, counted in bytes."""
        return StridedRun(*(count * itemsize for count in self))


class CopySpan(NamedTuple):
    """`rows` runs of `size` elements each, to copy from element `at` of the data at hand to element `place` of the box.

    Each run begins one step further in the data and one pitch further in the box.
    """

    at: int
    place: int
    rows: int
    size: int


def copy_spans(run: StridedRun, skipped: int, count: int) -> Iterator[CopySpan]:
    """The spans that copy `count` elements of the cell, after the first `skipped` elements from the first run on.

    At most three spans: the rest of a run, whole runs, and the beginning of one.
    """
    place, size, step, pitch = run
    stop = skipped + count
    row, within = divmod(skipped, step)
    if within:
        rest = min(size - within, count)
        if rest > 0:
            yield CopySpan(0, place + row * pitch + within, 1, rest)
        row += 1
    rows = (stop - size) // step + 1 - row
    if rows > 0:
        yield CopySpan(row * step - skipped, place + row * pitch, rows, size)
        row += rows
    if row * step < stop:
        yield CopySpan(row * step - skipped, place + row * pitch, 1, stop - row * step)


def shared(starts: Int64s, sizes: Int64s, box: Box) -> tuple[Int64s, Int64s, Int64s]:
    """The elements that each cell shares with `box`; each must share some. `starts` and `sizes` are ``[cells, axes]``.

    Returns for each cell: the first shared element of its row-major order, the one behind the last, and its
    `StridedRun` as a row, with place -1 where the shared elements are not runs.
    """
    box_start, box_size = np.asarray(box.start, np.int64), np.asarray(box.size, np.int64)
    lows, highs = np.maximum(starts, box_start), np.minimum(starts + sizes, box_start + box_size)
    common = highs - lows
    firsts, lasts = _position(lows - starts, sizes), _position(highs - 1 - starts, sizes) + 1
    places, ends = _position(lows - box_start, box_size), _position(highs - 1 - box_start, box_size) + 1
    inner = _inner((common < sizes) | (common < box_size))
    size, step, pitch = (np.where(inner, each, 1).prod(axis=1) for each in (common, sizes, box_size))
    gaps = np.where(inner, 1, common).prod(axis=1) - 1
    apart = (lasts - firsts == gaps * step + size) & (ends - places == gaps * pitch + size)
    return firsts, lasts, np.stack([np.where(apart, places, -1), size, step, pitch], axis=1)


def _inner(partial: Bools) -> Bools:
    """A mask of the innermost axis of each row on which the overlap is only `partial`, and of the axes behind it.

    All axes where no overlap is partial. The axes behind it overlap completely, so they make no gaps.
    """
    numbers = np.arange(partial.shape[1])
    last: Int64s = np.max(np.where(partial, numbers, 0), axis=1, initial=0, keepdims=True)
    return numbers >= last


def _position(coordinates: Int64s, extents: Int64s) -> Int64s:
    """Row-major positions of coordinates, ``[cells, axes]``."""
    positions = np.zeros(len(coordinates), np.int64)
    for axis in range(coordinates.shape[1]):
        positions = positions * extents[..., axis] + coordinates[:, axis]
    return positions
