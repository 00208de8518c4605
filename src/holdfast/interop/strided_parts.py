"""A strided view of a storage as boxes whose elements lie in row-major order."""

from __future__ import annotations

from math import prod
from typing import Final, NamedTuple

import numpy as np

from holdfast.format.manifest import MAX_AXES, MAX_NUMEL
from holdfast.geometry import Int64s
from holdfast.interop.torch_globals import PickledTensor

#: Most boxes of one tensor: each is planned and read by itself.
_MAX_PARTS: Final = 1 << 16


class StridedParts(NamedTuple):
    """The boxes of a tensor (arrays ``[parts, axes]``), and the place of each in the storage, in elements."""

    starts: Int64s
    sizes: Int64s
    firsts: Int64s


def is_possible(tensor: PickledTensor) -> bool:
    """Whether shape and strides are those of a tensor that the tables can hold."""
    if len(tensor.shape) != len(tensor.strides) or len(tensor.shape) > MAX_AXES:
        return False
    return max(prod(filter(None, tensor.shape)), behind(tensor), *tensor.strides, 0) <= MAX_NUMEL


def behind(tensor: PickledTensor) -> int:
    """The number of elements that a storage needs for this view of it."""
    if not prod(tensor.shape):
        return 0
    steps = ((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.strides, strict=True))
    return tensor.first + sum(steps) + 1


def is_row_major(tensor: PickledTensor) -> bool:
    """Whether the elements lie in row-major order, one after another."""
    return len(tensor.shape) == len(tensor.strides) and not _num_outer(tensor)


def strided_parts(tensor: PickledTensor) -> StridedParts | None:
    """The largest boxes of a possible tensor that are in row-major order in its storage. An empty one has one box.

    None for a tensor that would be too many boxes, such as the transpose of a large matrix.
    """
    shape = np.asarray(tensor.shape, np.int64)
    num_outer = _num_outer(tensor) if prod(tensor.shape) else 0
    num_parts = prod(tensor.shape[:num_outer])
    if num_parts > _MAX_PARTS:
        return None
    starts = np.zeros((num_parts, len(shape)), np.int64)
    left = np.arange(num_parts)
    for axis in reversed(range(num_outer)):
        left, starts[:, axis] = np.divmod(left, shape[axis])
    sizes = np.tile(shape, (num_parts, 1))
    sizes[:, :num_outer] = 1
    return StridedParts(starts, sizes, tensor.first + starts @ np.asarray(tensor.strides, np.int64))


def _num_outer(tensor: PickledTensor) -> int:
    """The number of axes before those that are in row-major order."""
    stride = 1
    for axis in reversed(range(len(tensor.shape))):
        extent = tensor.shape[axis]
        if extent != 1 and tensor.strides[axis] != stride:
            return axis + 1
        stride *= extent
    return 0
