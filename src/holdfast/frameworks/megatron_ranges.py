"""Ranges of a local memory as boxes of the strided views that Megatron cuts it into; pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import prod
from typing import NamedTuple

from holdfast.geometry import Box, Shape, flat_boxes, intersect


class StridedPart(NamedTuple):
    """The elements of a memory that a view of it shows: the number of its first element, its size and its strides."""

    offset: int
    size: Shape
    strides: Shape

    @property
    def is_dense(self) -> bool:
        """Whether the elements are one range of the memory, in row-major order."""
        return self.strides_of_long_axes == dense_part(0, self.size).strides_of_long_axes

    @property
    def strides_of_long_axes(self) -> Shape:
        """The strides of the axes with more than one element; those of all others mean nothing."""
        return tuple(stride for stride, extent in zip(self.strides, self.size, strict=True) if extent > 1)


class HeldBox(NamedTuple):
    """A box in the coordinates of a view, and the number of its first element in the memory."""

    box: Box
    first: int


def dense_part(offset: int, size: Shape) -> StridedPart:
    """The part that is one range of the memory in row-major order."""
    return StridedPart(offset, size, tuple(prod(size[axis + 1 :]) for axis in range(len(size))))


def boxes_in_range(view: StridedPart, start: int, stop: int) -> Iterator[HeldBox]:
    """The elements of `view` that lie in ``[start, stop)`` of the memory, as disjoint boxes of the view.

    The strides of a view of chunks, transposed axes and inserted axes are those of some shape of the whole memory, in
    which the view is a box. A flat range of that shape is few boxes, each of which is cut by that of the view. Raises
    `ValueError` for a view that is no such box.
    """
    if 0 in view.size:
        return
    axes = sorted((axis for axis, extent in enumerate(view.size) if extent > 1), key=lambda axis: -view.strides[axis])
    strides = [view.strides[axis] for axis in axes]
    sizes = [view.size[axis] for axis in axes]
    if not strides or strides[-1] != 1:
        strides.append(1)
        sizes.append(1)
    last = view.offset + sum((extent - 1) * stride for extent, stride in zip(sizes, strides, strict=True))
    if any(stride < 1 for stride in strides) or any(outer % inner for outer, inner in pairwise(strides)):
        raise ValueError(f"{view} is no box of a shape of its memory")
    extents = (last // strides[0] + 1, *(outer // inner for outer, inner in pairwise(strides)))
    corner = tuple(view.offset // stride % extent for stride, extent in zip(strides, extents, strict=True))
    shown = Box(corner, tuple(sizes))
    if any(end > extent for end, extent in zip(shown.stop, extents, strict=True)):
        raise ValueError(f"{view} is no box of a shape of its memory")
    for _, part in flat_boxes(extents, start, min(stop, prod(extents))):
        common = intersect(part, shown)
        if common is not None:
            first = sum(at * stride for at, stride in zip(common.start, strides, strict=True))
            yield HeldBox(_in_view(common.relative_to(corner), axes, len(view.size)), first)


def _in_view(box: Box, axes: list[int], num_axes: int) -> Box:
    """A box over `axes`, and perhaps one axis more, as a box over all axes of the view."""
    start, size = [0] * num_axes, [1] * num_axes
    for axis, at, extent in zip(axes, box.start, box.size, strict=False):
        start[axis], size[axis] = at, extent
    return Box(tuple(start), tuple(size))


def is_one_range(box: Box, shape: Shape) -> bool:
    """Whether the elements of a box are one range of the row-major order of a tensor of `shape`."""
    long = next((axis for axis, extent in enumerate(box.size) if extent > 1), len(shape))
    return box.size[long + 1 :] == shape[long + 1 :]


def flat_position(index: Shape, shape: Shape) -> int:
    """The position of an element in the row-major order of a tensor of `shape`."""
    return sum(at * prod(shape[axis + 1 :]) for axis, at in enumerate(index))
