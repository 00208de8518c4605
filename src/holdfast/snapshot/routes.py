"""Routes: where in a slot each part of a state goes. Worked out once per plan and slot, for all saves that follow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from holdfast.geometry import Box, FlatRange, flat_boxes
from holdfast.state.collect import LocalTensor
from holdfast.state.memory import LocalPieces, carried
from holdfast.store.base import Bytes

#: A copy within one of these types keeps every bit (one of bools, say, keeps what they mean); each with the type of
#: numpy whose memory looks the same.
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
#: Where elements go, and where they are: of one dtype and shape.
Pair = tuple[torch.Tensor, torch.Tensor]


class RoutedPart(NamedTuple):
    """A part of the tensor `name`, and the byte of the slot where it goes."""

    name: str
    part: Box | FlatRange
    start: int


class Routes:
    """The way of each of `parts`, which `rank` holds, into `data`. Keeps no memory of the state alive.

    Thousands of views cost more time than the copy of what they show, and saves come often. So those of the slot are
    kept, and of the state, whose tensors are mostly copied whole, none are made.
    """

    def __init__(self, parts: Sequence[RoutedPart], data: Bytes, *, rank: int) -> None:
        self._parts = parts
        self._rank = rank
        self._data = data
        #: Where parts go that are all that this rank holds of a tensor, as far as they were copied before.
        self._whole: list[torch.Tensor | None] = [None] * len(parts)

    def pairs(self, tensors: Tensors) -> Iterator[Pair]:
        """What is to be copied for the parts of `tensors`, as they are now."""
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
    # Beside a loop of Python, each of thousands of views that torch makes may cost a thread its turn, for torch lets go
    # of the interpreter meanwhile. numpy does not.
    view = torch.from_numpy(np.ndarray(tuple(tensor.shape), _EXACT[tensor.dtype], data, start))
    return view if view.dtype == tensor.dtype else view.view(tensor.dtype)
