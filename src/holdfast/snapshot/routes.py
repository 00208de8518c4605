"""Routes: the place in a slot of each part of a state, computed once per plan and slot for all saves that follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from holdfast.geometry import Box, FlatRange, flat_boxes
from holdfast.state.collect import LocalTensor
from holdfast.state.local_memory import LocalPieces, carried
from holdfast.store.base import Bytes

#: Dtypes that torch copies bit for bit (a copy of bools, for example, only keeps their truth values), each with the
#: numpy type of the same size.
_EXACT: dict[torch.dtype, type[np.generic]] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.bfloat16: np.int16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
}

Tensors = Mapping[str, LocalTensor]
#: Target and source of a copy, of one dtype and shape.
Pair = tuple[torch.Tensor, torch.Tensor]


class RoutedPart(NamedTuple):
    """A part of the tensor `name`, and the offset in the slot where it starts, in bytes."""

    name: str
    part: Box | FlatRange
    start: int


class Routes:
    """The routes of `parts`, which `rank` holds, into `data`. Keeps no memory of the state alive.

    Making thousands of views costs more time than the copy itself, and saves come often. So this keeps the views of the
    slot, and makes none of the state's tensors that are copied whole, as most are.
    """

    def __init__(self, parts: Sequence[RoutedPart], data: Bytes, *, rank: int) -> None:
        self._parts = parts
        self._rank = rank
        self._data = data
        #: By part number, the target of a part that is all this rank holds of a tensor, once it has been copied.
        self._whole: list[torch.Tensor | None] = [None] * len(parts)

    def pairs(self, tensors: Tensors) -> Iterator[Pair]:
        """The pairs to copy for the parts of `tensors`."""
        pieces = LocalPieces(self._rank)
        for number, (part, target) in enumerate(zip(self._parts, self._whole, strict=True)):
            held = tensors.get(part.name)
            if held is None:
                continue
            if target is not None:
                yield target, held.memory[0]
            else:
                yield from self._pairs(number, held, pieces)

    def _pairs(self, number: int, held: LocalTensor, pieces: LocalPieces) -> Iterator[Pair]:
        part = self._parts[number]
        source = pieces.source(held.layout, held.memory, part.part)
        if source.view is held.memory[0] and source.numel == source.view.numel() and source.view.dtype in _EXACT:
            target = self._whole[number] = _like(source.view, self._data, part.start)
            yield target, source.view
            return
        view = carried(source.view)
        target = torch.from_numpy(self._data[part.start : part.start + source.nbytes]).view(view.dtype)
        if source.numel == view.numel():
            yield target.view(view.shape), view
        elif view.is_contiguous():
            yield target, view.reshape(-1)[source.first : source.first + source.numel]
        else:
            for offset, box in flat_boxes(tuple(view.shape), source.first, source.first + source.numel):
                yield target[offset : offset + box.numel].view(box.size), view[box.slices()]


def _like(tensor: torch.Tensor, data: Bytes, start: int) -> torch.Tensor:
    """The bytes of `data` from `start` on, with the dtype and shape of `tensor`."""
    # torch releases the interpreter while it makes a view, so that beside a busy Python thread each of thousands of
    # views may cost this thread its turn. numpy keeps the interpreter.
    view = torch.from_numpy(np.ndarray(tuple(tensor.shape), _EXACT[tensor.dtype], data, start))
    return view if view.dtype == tensor.dtype else view.view(tensor.dtype)
