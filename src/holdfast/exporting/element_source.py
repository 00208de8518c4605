"""The bytes of a new file: elements of a stored state, read window by window and cast on the way, between given bytes.

A window is one buffer of the writer. All its elements are read at once, so that each stored block is read once for it,
whatever the layout of the stored files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import prod
from threading import Lock
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from ml_dtypes import finfo

from holdfast.checkpoint.delivery import cut
from holdfast.checkpoint.stored_state import StoredState
from holdfast.exporting.chosen_tensors import ExportTensor, unfit
from holdfast.exporting.edge_blocks import EdgeBlocks
from holdfast.format.dtypes import CARRIERS, DTYPES, numpy_type
from holdfast.geometry import Box, flat_boxes, whole
from holdfast.io.buffers import BufferPool, pipeline_pool
from holdfast.io.reader import read_files
from holdfast.mapping.parts import NO_AXIS, is_floating
from holdfast.plan.load import ReadRequest
from holdfast.store.base import Bytes

_Array = npt.NDArray[Any]
_LARGEST_E4M3: Final = 448.0


class TensorSegment(NamedTuple):
    """Bytes from `start` on of a new file's data: the elements of box `box` of a tensor, in row-major order."""

    start: int
    tensor: ExportTensor
    box: Box

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return prod(self.box.size) * self.tensor.itemsize


class GivenSegment(NamedTuple):
    """Bytes from `start` on of a new file's data that are known."""

    start: int
    data: bytes

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return len(self.data)


#: The parts of a new file's data. They follow each other without gaps; none is empty.
Segment = TensorSegment | GivenSegment


def segments_between(segments: Sequence[Segment], start: int, stop: int) -> Sequence[Segment]:
    """Those of `segments` that hold some of the bytes ``[start, stop)``."""
    first = bisect_right(segments, start, key=lambda segment: segment.start) - 1
    last = bisect_right(segments, stop - 1, key=lambda segment: segment.start)
    return segments[max(first, 0) : last]


class ElementSource:
    """The data of one new file, as the writer's `Source`. `advance` gets the number of bytes of each finished window.

    Every block that is read is verified if the state has digests. Each call for a window has threads that read it, and
    takes a buffer of `pool` for each.
    """

    def __init__(
        self,
        state: StoredState,
        segments: Sequence[Segment],
        blocks: EdgeBlocks,
        pool: BufferPool,
        advance: Callable[[int], None],
    ) -> None:
        self._state = state
        self._segments = segments
        self._blocks = blocks
        self._pool = pool
        self._advance = advance
        self._lock = Lock()
        #: Bytes that were read from storage.
        self.bytes_read = 0
        self.nbytes = segments[-1].start + segments[-1].nbytes if segments else 0

    def read_into(self, start: int, out: Bytes) -> None:
        """As `Source.read_into`."""
        num_read = read_window(self._state, [(self._segments, start, out)], self._blocks, self._pool)
        with self._lock:
            self.bytes_read += num_read
        self._advance(len(out))


def read_window(
    state: StoredState,
    parts: Iterable[tuple[Sequence[Segment], int, Bytes]],
    blocks: EdgeBlocks,
    pool: BufferPool,
) -> int:
    """Fill the parts of a window, all at once: for each the segments of a file, the offset in the file's data, and the
    memory for the bytes from there on. Returns the number of bytes that were read from storage, by several threads with
    a buffer of `pool` each."""
    window = _WindowReads(state)
    for segments, start, out in parts:
        for segment in segments_between(segments, start, start + len(out)):
            low, high = max(start, segment.start), min(start + len(out), segment.start + segment.nbytes)
            skipped, held = low - segment.start, out[low - start : high - start]
            if isinstance(segment, GivenSegment):
                held[:] = np.frombuffer(segment.data, np.uint8)[skipped : skipped + len(held)]
            else:
                window.add(segment, skipped, held)
    read: list[int] = []
    if window.wants:
        jobs = (blocks.shared(job, read.append) for _, job in state.jobs(window.wants, window))
        request_nbytes = state.capabilities.request_nbytes
        read_files(jobs, pool=pool, on_corrupt=state.corrupt_block, request_nbytes=request_nbytes)
    return sum(read)


class _Target(NamedTuple):
    """The elements of a window that one read fills, as carriers; where they are cast, the tensor that they become."""

    array: _Array
    cast: ExportTensor | None

    def take(self, at: Box, elements: _Array) -> None:
        self.array[at.slices()] = elements if self.cast is None else _cast(elements, self.cast)


