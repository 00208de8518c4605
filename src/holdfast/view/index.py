"""Indexing of stored tensors: the elements that an index selects, and the parts that are read for them."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from types import EllipsisType
from typing import NamedTuple

from holdfast.format.container import BLOCK_NBYTES
from holdfast.geometry import Box, Shape
from holdfast.wording import kind_of

#: The items with which a lazy tensor can be indexed.
Index = int | slice | EllipsisType


@dataclass(frozen=True, slots=True)
class Lattice:
    """Elements ``start + step * [0, count)`` per axis; steps are positive."""

    start: Shape
    count: Shape
    step: Shape

    @property
    def box(self) -> Box:
        """The smallest box that holds the elements."""
        pairs = zip(self.count, self.step, strict=True)
        return Box(self.start, tuple((n - 1) * step + 1 if n else 0 for n, step in pairs))

    @property
    def is_dense(self) -> bool:
        """Whether the lattice has all elements of its box."""
        return all(step == 1 for step in self.step)


class SlicedElements(NamedTuple):
    """The elements that an index selects, the axes of the result that it reverses, and the shape of the result."""

    lattice: Lattice
    flipped: tuple[int, ...]
    shape: Shape


def select(index: Index | tuple[Index, ...], shape: Shape) -> SlicedElements:
    """The elements that `index` selects from a tensor of `shape`, by numpy's rules. Raises `IndexError` or
    `TypeError`."""
    start: list[int] = []
    count: list[int] = []
    step: list[int] = []
    flipped: list[int] = []
    kept: list[int] = []
    for item, extent in zip(_filled(index, shape), shape, strict=True):
        if isinstance(item, slice):
            picked = range(*item.indices(extent))
            start.append(min(picked[0], picked[-1]) if picked else 0)
            count.append(len(picked))
            step.append(abs(picked.step) if len(picked) > 1 else 1)
            if picked.step < 0:
                flipped.append(len(kept))
            kept.append(len(picked))
        else:
            number = _number(item)
            if not -extent <= number < extent:
                raise IndexError(f"index {number} is out of range for an axis of {extent}")
            start.append(number % extent)
            count.append(1)
            step.append(1)
    return SlicedElements(Lattice(tuple(start), tuple(count), tuple(step)), tuple(flipped), tuple(kept))


def _number(item: object) -> int:
    """`item` as an integer, which selects one position of an axis. Raises `TypeError` for anything else."""
    refusal = f"index a stored tensor by integers, slices and ..., not by {kind_of(item)}; or read it, then index that"
    if isinstance(item, bool):  # numpy would use it as a mask
        raise TypeError(refusal)
    try:
        return operator.index(item)  # type: ignore[arg-type]  # raises for anything that is not an integer
    except TypeError as error:
        raise TypeError(refusal) from error


def _filled(index: Index | tuple[Index, ...], shape: Shape) -> list[int | slice]:
    """`index` with an item for each axis."""
    items = index if isinstance(index, tuple) else (index,)
    given = [item for item in items if not isinstance(item, EllipsisType)]
    if len(items) - len(given) > 1 or len(given) > len(shape):
        raise IndexError(f"cannot index a tensor of shape {list(shape)} with {index!r}")
    at = next((i for i, item in enumerate(items) if isinstance(item, EllipsisType)), len(items))
    return [*given[:at], *[slice(None)] * (len(shape) - len(given)), *given[at:]]


def independent(lattice: Lattice, itemsize: int) -> Iterator[tuple[Lattice, tuple[slice, ...]]]:
    """Split `lattice` along its first axis with a step if the gaps there are large enough to be worth a separate
    request.

    Yields each part, and its position in the result.
    """
    size = lattice.box.size
    axis = next((axis for axis, step in enumerate(lattice.step) if step > 1), None)
    if axis is None or lattice.step[axis] * prod(size[axis + 1 :]) * itemsize < 2 * BLOCK_NBYTES:
        yield lattice, tuple(slice(0, n) for n in lattice.count)
        return
    for number in range(lattice.count[axis]):
        start, count, step = list(lattice.start), list(lattice.count), list(lattice.step)
        start[axis] += number * step[axis]
        count[axis] = step[axis] = 1
        to = [slice(0, n) for n in lattice.count]
        to[axis] = slice(number, number + 1)
        yield Lattice(tuple(start), tuple(count), tuple(step)), tuple(to)
