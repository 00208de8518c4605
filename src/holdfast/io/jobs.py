"""Reads from one file: the file, the extents to read from it, and the delivery of their bytes."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from holdfast.errors import CorruptError
from holdfast.format.container import BLOCK_NBYTES
from holdfast.format.digests import XXH3, DigestKind
from holdfast.geometry import Int64s
from holdfast.io.digest import table_nbytes
from holdfast.store.base import Bytes, FileReader

_PAGE_NBYTES = 4096
#: Gaps up to this size are read together with the bytes around them: a second request would cost more.
_BRIDGE_NBYTES = 64 << 10
#: Ranges of memory up to this number are read without gaps. Each further one would cost more than the bytes of its gap.
_MAX_EXACT_RANGES = 4096


@dataclass(frozen=True)
class DataFile:
    """An open data file. With a `table` (the digests of its data section, of kind `digests`), every block that is read
    is verified."""

    reader: FileReader
    path: str
    data_start: int
    data_nbytes: int
    table: bytes | None
    digests: DigestKind = XXH3

    def __post_init__(self) -> None:
        if self.table is not None and len(self.table) != table_nbytes(self.data_nbytes, self.digests):
            raise ValueError(f"{self.path}: the digest table does not fit {self.data_nbytes} bytes of data")


class Extent(NamedTuple):
    """Bytes [start, stop) of one file's data section."""

    start: int
    stop: int


#: Takes bytes of extents that follow each other without a gap: the first extent's index, the offset in it, and the
#: bytes, which are valid during the call only. The bytes may begin and end in the middle of an extent.
Deliver = Callable[[int, int, Bytes], None]
#: Makes the error for a block that does not match its digest.
OnCorrupt = Callable[[DataFile, int], CorruptError]


class ReadJob(NamedTuple):
    """The reads from one file with `data_nbytes` of data: `extents` sorted by start, which may overlap.

    `extents` may be an array ``[extents, 2]``. `open` is called when the file's turn comes, and its result has a table
    where `verify` is true; the reader is closed after the file's last request. `deliver` gets every byte of every
    extent exactly once, in runs of extents, from several threads at once. Threads call both.
    """

    data_nbytes: int
    open: Callable[[], DataFile]
    extents: Sequence[Extent] | Int64s
    deliver: Deliver
    verify: bool = True
    #: Whether the file is memory, of which nothing but the extents is read unless they are very many.
    exact: bool = False

    def ranges(self) -> Int64s:
        """The ranges to read, as rows ``start, stop``: whole blocks of the data section, with neighbours merged.

        Without verification, whole pages instead of blocks. Of memory no more than the extents, but where these are
        very many, small gaps between them too. Raises `ValueError` for extents out of order or bounds.
        """
        starts, stops = np.asarray(self.extents, np.int64).reshape(-1, 2).T
        wrong = (starts > stops) | (stops > self.data_nbytes) | (starts < np.r_[0, starts[:-1]])
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(f"[{starts[at]}, {stops[at]}) is out of order or not in {self.data_nbytes} bytes")
        grain = BLOCK_NBYTES if self.verify else 1 if self.exact else _PAGE_NBYTES
        filled = starts < stops
        lows = starts[filled] // grain * grain
        highs = np.maximum.accumulate(np.minimum(-(-stops[filled] // grain) * grain, self.data_nbytes))
        if not len(lows):
            return np.zeros((0, 2), np.int64)
        is_exact = self.exact and np.count_nonzero(lows[1:] > highs[:-1]) < _MAX_EXACT_RANGES
        fresh = np.flatnonzero(np.r_[True, lows[1:] > highs[:-1] + (0 if is_exact else _BRIDGE_NBYTES)])
        return np.stack([lows[fresh], highs[np.append(fresh[1:], len(highs)) - 1]], axis=1)


class _ExtentRun(NamedTuple):
    """Bytes [start, stop) of a data section: extents `first` and following, without a gap."""

    first: int
    start: int
    stop: int


class FileDelivery:
    """The delivery of one file's extents: finds the extents that a chunk overlaps, and delivers the chunk's bytes.

    The file is open while its chunks are read; this process reads `num_chunks` of them. Safe for several threads.
    """

    def __init__(self, job: ReadJob, *, num_chunks: int) -> None:
        starts, stops = np.asarray(job.extents, np.int64).reshape(-1, 2).T
        self.bytes_needed = int((stops - starts).sum())
        self._job = job
        self._num_left = num_chunks
        self._file: DataFile | None = None
        self._lock = threading.Lock()
        self._starts = starts
        self._stops = stops
        firsts = np.flatnonzero(np.r_[True, starts[1:] != stops[:-1]]) if len(starts) else np.zeros(0, np.int64)
        ends = stops[np.append(firsts[1:], len(stops)) - 1] if len(starts) else stops
        self._runs = list(map(_ExtentRun, firsts.tolist(), starts[firsts].tolist(), ends.tolist()))
        #: The furthest stop of all runs up to each one; it rises even where runs overlap.
        self._reach = list(accumulate((run.stop for run in self._runs), max))

    def open(self) -> DataFile:
        """The file. The first call opens it."""
        with self._lock:
            if self._file is None:
                self._file = self._job.open()
            return self._file

    def was_read(self) -> bool:
        """Count one chunk as read and finished. After the last one closes the file and returns True."""
        with self._lock:
            self._num_left -= 1
            last = self._num_left == 0
        if last:
            self.close()
        return last

    def close(self) -> None:
        """Close the file, if it is open."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.reader.close()

    def deliver(self, start: int, data: Bytes) -> None:
        """Deliver the bytes of `data` that extents want; `data` begins at `start` of the data section."""
        stop = start + len(data)
        for number in range(bisect_right(self._reach, start), len(self._runs)):
            run = self._runs[number]
            if run.start >= stop:
                break
            low, high = max(run.start, start), min(run.stop, stop)
            if low < high:
                first = run.first if low == run.start else self._extent_at(number, low)
                self._job.deliver(first, low - int(self._starts[first]), data[low - start : high - start])

    def _extent_at(self, number: int, byte: int) -> int:
        """The extent of a run that holds `byte`."""
        first = self._runs[number].first
        behind = self._runs[number + 1].first if number + 1 < len(self._runs) else len(self._stops)
        return bisect_right(self._stops, byte, first, behind)