class _WindowReads:
    """The reads for one window, and the `Targets` that they fill."""

    def __init__(self, state: StoredState) -> None:
        self._numbers = state.numbers
        self._targets: list[_Target] = []
        self.wants: list[ReadRequest] = []
        self._itemsizes: list[int] = []

    def add(self, segment: TensorSegment, skipped: int, out: Bytes) -> None:
        """Have `out` filled with the bytes of a segment after the first `skipped` ones."""
        itemsize = segment.tensor.itemsize
        elements = out.view(CARRIERS[itemsize])
        first = skipped // itemsize
        for offset, box in flat_boxes(segment.box.size, first, first + len(elements)):
            held = elements[offset : offset + box.numel].reshape(box.size)
            start = tuple(a + b for a, b in zip(segment.box.start, box.start, strict=True))
            self._add_box(segment.tensor, Box(start, box.size), held)

    def _add_box(self, tensor: ExportTensor, box: Box, held: _Array) -> None:
        cast = None if tensor.dtype == tensor.stored_dtype else tensor
        for part in tensor.parts:
            met = part.meet(box)
            if met is None:
                continue
            common, of_stored = met
            array = _at(held, common.relative_to(box.start).slices())
            if part.source is None:
                array[...] = 0
                continue
            self.wants.append(ReadRequest(self._numbers[part.source], of_stored))
            self._targets.append(_Target(_with_stored_axes(array, part.axes), cast))
            self._itemsizes.append(DTYPES[tensor.stored_dtype].itemsize)

    def put(self, want: int, at: Box, elements: _Array) -> None:
        """As `Targets.put`."""
        self._targets[want].take(at, elements)

    def memory(self, want: int) -> _Array | None:
        """As `Targets.memory`."""
        array, cast = self._targets[want]
        return array.reshape(-1) if cast is None and array.flags.c_contiguous else None

    def fill(self, wants: Sequence[int], skipped: int, data: Bytes) -> None:
        """As `Targets.fill`."""
        sizes = (self._targets[want].array.size * self._itemsizes[want] for want in wants)
        for want, (first, part) in zip(wants, cut(data, sizes, skipped), strict=True):
            itemsize = self._itemsizes[want]
            elements, start = part.view(CARRIERS[itemsize]), first // itemsize
            for offset, at in flat_boxes(self._targets[want].array.shape, start, start + len(elements)):
                self._targets[want].take(at, elements[offset : offset + at.numel].reshape(at.size))


def _at(array: _Array, slices: tuple[slice, ...]) -> _Array:
    """A view of a part of `array`; an array even without axes, where numpy would return a scalar."""
    part: _Array = array[slices] if slices else array
    return part


def _with_stored_axes(array: _Array, axes: tuple[int, ...]) -> _Array:
    """A view of a logical tensor's elements with the axes of the stored one, whose axis ``j`` is axis ``axes[j]`` of
    `array`."""
    if axes == tuple(range(array.ndim)):
        return array
    used = [axis for axis in axes if axis != NO_AXIS]
    unused = [axis for axis in range(array.ndim) if axis not in used]  # of one element each
    seen: _Array = array.transpose(used + unused).squeeze(axis=tuple(range(len(used), array.ndim)))
    for position, axis in enumerate(axes):
        if axis == NO_AXIS:
            seen = np.expand_dims(seen, position)
    return seen


@np.errstate(over="ignore", invalid="ignore")  # `_check_fits` finds the numbers that the new dtype does not have
def _cast(elements: _Array, tensor: ExportTensor) -> _Array:
    """Carriers of stored elements of `tensor` as carriers of its new dtype, as ``tensor.to(dtype)`` gives them.

    Raises `IncompatibleError`, code ``incompatible.export``, for a finite number that would become infinite or nan.
    """
    dtype = tensor.dtype
    source, target = numpy_type(tensor.stored_dtype), numpy_type(dtype)
    assert source is not None
    numbers = given = elements.view(source)
    if is_floating(dtype) and DTYPES[dtype].itemsize < 4:
        numbers = numbers.astype(np.float32)  # torch rounds to float32 first, too
    if dtype == "float8_e4m3fn":
        numbers = np.clip(numbers, -_LARGEST_E4M3, _LARGEST_E4M3)  # torch saturates here, and only here
    made: _Array = numbers.astype(target)
    if is_floating(dtype):
        _check_fits(given, numbers, made, tensor)
    return made.view(CARRIERS[DTYPES[dtype].itemsize])


def _check_fits(given: _Array, numbers: _Array, made: _Array, tensor: ExportTensor) -> None:
    """Refuse a finite number of `given` that is not finite in `made`; `numbers` is a step between the two."""
    largest = float(finfo(made.dtype).max)  # type: ignore[no-untyped-call]  # it has no types
    if numbers.size == 0 or (numbers.max() <= largest and numbers.min() >= -largest):
        return  # the usual case, which takes no memory; nan is in neither range
    lost = np.isfinite(given) & ~np.isfinite(made)
    if lost.any():
        text = f"has the number {float(given[lost][0]):g}, which {tensor.dtype} does not have"
        action = f"Choose a dtype with a larger range, or leave this tensor {tensor.stored_dtype} by a rule Cast."
        raise unfit(tensor.name, text, action)


def check_equal(state: StoredState, pairs: Sequence[tuple[ExportTensor, ExportTensor]]) -> None:
    """Refuse a mapping that makes one tensor of several that differ. `pairs` are small tensors that must be equal."""
    contents = small_contents(state, [tensor for pair in pairs for tensor in pair])
    for at, (one, other) in enumerate(pairs):
        if contents[2 * at] != contents[2 * at + 1]:
            text = f"and {other.name} differ, so they cannot become one tensor"
            raise unfit(one.name, text, "Drop them in an earlier rule, or leave them out with select.")


def small_contents(state: StoredState, tensors: Sequence[ExportTensor]) -> list[bytes]:
    """The bytes of small tensors, all read at once, in the new dtypes."""
    segments: list[TensorSegment] = []
    starts = list(accumulate((tensor.nbytes for tensor in tensors), initial=0))
    for tensor, start in zip(tensors, starts, strict=False):
        if tensor.nbytes:
            segments.append(TensorSegment(start, tensor, whole(tensor.shape)))
    out = np.empty(starts[-1], np.uint8)
    if segments:
        with pipeline_pool() as pool:
            read_window(state, [(segments, 0, out)], EdgeBlocks(state.manifest.body.num_files), pool)
    return [out[start : start + tensor.nbytes].tobytes() for tensor, start in zip(tensors, starts, strict=False)]
