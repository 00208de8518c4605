"""Logical tensors as parts of stored tensors, each at its place. Pure.

A part is a box of the logical tensor and, element by element, a box of one stored tensor, perhaps with its axes in
another order, or with more or fewer axes of one element. So a load reads a fused, split, stacked or transposed tensor
by boxes, like any other tensor, and the target of each read is a view of memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import gcd
from typing import NamedTuple

import msgspec

from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import DecodedTable
from holdfast.geometry import Box, Shape, intersect, whole

#: The logical axis of a stored tensor's axis that the logical tensor lacks.
NO_AXIS = -1

_FLOATS = frozenset(name for name in DTYPES if name.startswith(("float", "bfloat"))) - {"float4_e2m1fn_x2"}
_COMPLEX = frozenset(name for name in DTYPES if name.startswith("complex"))
_INTEGERS = {name: DTYPES[name].itemsize for name in DTYPES if name.startswith(("int", "uint"))}


class StoredTensor(NamedTuple):
    """Dtype and shape of a tensor of the checkpoint, as it is stored or after a mapping."""

    dtype: str
    shape: Shape


class MappedPart(msgspec.Struct, frozen=True, gc=False):
    """A part of a logical tensor: `box`, whose elements are those of the stored tensor `source` from `start` on.

    ``axes[j]`` is the logical axis that corresponds to axis ``j`` of `source`, or `NO_AXIS` where none does. An axis
    without a counterpart on the other side has one element in the part. Without a `source` nothing is stored: the
    elements are 0 where `zero` is true, else they keep their live values.
    """

    box: Box
    source: str | None
    start: Shape = ()
    axes: tuple[int, ...] = ()
    zero: bool = False

    def meet(self, box: Box) -> tuple[Box, Box] | None:
        """The intersection of the part with `box`, and its box in the stored tensor; None for no intersection."""
        common = intersect(self.box, box)
        if common is None:
            return None
        start = tuple(
            first if axis == NO_AXIS else first + common.start[axis] - self.box.start[axis]
            for first, axis in zip(self.start, self.axes, strict=True)
        )
        return common, Box(start, tuple(1 if axis == NO_AXIS else common.size[axis] for axis in self.axes))

    def between(self, axis: int, low: int, high: int, *, origin: int) -> MappedPart:
        """The slice ``[low, high)`` of the part along `axis`, in coordinates that begin at `origin` on that axis.

        The slice must lie in the part.
        """
        behind = low - self.box.start[axis]
        start = tuple(
            first + behind if mine == axis else first for first, mine in zip(self.start, self.axes, strict=True)
        )
        box = Box(_with(self.box.start, axis, low - origin), _with(self.box.size, axis, high - low))
        return MappedPart(box, self.source, start, self.axes, self.zero)

    def moved(self, axis: int, by: int) -> MappedPart:
        """The part, moved `by` elements along `axis`."""
        box = Box(_with(self.box.start, axis, self.box.start[axis] + by), self.box.size)
        return MappedPart(box, self.source, self.start, self.axes, self.zero)

    def with_axis(self, axis: int, at: int) -> MappedPart:
        """The part in a tensor with one more axis, before axis number `axis`; the part is at index `at` of it."""
        box = Box(_inserted(self.box.start, axis, at), _inserted(self.box.size, axis, 1))
        axes = tuple(mine + (mine >= axis) for mine in self.axes)
        return MappedPart(box, self.source, self.start, axes, self.zero)

    def without_axis(self, axis: int) -> MappedPart:
        """The part, one element along `axis`, in a tensor without that axis."""
        box = Box(_deleted(self.box.start, axis), _deleted(self.box.size, axis))
        axes = tuple(NO_AXIS if mine == axis else mine - (mine > axis) for mine in self.axes)
        return MappedPart(box, self.source, self.start, axes, self.zero)

    def permuted(self, order: Sequence[int]) -> MappedPart:
        """The part in a tensor whose axis ``i`` is axis ``order[i]`` of this one."""
        box = Box(*(tuple(numbers[axis] for axis in order) for numbers in self.box))
        axes = tuple(NO_AXIS if mine == NO_AXIS else order.index(mine) for mine in self.axes)
        return MappedPart(box, self.source, self.start, axes, self.zero)


Parts = tuple[MappedPart, ...]


class Made(NamedTuple):
    """A logical tensor and its parts, which cover it exactly once. An empty tensor has no parts."""

    dtype: str
    shape: Shape
    parts: Parts


class ImpossibleError(Exception):
    """A rule cannot be applied to these tensors; the message says why."""


def as_stored(name: str, stored: StoredTensor) -> Made:
    """The logical tensor that is the stored tensor `name`, unchanged."""
    shape = stored.shape
    part = MappedPart(whole(shape), name, (0,) * len(shape), tuple(range(len(shape))))
    return Made(stored.dtype, shape, (part,) if part.box.numel else ())


def castable(stored: str, dtype: str) -> bool:
    """Whether a user may ask for a cast from `stored` to `dtype`: the precision may change, the kind of number not.

    Integers become only integer types that hold all their values.
    """
    if stored in _INTEGERS and dtype in _INTEGERS:
        unsigned, wanted_unsigned = stored.startswith("u"), dtype.startswith("u")
        if unsigned == wanted_unsigned:
            return _INTEGERS[stored] <= _INTEGERS[dtype]
        return unsigned and _INTEGERS[stored] < _INTEGERS[dtype]
    return any(stored in kind and dtype in kind for kind in (_FLOATS, _COMPLEX))


def is_floating(dtype: str) -> bool:
    """Whether `dtype` is a floating dtype that casts convert from and to."""
    return dtype in _FLOATS


def recast(tensor: Made, dtype: str) -> Made:
    """The tensor with elements of `dtype`."""
    if tensor.dtype != dtype and not castable(tensor.dtype, dtype):
        raise ImpossibleError(f"a cast from {tensor.dtype} to {dtype} would change the kind of number")
    return tensor._replace(dtype=dtype)


def split(tensor: Made, axis: int, shares: Sequence[int], groups: int) -> list[Made]:
    """Divide each of `groups` equal groups along `axis` in the ratio of `shares`."""
    axis = _axis(tensor, axis)
    common = gcd(*shares)
    shares = [share // common for share in shares]
    extent, num_units = tensor.shape[axis], groups * sum(shares)
    if extent % num_units:
        raise ImpossibleError(
            f"axis {axis} of shape {tensor.shape} cannot be divided into {groups} groups of shares {tuple(shares)}: "
            f"{extent} is not a multiple of {num_units}"
        )
    sizes = [share * (extent // num_units) for share in shares]
    slabs = list(_slabs(tensor.parts, axis, [0, *accumulate(sizes * groups)]))
    return [
        Made(
            tensor.dtype, _with(tensor.shape, axis, size * groups), _end_to_end(slabs[index :: len(sizes)], axis, size)
        )
        for index, size in enumerate(sizes)
    ]


def fuse(tensors: Sequence[Made], axis: int, groups: int) -> Made:
    """Lay tensors end to end along `axis`. With `groups`, the equal groups of the tensors alternate."""
    axis = _axis(tensors[0], axis)
    shapes = [tensor.shape for tensor in tensors]
    if any(len(shape) <= axis or _deleted(shape, axis) != _deleted(shapes[0], axis) for shape in shapes):
        raise ImpossibleError(f"shapes {_listed(shapes)} differ in more than axis {axis}")
    if any(shape[axis] % groups for shape in shapes):
        raise ImpossibleError(f"axis {axis} of shapes {_listed(shapes)} cannot be divided into {groups} groups")
    dtype = _one_dtype(tensors)
    sizes = [shape[axis] // groups for shape in shapes]
    parts: list[MappedPart] = []
    for tensor, size, before in zip(tensors, sizes, accumulate(sizes, initial=0), strict=False):
        slabs = _slabs(tensor.parts, axis, [size * group for group in range(groups + 1)])
        for group, slab in enumerate(slabs):
            parts += [part.moved(axis, group * sum(sizes) + before) for part in slab]
    return Made(dtype, _with(shapes[0], axis, sum(sizes) * groups), tuple(parts))


def stack(tensors: Sequence[Made], axis: int) -> Made:
    """Lay tensors of one shape along a new `axis`."""
    shapes = [tensor.shape for tensor in tensors]
    if len(set(shapes)) > 1:
        raise ImpossibleError(f"shapes {_listed(shapes)} differ")
    num_axes = len(shapes[0]) + 1
    if not -num_axes <= axis < num_axes:
        raise ImpossibleError(f"tensors of shape {shapes[0]} cannot be stacked along axis {axis}")
    axis %= num_axes
    parts = (part.with_axis(axis, at) for at, tensor in enumerate(tensors) for part in tensor.parts)
    return Made(_one_dtype(tensors), _inserted(shapes[0], axis, len(tensors)), tuple(parts))


def unstack(tensor: Made, axis: int) -> list[Made]:
    """One tensor for each index of `axis`, without that axis."""
    axis = _axis(tensor, axis)
    slabs = _slabs(tensor.parts, axis, range(tensor.shape[axis] + 1))
    shape = _deleted(tensor.shape, axis)
    return [Made(tensor.dtype, shape, tuple(part.without_axis(axis) for part in slab)) for slab in slabs]


def transpose(tensor: Made, order: Sequence[int]) -> Made:
    """The tensor whose axis ``i`` is axis ``order[i]`` of this one."""
    if len(order) != len(tensor.shape):
        raise ImpossibleError(f"axes {tuple(order)} are not the axes of shape {tensor.shape}")
    shape = tuple(tensor.shape[axis] for axis in order)
    return Made(tensor.dtype, shape, tuple(part.permuted(order) for part in tensor.parts))


def pad(tensor: Made, axis: int, size: int, *, zero: bool) -> Made:
    """The tensor with `size` elements along `axis`. Added elements are 0 with `zero`, else they keep live values."""
    axis = _axis(tensor, axis)
    shape, extent = _with(tensor.shape, axis, size), tensor.shape[axis]
    if size < extent:
        raise ImpossibleError(f"shape {tensor.shape} is not shorter than {shape}")
    beyond = MappedPart(
        Box(_with((0,) * len(shape), axis, extent), _with(shape, axis, size - extent)), source=None, zero=zero
    )
    return Made(tensor.dtype, shape, (*tensor.parts, beyond) if beyond.box.numel else tensor.parts)


def crop(tensor: Made, axis: int, size: int) -> Made:
    """The tensor's first `size` elements along `axis`."""
    axis = _axis(tensor, axis)
    shape = _with(tensor.shape, axis, size)
    if size > tensor.shape[axis]:
        raise ImpossibleError(f"shape {tensor.shape} is not longer than {shape}")
    (slab,) = _slabs(tensor.parts, axis, (0, size))
    return Made(tensor.dtype, shape, tuple(slab) if size else ())


