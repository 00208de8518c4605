"""The places of parameters' elements in the flat tensors of DeepSpeed's ranks. Pure arithmetic.

ZeRO-1 and ZeRO-2 (and `BF16_Optimizer`) put the parameters of a group one behind the other, pad the end, and cut the
whole into equal parts, one for each rank. ZeRO-3 cuts each parameter into equal parts, pads the last of them, and puts
each rank's parts of a sub-group one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import Final, NamedTuple

import numpy as np

from holdfast.geometry import FlatRange, Int64s, Shape, flat_boxes

#: DeepSpeed pads groups of ZeRO-1 and ZeRO-2 to a multiple of so many elements for each rank.
_ALIGNMENT: Final = 2


class FlatParts(NamedTuple):
    """The boxes of a tensor: `starts` and `sizes` (arrays ``[boxes, axes]``), the rank that holds each, and the place
    of its first element in that rank's flat tensor."""

    starts: Int64s
    sizes: Int64s
    ranks: Int64s
    firsts: Int64s


def part_numel(numels: Sequence[int], paddings: Sequence[int], world_size: int) -> int:
    """The number of elements of each rank's part of a group of ZeRO-1 or ZeRO-2. `paddings` follow the parameters."""
    step = _ALIGNMENT * world_size
    return -(-(sum(numels) + sum(paddings)) // step) * step // world_size


def grouped(shapes: Sequence[Shape], paddings: Sequence[int], part: int) -> list[FlatParts]:
    """The pieces of the parameters of a group of ZeRO-1 or ZeRO-2, of which each rank has `part` elements."""
    found, first = [], 0
    for shape, padding in zip(shapes, paddings, strict=True):
        numel = prod(shape)
        cuts = sorted({first, first + numel, *range(-(-first // part) * part, first + numel, part)}) if numel else []
        found.append(
            _joined(shape, [(low - first, high - first, low // part, low % part) for low, high in pairwise(cuts)])
        )
        first += numel + padding
    return found


def partitioned(shapes: Sequence[Shape], world_size: int) -> list[FlatParts]:
    """The pieces of the parameters of a sub-group of ZeRO-3."""
    found, first = [], 0
    for shape in shapes:
        pieces = partition(shape, world_size)
        found.append(pieces._replace(firsts=pieces.firsts + first))
        first += share(shape, world_size)
    return found


def share(shape: Shape, world_size: int) -> int:
    """The number of elements that each rank has of a parameter of ZeRO-3, with padding."""
    return -(-prod(shape) // world_size)


@lru_cache(maxsize=1024)  # thousands of parameters have few shapes
def partition(shape: Shape, world_size: int) -> FlatParts:
    """The pieces of one parameter that each rank holds by itself."""
    numel, part = prod(shape), share(shape, world_size)
    ranges = ((rank * part, min((rank + 1) * part, numel), rank, 0) for rank in range(world_size))
    return _joined(shape, [each for each in ranges if each[0] < each[1]])


def own_range(first: int, numel: int, low: int, high: int) -> tuple[FlatRange, int]:
    """The elements of a parameter at ``[first, first + numel)`` of a group of ZeRO-1 or ZeRO-2 that lie in a rank's
    part, ``[low, high)``, and the place of the first of them in that part."""
    start, stop = max(first, low), min(first + numel, high)
    return (FlatRange(start - first, stop - first), start - low) if start < stop else (FlatRange(0, 0), 0)


def own_share(shape: Shape, rank: int, world_size: int) -> FlatRange:
    """The elements of a parameter of ZeRO-3 that a rank has."""
    numel, part = prod(shape), share(shape, world_size)
    return FlatRange(min(rank * part, numel), min((rank + 1) * part, numel))


def whole_piece(shape: Shape) -> FlatParts:
    """A tensor in one piece, of rank 0."""
    nothing = np.zeros(1, np.int64)
    sizes = np.asarray([shape], np.int64).reshape(1, len(shape))
    return FlatParts(np.zeros_like(sizes), sizes, nothing, nothing)


def _joined(shape: Shape, ranges: Sequence[tuple[int, int, int, int]]) -> FlatParts:
    """The boxes of flat ranges ``(start, stop, rank, first)`` of a tensor."""
    starts, sizes, ranks, firsts = [], [], [], []
    for low, high, rank, first in ranges:
        for offset, box in flat_boxes(shape, low, high):
            starts.append(box.start)
            sizes.append(box.size)
            ranks.append(rank)
            firsts.append(first + offset)
    columns = (len(ranks), len(shape))
    return FlatParts(
        np.asarray(starts, np.int64).reshape(columns),
        np.asarray(sizes, np.int64).reshape(columns),
        np.asarray(ranks, np.int64),
        np.asarray(firsts, np.int64),
    )
