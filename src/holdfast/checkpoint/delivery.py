"""The delivery of a file's bytes to the targets whose elements they are."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.format.container import FilePlaces
from holdfast.format.dtypes import CARRIERS
from holdfast.geometry import Box
from holdfast.plan.load import FileReads, ReadRequest, pieces
from holdfast.plan.strided_runs import StridedRun, copy_spans
from holdfast.store.base import Bytes


class Targets(Protocol):
    """The targets of a read, by the numbers of the wants. Several threads call the methods, for disjoint elements."""

    def put(self, want: int, at: Box, elements: npt.NDArray[Any]) -> None:
        """Take elements (of the carrier type) for box `at`, relative to the wanted box."""

    def fill(self, wants: Sequence[int], skipped: int, data: Bytes) -> None:
        """Take the elements of several wants: `data` has those of one want after another, each in row-major order.

        `data` begins `skipped` bytes into the first want, and may end before the last one does.
        """

    def memory(self, want: int) -> npt.NDArray[Any] | None:
        """The memory of a want in row-major order, to write carriers to; None where the reader must call `put`."""


@dataclass
class _Fragment:
    """One element that chunks cut, and the number of its bytes that have arrived."""

    data: Bytes
    num_filled: int = 0


class Delivery:
    """The delivery of one file's bytes to the wants whose elements they are."""

    def __init__(self, files: FilePlaces, reads: FileReads, wants: Sequence[ReadRequest], targets: Targets) -> None:
        self._files = files
        self._reads = reads
        self._wants = wants
        self._targets = targets
        self._numbers = reads.wants.tolist()
        #: The offset of each read when all are laid end to end, and the end of the last one.
        self._line = np.r_[0, np.cumsum(reads.stops - reads.starts)].tolist()
        #: The read at which the group of each read ends: straight reads that follow each other, or one other read.
        self._behind = _ends_of_groups(reads.straight & ~reads.odd).tolist()
        #: The bytes of elements that chunks cut, by the numbers of read and element, until the other bytes arrive.
        self._fragments: dict[tuple[int, int], _Fragment] = {}
        self._lock = threading.Lock()

    def take(self, first: int, offset: int, data: Bytes) -> None:
        """Deliver bytes of read `first`, from `offset` on, and of the reads that follow it without a gap."""
        line, begin = self._line, self._line[first] + offset
        end = begin + len(data)
        last = bisect_left(line, end, first + 1)
        while first < last:
            behind = min(self._behind[first], last)
            held = data[max(line[first] - begin, 0) : line[behind] - begin]
            if self._reads.odd[first]:
                self._odd(first, offset, held)
            elif self._reads.straight[first]:
                self._targets.fill(self._numbers[first:behind], offset, held)
            else:
                self._part(first, offset, held)
            first, offset = behind, 0

    def _odd(self, index: int, offset: int, data: Bytes) -> None:
        """Deliver bytes of one read whose elements may be cut, and lie at any address: byte by byte where memory takes
        them, else whole elements from a copy."""
        number = self._numbers[index]
        itemsize = int(self._files.itemsizes[self._wants[number].tensor])
        run = self._reads.strided_run(index)
        memory = None if run is None else self._targets.memory(number)
        if run is not None and memory is not None:
            _copy_runs(run.in_bytes(itemsize), offset, len(data), data, memory.view(np.uint8))
            return
        first = min(-offset % itemsize, len(data))
        behind = first + (len(data) - first) // itemsize * itemsize
        for start, stop in ((0, first), (behind, len(data))):
            if start < stop:
                self._fragment(index, offset + start, data[start:stop], itemsize)
        if first < behind:
            self._elements(index, offset + first, data[first:behind].copy())

    def _fragment(self, index: int, offset: int, data: Bytes, itemsize: int) -> None:
        """Keep a part of one element; deliver the element once all of it is there."""
        element, skipped = divmod(offset, itemsize)
        with self._lock:
            fragment = self._fragments.setdefault((index, element), _Fragment(np.empty(itemsize, np.uint8)))
            fragment.data[skipped : skipped + len(data)] = data
            fragment.num_filled += len(data)
            is_whole = fragment.num_filled == itemsize
            if is_whole:
                del self._fragments[index, element]
        if is_whole:
            self._elements(index, element * itemsize, fragment.data)

    def _elements(self, index: int, offset: int, data: Bytes) -> None:
        """Deliver whole elements of one read, from `offset` on."""
        if self._reads.straight[index]:
            self._targets.fill(self._numbers[index : index + 1], offset, data)
        else:
            self._part(index, offset, data)

    def _part(self, index: int, offset: int, data: Bytes) -> None:
        """Deliver bytes of one read, from `offset` on."""
        number = self._numbers[index]
        want = self._wants[number]
        itemsize = int(self._files.itemsizes[want.tensor])
        run, skipped, numel = self._reads.strided_run(index), offset // itemsize, len(data) // itemsize
        memory = None if run is None else self._targets.memory(number)
        if run is not None and memory is not None:
            _copy_runs(run, skipped, numel, data, memory)
            return
        elements = data.view(CARRIERS[itemsize])
        for at, stored, source, target in pieces(self._reads.read(index), want.box, skipped, numel):
            held = elements[at : at + stored.numel].reshape(stored.size)
            self._targets.put(number, target, held[source.slices()])


@dataclass(frozen=True)
class ArrayTargets:
    """Targets that are one contiguous array of carriers for each want, in the shape of its box."""

    arrays: Sequence[npt.NDArray[Any]]

    def put(self, want: int, at: Box, elements: npt.NDArray[Any]) -> None:
        """As `Targets.put`."""
        self.arrays[want][at.slices()] = elements

    def memory(self, want: int) -> npt.NDArray[Any]:
        """As `Targets.memory`."""
        return self.arrays[want].reshape(-1)

    def fill(self, wants: Sequence[int], skipped: int, data: Bytes) -> None:
        """As `Targets.fill`."""
        outs = [self.arrays[want].reshape(-1).view(np.uint8) for want in wants]
        for out, (first, part) in zip(outs, cut(data, map(len, outs), skipped), strict=True):
            out[first : first + len(part)] = part


def cut(data: Bytes, sizes: Iterable[int], skipped: int) -> Iterator[tuple[int, Bytes]]:
    """Cut what `Targets.fill` takes into the bytes of each want, each with the place of its first byte in the want;
    `sizes` are the numbers of bytes of the wants."""
    start = 0
    for size in sizes:
        stop = start + size - skipped
        yield skipped, data[start:stop]
        start, skipped = stop, 0


def _ends_of_groups(straight: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    last = np.flatnonzero(~(straight & np.r_[straight[1:], False]))
    return last[np.searchsorted(last, np.arange(len(straight)))] + 1


def _copy_runs(run: StridedRun, skipped: int, count: int, data: Bytes, memory: npt.NDArray[Any]) -> None:
    """Copy `data`, the `count` elements behind the first `skipped` ones of `run`, to their places in `memory`.

    ``np.ndarray`` makes strided arrays faster than ``as_strided``.
    """
    dtype, itemsize = memory.dtype, memory.itemsize
    for at, place, rows, size in copy_spans(run, skipped, count):
        source = np.ndarray((rows, size), dtype, data, at * itemsize, (run.step * itemsize, itemsize))
        target = np.ndarray((rows, size), dtype, memory, place * itemsize, (run.pitch * itemsize, itemsize))
        target[...] = source
