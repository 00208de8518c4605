"""Local tensor memory: the pieces that a rank holds, and their bytes for a writer, read without an extra copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import xxhash

from holdfast.format.dtypes import CARRIERS
from holdfast.geometry import Box, FlatRange, Shape, flat_boxes, whole
from holdfast.io.buffers import BUFFER_NBYTES
from holdfast.io.sources import JoinedSources
from holdfast.plan.layout import Pieces, Placed, Spec, TensorLayout, Whole
from holdfast.plan.placements import local_boxes
from holdfast.store.base import Bytes

_TORCH_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

#: The largest size of a source that is packed, and of a pack.
_SMALL_NBYTES = 16 << 10
_PACKED_NBYTES = 1 << 20

#: The largest size of one copy. For sizes that fit a processor's second-level cache, the C library copies by string
#: instructions, and a loop of such copies runs half as fast again.
COPY_NBYTES = 512 << 10

Array = npt.NDArray[Any]
#: A box of a tensor, with its slices of the local tensor; None where it is the whole local tensor.
_BoxInPart = tuple[Box, tuple[slice, ...] | None]


def copy_elements(target: Array, source: Array) -> None:
    """Copy `source` into `target`; both have one shape and type and are in host memory."""
    assert target.shape == source.shape, "numpy would broadcast"
    if target.nbytes <= COPY_NBYTES or not (target.flags.c_contiguous and source.flags.c_contiguous):
        target[...] = source
        return
    to, elements = target.reshape(-1), source.reshape(-1)
    step = COPY_NBYTES // target.itemsize
    for start in range(0, len(to), step):
        to[start : start + step] = elements[start : start + step]


def carried(tensor: torch.Tensor) -> torch.Tensor:
    """A view of `tensor` with elements of a plain type of the same size."""
    carrier = _TORCH_CARRIERS[tensor.element_size()]
    return tensor if tensor.dtype == carrier else tensor.view(carrier)


class AddressedMemory:
    """The memory of a tensor in the form from which numpy makes an array, by its address. Such an array keeps the
    tensor alive. The address of a tensor on a device is one of that device: an array of it must not be read."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        itemsize = tensor.element_size()
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": np.dtype(CARRIERS[itemsize]).str,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * itemsize for stride in tensor.stride()),
        }


def array_of(tensor: torch.Tensor) -> Array:
    """The memory of a host tensor as an array of the carrier type.

    `Tensor.numpy` returns the same, but marks the storage as not resizable for the rest of its life: after a save, a
    replay buffer could not grow, and FSDP could not free parameters.
    """
    if not tensor.numel():
        return np.empty(tuple(tensor.shape), CARRIERS[tensor.element_size()])
    return np.asarray(AddressedMemory(tensor))


class MemorySource(msgspec.Struct, frozen=True, gc=False):
    """A source of bytes: elements ``[first, first + numel)`` of the row-major order of `view`."""

    view: torch.Tensor
    first: int
    numel: int

    @property
    def nbytes(self) -> int:
        """The size of the source in bytes."""
        return self.numel * self.view.element_size()

    def elements(self) -> torch.Tensor:
        """All elements in row-major order, as carriers; a copy where they are not contiguous."""
        flat = carried(self.view).reshape(-1)
        return flat if flat.numel() == self.numel else flat[self.first : self.first + self.numel]

    def held(self) -> Bytes | None:
        """As `HeldSource.held`."""
        if not (self.view.is_contiguous() and self.view.device.type == "cpu"):
            return None
        first = self.first * self.view.element_size()
        return array_of(self.view).reshape(-1).view(np.uint8)[first : first + self.nbytes]

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy bytes from `start` on into `out`; both are multiples of the element size."""
        held = self.held()
        if held is not None:
            copy_elements(out, held[start : start + len(out)])
            return
        itemsize = self.view.element_size()
        first = self.first + start // itemsize
        count = len(out) // itemsize
        elements = torch.from_numpy(out.view(CARRIERS[itemsize]))
        source = carried(self.view)
        for offset, box in flat_boxes(tuple(self.view.shape), first, first + count):
            elements[offset : offset + box.numel].view(box.size).copy_(source[box.slices()])


class PackedSource(JoinedSources):
    """A sequence of small sources of one element size on one device, which are copied together in few calls."""

    def __init__(self, sources: Sequence[MemorySource]) -> None:
        super().__init__(sources)
        self._memory = sources

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy bytes from `start` on into `out`; both are multiples of the element size."""
        if len(out) == self.nbytes:
            elements = [source.elements() for source in self._memory]
            torch.from_numpy(out.view(CARRIERS[elements[0].element_size()])).copy_(torch.cat(elements))
        else:
            super().read_into(start, out)


