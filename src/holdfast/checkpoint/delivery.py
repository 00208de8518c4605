"""The delivery of a file's bytes to the targets whose elements they are."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from holdfast.format.container import Files
from holdfast.format.dtypes import CARRIERS
from holdfast.geometry import Box
from holdfast.plan.load import FileReads, ReadRequest, pieces
from holdfast.plan.strided_runs import CopySpan, StridedRun, copy_spans
from holdfast.store.base import Bytes

#: Wants up to this size are filled many at a time, where a run of bytes has all of their elements.
_FILLED_NBYTES = 1 << 20


class Targets(Protocol):
    """The targets of a read, by the numbers of the wants. Several threads call the methods, for disjoint elements."""

    def put(self, want: int, at: Box, elements: npt.NDArray[Any]) -> None:
        """Take elements (of the carrier type) for box `at`, relative to the wanted box."""

    def fill(self, wants: Sequence[int], data: Bytes) -> None:
        """Take all elements of several wants: `data` has those of one want after another, each in row-major order."""

    def memory(self, want: int) -> npt.NDArray[Any] | None:
        """The memory of a want in row-major order, to write carriers to; None where the reader must call `put`."""


class Delivery:
    """The delivery of one file's bytes to the wants whose elements they are."""

    def __init__(self, files: Files, reads: FileReads, wants: Sequence[ReadRequest], targets: Targets) -> None:
        self._files = files
        self._reads = reads
        self._wants = wants
        self._targets = targets
        sizes = reads.stops - reads.starts
        #: The offset of each read when all are laid end to end, and the end of the last one.
        self._line = np.r_[0, np.cumsum(sizes)].tolist()
        self._filled = reads.straight & (sizes <= _FILLED_NBYTES)

    def take(self, first: int, offset: int, data: Bytes) -> None:
        """Deliver bytes of read `first`, from `offset` on, and of the reads that follow it without a gap."""
        line, begin = self._line, self._line[first] + offset
        end = begin + len(data)
        if end <= line[first + 1] and not self._filled[first]:
            self._part(first, offset, data)
            return
        # `data` has all bytes of reads [low, high).
        low, high = first + (offset > 0), bisect_right(line, end) - 1
        if offset:
            self._part(first, offset, data[: line[low] - begin])
        for start, stop in self._groups(low, high):
            held = data[line[start] - begin : line[stop] - begin]
            if self._filled[start]:
                self._targets.fill(self._reads.wants[start:stop].tolist(), held)
            else:
                self._part(start, 0, held)
        if low <= high and line[high] < end:
            self._part(high, 0, data[line[high] - begin :])

    def _groups(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Ranges of reads that make up ``[low, high)``: reads that are filled together, and each other read alone."""
        filled = self._filled[low:high]
        cuts = low + 1 + np.flatnonzero(~(filled[1:] & filled[:-1]))
        return pairwise((low, *cuts.tolist(), high)) if low < high else iter(())

    def _part(self, index: int, offset: int, data: Bytes) -> None:
        """Deliver bytes of one read, from `offset` on."""
        number = int(self._reads.wants[index])
        want = self._wants[number]
        itemsize = int(self._files.itemsizes[want.tensor])
        run, skipped, numel = self._reads.strided_run(index), offset // itemsize, len(data) // itemsize
        memory = None if run is None else self._targets.memory(number)
        if run is not None and memory is not None:
            for span in copy_spans(run, skipped, numel):
                _copy(span, run, data, memory)
            return
        elements = data.view(CARRIERS[itemsize])
        for at, stored, source, target in pieces(self._reads.read(index), want.box, skipped, numel):
            held = elements[at : at + stored.numel].reshape(stored.size)
            self._targets.put(number, target, held[source.slices()])


def _copy(span: CopySpan, run: StridedRun, data: Bytes, memory: npt.NDArray[Any]) -> None:
    """Copy elements of `data` to `memory`. (``np.ndarray`` makes strided arrays faster than ``as_strided``.)"""
    shape, dtype, itemsize = (span.rows, span.size), memory.dtype, memory.itemsize
    source = np.ndarray(shape, dtype, data, span.at * itemsize, (run.step * itemsize, itemsize))
    target = np.ndarray(shape, dtype, memory, span.place * itemsize, (run.pitch * itemsize, itemsize))
    target[...] = source
