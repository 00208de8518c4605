"""Tensors that Megatron-core up to 0.15 stored as ranges of their parts (``fully_sharded_model_space``).

A tensor of shape ``[X, Y]``, cut into parts of shape ``[x, y]``, is stored as one of shape ``[X // x, Y // y, x * y]``.
Each item is a range of the last axis: elements of one part, in its row-major order.
"""

from __future__ import annotations

from math import prod

from holdfast.geometry import Box, Shape, flat_boxes
from holdfast.interop.item_places import TensorItems
from holdfast.interop.pickle_machine import PickleError


def with_whole_shape(stored: TensorItems, shape: Shape) -> TensorItems:
    """The tensor of this shape that is `stored` in ranges: its parts are boxes, of which an item has several.

    Raises `PickleError` where the stored shape is not one for `shape`.
    """
    counts = stored.shape[:-1]
    fits = len(counts) == len(shape) and all(
        number and extent % number == 0 for number, extent in zip(counts, shape, strict=False)
    )
    local = tuple(extent // number for number, extent in zip(counts, shape, strict=True)) if fits else ()
    if not fits or stored.shape[-1] != prod(local):
        raise PickleError(f"a tensor of shape {list(shape)} is stored as ranges in the shape {list(stored.shape)}")
    parts = []
    for held, item in stored.parts:
        if held.size[:-1] != (1,) * len(local):
            raise PickleError("an item has ranges of several parts of a tensor")
        corner = [at * extent for at, extent in zip(held.start, local, strict=False)]
        first = held.start[-1]
        for offset, box in flat_boxes(local, first, first + held.size[-1]):
            start = tuple(below + at for below, at in zip(corner, box.start, strict=True))
            parts.append((Box(start, box.size), item._replace(stored=held.size, first=offset)))
    return TensorItems(stored.dtype, shape, parts)
