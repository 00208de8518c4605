"""Boxes, flat ranges and exact coverage, in global coordinates. Pure Python and numpy.

A *box* is a start and a size per axis. A *flat range* is ``[start, stop)`` of a tensor's row-major order; it
is the disjoint union of at most ``2n - 1`` boxes for ``n`` axes, each of them contiguous in the flat memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]
Int64s = npt.NDArray[np.int64]


class Box(NamedTuple):
    """An axis-aligned part of a tensor: ``start`` and ``size`` per axis."""

    start: Shape
    size: Shape

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a box without axes."""
        return prod(self.size)

    @property
    def stop(self) -> Shape:
        """First coordinate after the box, per axis."""
        return tuple(a + n for a, n in zip(self.start, self.size, strict=True))

    def relative_to(self, origin: Shape) -> Box:
        """The same box in coordinates whose zero is `origin`."""
        return Box(tuple(a - o for a, o in zip(self.start, origin, strict=True)), self.size)

    def slices(self) -> tuple[slice, ...]:
        """An index that selects the box from an array in the same coordinates."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))


class FlatRange(NamedTuple):
    """Elements ``[start, stop)`` of a tensor's row-major order."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@lru_cache(maxsize=1024)  # thousands of tensors have few shapes
def whole(shape: Shape) -> Box:
    """The box that covers a tensor of `shape`."""
    return Box((0,) * len(shape), shape)


def intersect(a: Box, b: Box) -> Box | None:
    """The common part of two boxes of one tensor, or None when they share no element."""
    start = tuple(max(p, q) for p, q in zip(a.start, b.start, strict=True))
    size = tuple(min(p, q) - s for p, q, s in zip(a.stop, b.stop, start, strict=True))
    if any(n <= 0 for n in size):
        return None
    return Box(start, size)


def subtract(a: Box, b: Box) -> list[Box]:
    """Disjoint boxes that together are `a` without `b` (at most two per axis)."""
    common = intersect(a, b)
    if common is None:
        return [a] if a.numel else []
    rest = []
    start, stop = list(a.start), list(a.stop)
    for axis in range(len(start)):
        for low, high in ((start[axis], common.start[axis]), (common.stop[axis], stop[axis])):
            if low < high:
                sizes = [e - s for s, e in zip(start, stop, strict=True)]
                sizes[axis] = high - low
                corner = list(start)
                corner[axis] = low
                rest.append(Box(tuple(corner), tuple(sizes)))
        start[axis], stop[axis] = common.start[axis], common.stop[axis]
    return rest


