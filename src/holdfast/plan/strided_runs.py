"""What a stored cell and a wanted box share, as strided runs of elements that are adjacent on both sides. Pure.

Nearly all that resharding copies is like this: rows of a matrix, columns of it, or slices along any one axis. It takes
four numbers whatever the shapes are, and few copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.geometry import Box, Int64s

Bools = npt.NDArray[np.bool_]


class StridedRun(NamedTuple):
    """Runs of `size` elements: they begin `step` elements apart in the cell and `pitch` apart in the box, both in
    row-major order, the first one at element `place` of the box."""

    place: int
    size: int
    step: int
    pitch: int


class CopySpan(NamedTuple):
    """`rows` times `size` elements, from element `at` of what is there to element `place` of the box, each time a step
    and a pitch further."""

    at: int
    place: int
    rows: int
    size: int


def copy_spans(run: StridedRun, skipped: int, count: int) -> Iterator[CopySpan]:
    """Where `count` elements of the cell go, which follow the `skipped` first ones from the first run on.

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
    """What cells share with `box`; all of them do. `starts` and `sizes` have the shape ``[cells, axes]``.

    Returns, of each cell, the first shared element of its row-major order, the one behind the last, and its
    `StridedRun` as a row, with place -1 where the shared elements are no runs.
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
    """The last axis of each row along which more is there than is shared, and the axes behind it; all where there is
    none. Along those behind it everything is shared, so they make no gap."""
    numbers = np.arange(partial.shape[1])
    last: Int64s = np.max(np.where(partial, numbers, 0), axis=1, initial=0, keepdims=True)
    return numbers >= last


def _position(coordinates: Int64s, extents: Int64s) -> Int64s:
    """Row-major positions of coordinates, ``[cells, axes]``."""
    positions = np.zeros(len(coordinates), np.int64)
    for axis in range(coordinates.shape[1]):
        positions = positions * extents[..., axis] + coordinates[:, axis]
    return positions
