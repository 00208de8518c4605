"""Intersections of many boxes of a tensor with its stored cells, all at once (`plan.load`: box by box). Pure."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from holdfast.format.partition import BoxCells, Cells, FlatCells, GridCells
from holdfast.geometry import Int64s, Shape


class Spans(NamedTuple):
    """Intersections of boxes and cells, as columns: the number of a box, the number of a cell, and a span of the cell.

    The span ``[first, last)`` reaches from the first to the last shared element, in the cell's own row-major order.
    """

    boxes: Int64s
    cells: Int64s
    firsts: Int64s
    lasts: Int64s


def intersect(cells: Cells, shape: Shape, starts: Int64s, sizes: Int64s) -> Spans:
    """All intersections of `cells` of a tensor of `shape` with boxes of it (``[boxes, axes]``), none of them empty."""
    if isinstance(cells, GridCells):
        return _on_grid(cells, starts, starts + sizes)
    if isinstance(cells, FlatCells):
        return _on_ranges(cells, shape, starts, sizes)
    return _on_boxes(cells, starts, starts + sizes)


def _on_grid(cells: GridCells, starts: Int64s, stops: Int64s) -> Spans:
    """Intersections with the cells of a grid: all cells between the cut points around a box."""
    lows, counts = [], []
    for axis, cuts in enumerate(cells.cuts):
        lows.append(np.searchsorted(cuts, starts[:, axis], side="right") - 1)
        counts.append(np.searchsorted(cuts, stops[:, axis], side="left") - lows[-1])
    rows, within = _expanded(np.prod(np.stack([np.ones(len(starts), np.int64), *counts]), axis=0))
    numbers, firsts, lasts = np.zeros((3, len(rows)), np.int64)
    stride = np.ones(len(rows), np.int64)
    behind = 1
    for axis in reversed(range(len(cells.cuts))):
        cuts, count = cells.cuts[axis], counts[axis][rows]
        within, turn = within // count, within % count
        at = lows[axis][rows] + turn
        begins = cuts[at]
        firsts += np.maximum(starts[rows, axis] - begins, 0) * stride
        lasts += (np.minimum(stops[rows, axis], cuts[at + 1]) - 1 - begins) * stride
        stride *= cuts[at + 1] - begins
        numbers += at * behind
        behind *= len(cuts) - 1
    return Spans(rows, numbers, firsts, lasts + 1)


def _on_ranges(cells: FlatCells, shape: Shape, starts: Int64s, sizes: Int64s) -> Spans:
    """Intersections with flat ranges: those between a box's first and last element, without those in its gaps."""
    strides = _strides(shape)
    low = starts @ strides
    high = (starts + sizes - 1) @ strides + 1
    begins = np.searchsorted(cells.cuts, low, side="right") - 1
    rows, within = _expanded(np.searchsorted(cells.cuts, high, side="left") - begins)
    numbers = begins[rows] + within
    firsts = np.maximum(cells.cuts[numbers], low[rows])
    lasts = np.minimum(cells.cuts[numbers + 1], high[rows])
    if (high - low != sizes.prod(axis=1)).any():
        counted = [_num_before(at, shape, starts[rows], sizes[rows]) for at in (firsts, lasts)]
        met = counted[1] > counted[0]
        rows, numbers, firsts, lasts = rows[met], numbers[met], firsts[met], lasts[met]
    return Spans(rows, numbers, firsts - cells.cuts[numbers], lasts - cells.cuts[numbers])


def _on_boxes(cells: BoxCells, starts: Int64s, stops: Int64s) -> Spans:
    ends = cells.starts + cells.sizes
    pairs = [
        np.flatnonzero((cells.starts < stop).all(axis=1) & (ends > start).all(axis=1))
        for start, stop in zip(starts, stops, strict=True)
    ]
    rows = np.repeat(np.arange(len(starts)), [len(met) for met in pairs])
    numbers = np.concatenate([np.zeros(0, np.int64), *pairs])
    begins = cells.starts[numbers]
    firsts, lasts = np.maximum(starts[rows], begins) - begins, np.minimum(stops[rows], ends[numbers]) - 1 - begins
    # Strides of each cell's own row-major order.
    sizes = cells.sizes[numbers]
    strides = np.cumprod(np.c_[sizes[:, 1:], np.ones(len(rows), np.int64)][:, ::-1], axis=1)[:, ::-1]
    return Spans(rows, numbers, (firsts * strides).sum(axis=1), (lasts * strides).sum(axis=1) + 1)


def _expanded(counts: Int64s) -> tuple[Int64s, Int64s]:
    """Row numbers, each ``i`` repeated ``counts[i]`` times, and for each the number of equal ones before it."""
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)


def _strides(shape: Shape) -> Int64s:
    return np.asarray([prod(shape[axis + 1 :]) for axis in range(len(shape))], np.int64)


def _num_before(positions: Int64s, shape: Shape, starts: Int64s, sizes: Int64s) -> Int64s:
    """The count of elements of each box that come before its position in the flat order of the tensor."""
    found = np.zeros(len(positions), np.int64)
    inside = np.ones(len(positions), np.bool_)
    rest = positions
    for axis, stride in enumerate(_strides(shape).tolist()):
        at, rest = rest // stride, rest % stride
        behind = sizes[:, axis + 1 :].prod(axis=1)
        ahead = at - starts[:, axis]
        found += np.where(inside, np.clip(ahead, 0, sizes[:, axis]) * behind, 0)
        inside &= (ahead >= 0) & (ahead < sizes[:, axis])
    return found
