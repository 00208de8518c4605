"""Local tensor memory as bytes: what a writer reads from and what a reader fills. No copies are made beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from holdfast.format.dtypes import CARRIERS
from holdfast.geometry import Box, FlatRange, flat_boxes
from holdfast.plan.layout import Pieces, Placed, TensorLayout
from holdfast.plan.placements import local_boxes
from holdfast.storage.base import Bytes
from holdfast.transfer.buffers import BUFFER_NBYTES

_TORCH_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

Array = npt.NDArray[Any]


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` seen as elements of a plain type of the same size (shares memory)."""
    carrier = _TORCH_CARRIERS[tensor.element_size()]
    return tensor if tensor.dtype == carrier else tensor.view(carrier)


@dataclass(frozen=True)
class MemorySource:
    """Elements ``[first, first + numel)`` of the row-major order of `view`, as a source of bytes."""

    view: torch.Tensor
    first: int
    numel: int

    @property
    def nbytes(self) -> int:
        """Bytes of the source."""
        return self.numel * self.view.element_size()

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy bytes from `start` on into `out`; both are multiples of the element size."""
        itemsize = self.view.element_size()
        first = self.first + start // itemsize
        count = len(out) // itemsize
        if self.view.is_contiguous() and self.view.device.type == "cpu":
            flat = carried(self.view).reshape(-1).numpy().view(np.uint8)
            out[:] = flat[first * itemsize : (first + count) * itemsize]
            return
        elements = torch.from_numpy(out.view(CARRIERS[itemsize]))
        source = carried(self.view)
        for offset, box in flat_boxes(tuple(self.view.shape), first, first + count):
            elements[offset : offset + box.numel].view(box.size).copy_(source[box.slices()])


def digest_of(tensor: torch.Tensor) -> bytes:
    """xxh3-128 of a tensor's elements in row-major order, in bounded memory."""
    source = MemorySource(tensor, 0, tensor.numel())
    digest = xxhash.xxh3_128()
    buffer = np.empty(min(source.nbytes, BUFFER_NBYTES), np.uint8)
    for start in range(0, source.nbytes, BUFFER_NBYTES):
        part = buffer[: min(BUFFER_NBYTES, source.nbytes - start)]
        source.read_into(start, part)
        digest.update(part.data)
    return digest.digest()


@dataclass(frozen=True)
class MemoryTarget:
    """The local memory of one box of a tensor, as a place to put elements."""

    box: Box
    view: torch.Tensor

    def put(self, at: Box, elements: Array) -> None:
        """Copy `elements` (an array of the carrier type) to `at`, relative to the box. Safe for disjoint boxes."""
        view = carried(self.view)
        if view.device.type == "cpu":
            view.numpy()[at.slices()] = elements
        else:
            view[at.slices()].copy_(torch.from_numpy(np.asarray(elements)))


def elements(data: Bytes, itemsize: int) -> Array:
    """Bytes as elements of the carrier type of that size."""
    return data.view(CARRIERS[itemsize])


def local_pieces(layout: TensorLayout, memory: tuple[torch.Tensor, ...], rank: int) -> list[tuple[Box, torch.Tensor]]:
    """The boxes of a tensor that `rank` holds, each with the memory that holds it."""
    spec = layout.spec
    if isinstance(spec, Placed):
        return [(box, memory[0][local.slices()]) for box, local in local_boxes(spec, layout.shape, rank)]
    if isinstance(spec, Pieces):
        found = []
        for part, held in zip(spec.parts, memory, strict=True):
            if isinstance(part, Box):
                found.append((part, held))
                continue
            assert isinstance(part, FlatRange)
            flat = held.reshape(-1)
            for offset, box in flat_boxes(layout.shape, part.start, part.stop):
                found.append((box, flat[offset : offset + box.numel].view(box.size)))
        return found
    return [(Box((0,) * len(layout.shape), layout.shape), memory[0])]


def source_of(layout: TensorLayout, memory: tuple[torch.Tensor, ...], rank: int, part: Box | FlatRange) -> MemorySource:
    """The bytes of `part`, which lies within one of the pieces that `rank` holds."""
    if isinstance(part, Box):
        for box, view in local_pieces(layout, memory, rank):
            inner = part.relative_to(box.start)
            if all(a >= 0 and a + n <= e for a, n, e in zip(inner.start, inner.size, box.size, strict=True)):
                return MemorySource(view[inner.slices()], 0, part.numel)
    elif isinstance(layout.spec, Pieces):
        for held, flat in zip(layout.spec.parts, memory, strict=True):
            if isinstance(held, FlatRange) and held.start <= part.start and part.stop <= held.stop:
                return MemorySource(flat.reshape(-1), part.start - held.start, part.numel)
    else:
        return MemorySource(memory[0], part.start, part.numel)
    raise AssertionError(f"rank {rank} was asked to write {part} of {layout.name!r}, which it does not hold")