def flat_boxes(shape: Shape, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """The boxes of flat range ``[start, stop)`` of a tensor of `shape`, in memory order.

    Yields ``(offset, box)``: elements ``[start + offset, start + offset + box.numel)`` of the flat order are the
    box in row-major order. At most ``2n - 1`` boxes for ``n`` axes (one for ``n == 0``).
    """
    if start >= stop:
        return
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    position = start
    while position < stop:
        # The widest box that begins at this position: whole rows of the outermost axis that the position is aligned to.
        axis = next(
            (k for k, stride in enumerate(strides) if position % stride == 0 and stride <= stop - position), None
        )
        if axis is None:  # a tensor without axes has one element and no stride
            yield position - start, Box((), ())
            return
        coordinates = [position // stride % extent for stride, extent in zip(strides, shape, strict=True)]
        stride = strides[axis]
        rows = min((stop - position) // stride, shape[axis] - coordinates[axis])
        size = (1,) * axis + (rows,) + shape[axis + 1 :]
        yield position - start, Box(tuple(coordinates), size)
        position += rows * stride


def chunk_cuts(extent: int, parts: int) -> Int64s:
    """Cut points (``parts + 1`` of them) of an axis divided as ``torch.chunk`` does."""
    step = -(-extent // parts)
    return np.minimum(np.arange(parts + 1, dtype=np.int64) * step, extent)


@dataclass(frozen=True, slots=True)
class CoverageFault:
    """The first element, in row-major order, that boxes do not cover exactly once; they cover it `times` times."""

    tensor: int
    index: Shape
    times: int


def coverage_fault(shapes: Sequence[Shape], tensor: Int64s, starts: Int64s, sizes: Int64s) -> CoverageFault | None:
    """Check that boxes cover tensors exactly once; None when they do.

    `shapes` are the tensors' shapes, all of one number of axes ``n``; box ``i`` is ``starts[i], sizes[i]`` (arrays of
    shape ``[boxes, n]``) of tensor ``tensor[i]``. Boxes may not be empty and must lie inside their tensor.

    The indicator functions of the boxes add up to that of the tensor exactly when their mixed differences do,
    and the mixed difference of a box is a signed unit mass on each of its ``2^n`` corners. So the boxes cover the
    tensor exactly once if and only if all corner masses, minus those of the tensor, cancel; the first corner in
    row-major order that does not cancel is the first faulty element. O(2^n N log N), vectorised over all tensors.
    """
    num_axes = starts.shape[1]
    extents = np.asarray(shapes, dtype=np.int64).reshape(len(shapes), num_axes)
    filled = np.flatnonzero((extents > 0).all(axis=1))
    owners = np.concatenate([tensor, filled])
    lows = np.concatenate([starts, np.zeros((len(filled), num_axes), np.int64)])
    highs = np.concatenate([starts + sizes, extents[filled]])
    weights = np.concatenate([np.ones(len(tensor), np.int64), -np.ones(len(filled), np.int64)])
    # Leave out each axis that every box spans completely: it would only double the number of corners.
    axes = [k for k in range(num_axes) if (lows[:, k] != 0).any() or (highs[:, k] != extents[owners, k]).any()]
    corners, masses = _corners(owners, lows[:, axes], highs[:, axes], weights)
    order = _row_major_order(corners)
    corners, masses = corners[order], masses[order]
    heads = (
        np.flatnonzero(np.r_[True, (corners[1:] != corners[:-1]).any(axis=1)])
        if len(corners)
        else np.zeros(0, np.int64)
    )
    totals = np.add.reduceat(masses, heads) if len(heads) else masses
    bad = np.flatnonzero(totals)
    if not len(bad):
        return None
    first = corners[heads[bad[0]]]
    index = [0] * num_axes
    for axis, coordinate in zip(axes, first[1:].tolist(), strict=True):
        index[axis] = coordinate
    return CoverageFault(int(first[0]), tuple(index), 1 + int(totals[bad[0]]))


def _corners(owners: Int64s, lows: Int64s, highs: Int64s, weights: Int64s) -> tuple[Int64s, Int64s]:
    """Signed corner masses: rows ``(tensor, coordinates...)`` and the mass of each."""
    num_boxes, num_axes = lows.shape
    corners = np.empty((2**num_axes, num_boxes, 1 + num_axes), np.int64)
    masses = np.empty((2**num_axes, num_boxes), np.int64)
    for mask in range(2**num_axes):
        corners[mask, :, 0] = owners
        for axis in range(num_axes):
            corners[mask, :, 1 + axis] = highs[:, axis] if mask >> axis & 1 else lows[:, axis]
        masses[mask] = weights * (-1) ** mask.bit_count()
    return corners.reshape(-1, 1 + num_axes), masses.reshape(-1)


def _row_major_order(rows: Int64s) -> npt.NDArray[np.intp]:
    """The order that sorts non-negative `rows` lexicographically.

    One sort of packed keys where the keys fit into 63 bits, which is faster than a sort per column.
    """
    radices = [int(radix) + 1 for radix in rows.max(axis=0)] if len(rows) else []
    if prod(radices) >= 2**63:
        return np.lexsort(rows.T[::-1])
    keys = np.zeros(len(rows), np.int64)
    for column, radix in enumerate(radices):
        keys = keys * radix + rows[:, column]
    return np.argsort(keys)
