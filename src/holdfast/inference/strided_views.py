"""Views of a tensor as boxes of it: which box does each part of a view show, and how does the view lie in the box?

A view selects elements of the tensor's row-major order by an offset, sizes and strides, as torch's view operations do.
Narrowing, splitting, reshaping, permuting and expanding make such views. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Final, NamedTuple

from holdfast.geometry import Box, Shape, whole

#: A view in more parts than this is no layout; a step of a slice over a long axis makes one part for each index.
MAX_PARTS: Final = 4096


class StridedView(NamedTuple):
    """Elements of a tensor, by their numbers in its row-major order."""

    offset: int
    shape: Shape
    strides: Shape


@dataclass(frozen=True)
class ViewPart:
    """A part of a view (`within`, in its coordinates) that shows a whole `box` of the tensor.

    In contiguous memory of the box, the part is the view with these `sizes` and `strides`, reshaped to ``within.size``.
    """

    within: Box
    box: Box
    sizes: Shape
    strides: Shape


class _Factor(NamedTuple):
    """`steps` steps of `step` elements along axis `axis` of the tensor, by axis `of` of the view. Axis -1: no step."""

    steps: int
    axis: int
    step: int
    of: int


class _SplitAt(NamedTuple):
    """The view shows no single box; its parts before and after index `at` of `axis` may."""

    axis: int
    at: int


def view_parts(shape: Shape, view: StridedView) -> Iterator[ViewPart]:
    """The parts of `view` of a tensor of `shape`: disjoint, and together the view.

    Raises:
        ValueError: there are more than `MAX_PARTS` of them.
    """
    waiting = [(view.offset, whole(view.shape))] if prod(view.shape) else []
    number = 0
    while waiting:
        offset, within = waiting.pop()
        found = _part(shape, offset, within, view.strides)
        if isinstance(found, ViewPart):
            number += 1
            yield found
        else:
            axis, at = found
            first, rest = _halves(within, axis, at)
            waiting += [(offset + at * view.strides[axis], rest), (offset, first)]
        if number + len(waiting) > MAX_PARTS:
            raise ValueError(f"it selects elements that lie in more than {MAX_PARTS} boxes")


def _halves(box: Box, axis: int, at: int) -> tuple[Box, Box]:
    start, size = list(box.start), list(box.size)
    size[axis] = at
    first = Box(box.start, tuple(size))
    start[axis] += at
    size[axis] = box.size[axis] - at
    return first, Box(tuple(start), tuple(size))


def _part(shape: Shape, offset: int, within: Box, strides: Shape) -> ViewPart | _SplitAt:
    own = _row_major(shape)
    corner = tuple(offset // stride % extent for stride, extent in zip(own, shape, strict=True))
    factors: list[_Factor] = []
    for number, (count, stride) in enumerate(zip(within.size, strides, strict=True)):
        found = _factors(shape, own, corner, number, count, stride)
        if isinstance(found, _SplitAt):
            return found
        factors += found
    sizes = [1] * len(shape)
    for axis, extent in enumerate(shape):
        along = sorted((each for each in factors if each.axis == axis), key=lambda each: each.step)
        if along and corner[axis] + sum(each.step * (each.steps - 1) for each in along) >= extent:
            return _SplitAt(along[-1].of, max(_count_of(within, along[-1]) // 2, 1))
        for each in along:
            if each.step != sizes[axis]:  # a gap, or elements that occur twice
                return _SplitAt(each.of, max(_count_of(within, each) // 2, 1))
            sizes[axis] *= each.steps
    box = Box(corner, tuple(sizes))
    memory = _row_major(box.size)
    return ViewPart(
        within,
        box,
        tuple(each.steps for each in factors),
        tuple(0 if each.axis < 0 else each.step * memory[each.axis] for each in factors),
    )


def _count_of(within: Box, factor: _Factor) -> int:
    return within.size[factor.of]


def _factors(shape: Shape, own: Shape, corner: Shape, number: int, count: int, stride: int) -> list[_Factor] | _SplitAt:
    """Axis `number` of a view, as steps along axes of the tensor, outermost first."""
    if count == 1:
        return []
    if stride == 0:
        return [_Factor(count, -1, 0, number)]
    inner: list[_Factor] = []
    whole_count = count
    while count > 1:
        axis = next((k for k, s in enumerate(own) if shape[k] > 1 and s <= stride < s * shape[k]), None)
        if axis is None or stride % own[axis]:
            return _SplitAt(number, whole_count // 2)
        step = stride // own[axis]
        if corner[axis] + step * (count - 1) < shape[axis]:
            return [_Factor(count, axis, step, number), *inner]
        turn = shape[axis] // step  # steps until the next index of the axis before
        before = prod(each.steps for each in inner)
        if shape[axis] % step or corner[axis] >= step:
            return _SplitAt(number, before * -(-(shape[axis] - corner[axis]) // step))
        if count % turn:
            return _SplitAt(number, before * (count // turn * turn))
        inner = [_Factor(turn, axis, step, number), *inner]
        count, stride = count // turn, stride * turn
    return inner


def _row_major(shape: Shape) -> Shape:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