def _slabs(parts: Parts, axis: int, cuts: Sequence[int]) -> Iterator[list[MappedPart]]:
    """The parts between neighbouring `cuts` (ascending) along `axis`, in coordinates that begin at the lower cut."""
    slabs: list[list[MappedPart]] = [[] for _ in cuts[1:]]
    for part in parts:
        low = part.box.start[axis]
        high = low + part.box.size[axis]
        for index in range(bisect_right(cuts, low) - 1, len(slabs)):
            first, last = cuts[index], cuts[index + 1]
            if first >= high:
                break
            if max(low, first) < min(high, last):
                slabs[index].append(part.between(axis, max(low, first), min(high, last), origin=first))
    yield from slabs


def _end_to_end(slabs: Sequence[list[MappedPart]], axis: int, size: int) -> Parts:
    return tuple(part.moved(axis, index * size) for index, slab in enumerate(slabs) for part in slab)


def _axis(tensor: Made, axis: int) -> int:
    num_axes = len(tensor.shape)
    if not -num_axes <= axis < num_axes:
        raise ImpossibleError(f"shape {tensor.shape} has no axis {axis}")
    return axis % num_axes


def _one_dtype(tensors: Sequence[Made]) -> str:
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1:
        raise ImpossibleError(f"dtypes {', '.join(sorted(dtypes))} differ; add a Cast rule before this one")
    return tensors[0].dtype


def _listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, dict.fromkeys(shapes)))


def _with(shape: Shape, axis: int, value: int) -> Shape:
    return (*shape[:axis], value, *shape[axis + 1 :])


def _inserted(shape: Shape, axis: int, value: int) -> Shape:
    return (*shape[:axis], value, *shape[axis:])


def _deleted(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def stored_tensors(manifest: DecodedTable) -> dict[str, StoredTensor]:
    """Dtype and shape of each tensor of a checkpoint."""
    body = manifest.body
    kinds = list(zip(body.dtypes, body.shapes, strict=True))
    known = {kind: StoredTensor(body.dtype_table[kind[0]], body.shape_table[kind[1]]) for kind in set(kinds)}
    return dict(zip(body.names, map(known.__getitem__, kinds), strict=True))