def packed(sources: Iterable[MemorySource]) -> Iterator[MemorySource | PackedSource]:
    """Pack runs of small `sources`; the bytes and their order stay the same."""
    run: list[MemorySource] = []
    run_kind: tuple[int, torch.device] | None = None
    run_nbytes = 0
    for source in sources:
        nbytes = source.nbytes
        kind = (source.view.element_size(), source.view.device) if nbytes <= _SMALL_NBYTES else None
        if run and (kind != run_kind or run_nbytes + nbytes > _PACKED_NBYTES):
            yield PackedSource(run)
            run, run_nbytes = [], 0
        if kind is None:
            yield source
        else:
            run.append(source)
            run_kind = kind
            run_nbytes += nbytes
    if run:
        yield PackedSource(run)


def digest_of(tensor: torch.Tensor) -> bytes:
    """The xxh3-128 digest of a tensor's elements in row-major order. Uses bounded memory."""
    source = MemorySource(tensor, 0, tensor.numel())
    digest = xxhash.xxh3_128()
    buffer = np.empty(min(source.nbytes, BUFFER_NBYTES), np.uint8)
    for start in range(0, source.nbytes, BUFFER_NBYTES):
        part = buffer[: min(BUFFER_NBYTES, source.nbytes - start)]
        source.read_into(start, part)
        digest.update(part.data)
    return digest.digest()


class LocalPieces:
    """The boxes of tensors that one rank holds. Computes them once for all tensors of one spec and shape; use one
    object per walk."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        #: By the spec's id and the shape. Each value keeps its spec alive, so that no other spec gets that id.
        self._boxes: dict[tuple[int, Shape], tuple[Spec, list[_BoxInPart]]] = {}

    def whole_part(self, layout: TensorLayout) -> Box | None:
        """The box that the whole local tensor holds; None if it holds several, or none."""
        boxes = () if isinstance(layout.spec, Pieces) else self._known(layout.spec, layout.shape)
        return boxes[0][0] if len(boxes) == 1 else None

    def of(self, layout: TensorLayout, memory: tuple[torch.Tensor, ...]) -> list[tuple[Box, torch.Tensor]]:
        """The boxes of a tensor that the rank holds, each with the memory that holds it."""
        spec, shape = layout.spec, layout.shape
        if isinstance(spec, Pieces):
            return _parts(shape, spec, memory)
        boxes = self._known(spec, shape)
        return [(box, memory[0] if slices is None else memory[0][slices]) for box, slices in boxes]

    def _known(self, spec: Placed | Whole, shape: Shape) -> list[_BoxInPart]:
        known = self._boxes.get((id(spec), shape))
        if known is None:
            known = self._boxes[id(spec), shape] = spec, self._boxes_of(spec, shape)
        return known[1]

    def _boxes_of(self, spec: Placed | Whole, shape: Shape) -> list[_BoxInPart]:
        if isinstance(spec, Whole):
            return [(whole(shape), None)]
        boxes = local_boxes(spec, shape, self._rank)
        alone = len(boxes) == 1
        return [(box, None if alone else local.slices()) for box, local in boxes]

    def source(self, layout: TensorLayout, memory: tuple[torch.Tensor, ...], part: Box | FlatRange) -> MemorySource:
        """The bytes of `part`, which lies within one of the pieces that the rank holds."""
        if isinstance(part, Box):
            for box, view in self.of(layout, memory):
                if part == box:
                    return MemorySource(view, 0, part.numel)
                inner = part.relative_to(box.start)
                if all(a >= 0 and a + n <= e for a, n, e in zip(inner.start, inner.size, box.size, strict=True)):
                    return MemorySource(view[inner.slices()], 0, part.numel)
        elif isinstance(layout.spec, Pieces):
            for held, flat in zip(layout.spec.parts, memory, strict=True):
                if isinstance(held, FlatRange) and held.start <= part.start and part.stop <= held.stop:
                    return MemorySource(flat.reshape(-1), part.start - held.start, part.numel)
                if held == whole(layout.shape):  # holders of one box may each write a flat range of it
                    return MemorySource(flat, part.start, part.numel)
        else:
            return MemorySource(memory[0], part.start, part.numel)
        raise AssertionError(f"rank {self._rank} was asked to write {part} of {layout.name!r}, which it does not hold")


def _parts(shape: Shape, spec: Pieces, memory: tuple[torch.Tensor, ...]) -> list[tuple[Box, torch.Tensor]]:
    found = []
    for part, held in zip(spec.parts, memory, strict=True):
        if isinstance(part, Box):
            found.append((part, held))
            continue
        assert isinstance(part, FlatRange)
        flat = held.reshape(-1)
        for offset, box in flat_boxes(shape, part.start, part.stop):
            found.append((box, flat[offset : offset + box.numel].view(box.size)))
    return found
