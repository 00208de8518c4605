"""From files to targets: read, verify and deliver in bounded memory, different requests at the same time."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from holdfast.errors import CorruptError
from holdfast.format.container import BLOCK_NBYTES
from holdfast.geometry import Int64s
from holdfast.storage.base import Bytes, FileReader
from holdfast.transfer.buffers import NUM_THREADS, BufferPool, run_threads
from holdfast.transfer.digest import first_bad_block, table_nbytes

_PAGE_NBYTES = 4096
#: Gaps up to this size are read through: a request of its own would cost more.
_BRIDGE_NBYTES = 64 << 10


@dataclass(frozen=True)
class DataFile:
    """An open data file. With `table` (digests of its data section) every block that is touched is verified."""

    reader: FileReader
    path: str
    data_start: int
    data_nbytes: int
    table: bytes | None

    def __post_init__(self) -> None:
        if self.table is not None and len(self.table) != table_nbytes(self.data_nbytes):
            raise ValueError(f"{self.path}: the digest table does not fit {self.data_nbytes} bytes of data")


class Extent(NamedTuple):
    """Bytes [start, stop) of one file's data section."""

    start: int
    stop: int


#: Takes bytes of extents that follow each other without a gap: the first one's index, the offset in it, the bytes,
#: valid during the call only. They may begin and end in the middle of an extent.
Deliver = Callable[[int, int, Bytes], None]


class ReadJob(NamedTuple):
    """What is wanted of one file: `extents` sorted by start (they may overlap), or an array of such pairs.

    `open` is called when the file's turn comes; its reader is closed after the file's last request. `deliver` gets
    every byte of every extent exactly once, in runs of extents, from several threads at once. Both are called from
    threads.
    """

    open: Callable[[], DataFile]
    extents: Sequence[Extent] | Int64s
    deliver: Deliver


class ReadStats(NamedTuple):
    """Bytes read from storage, and the bytes of the extents they were read for."""

    bytes_read: int
    bytes_needed: int


def read_files(
    jobs: Iterable[ReadJob],
    *,
    pool: BufferPool,
    on_corrupt: Callable[[DataFile, int], CorruptError],
    num_threads: int = NUM_THREADS,
) -> ReadStats:
    """Read and deliver what `jobs` want, in their order; returns when all is delivered.

    Extents are widened to whole 1 MiB blocks, which are verified before they are delivered (to 4096 bytes where a
    file has no table), merged, and read in requests of at most one buffer. A block that fails raises what
    `on_corrupt` makes of it. The first error ends everything promptly, with part of the bytes delivered. `jobs` is
    consumed as reading proceeds and few files are open at a time. Takes one buffer per thread from `pool`.
    """
    requests = _Requests(jobs, pool.buffer_nbytes)

    def work() -> None:
        for request in requests:
            with pool.buffer() as buffer:
                _serve(request, buffer, on_corrupt)
            requests.done(request)

    try:
        run_threads(num_threads, work, stop=requests.stop)
    finally:
        requests.close_files()
    return ReadStats(requests.bytes_read, requests.bytes_needed)


class _Run(NamedTuple):
    """Bytes [start, stop) of a data section: extents `first` and following, without a gap."""

    first: int
    start: int
    stop: int


class _Target:
    """One open file with its extents, prepared for finding those that a request overlaps."""

    def __init__(self, file: DataFile, starts: Int64s, stops: Int64s, deliver: Deliver) -> None:
        self.file = file
        self.num_open_requests = 0
        self._starts = starts
        self._stops = stops
        firsts = np.flatnonzero(np.r_[True, starts[1:] != stops[:-1]]) if len(starts) else np.zeros(0, np.int64)
        ends = stops[np.append(firsts[1:], len(stops)) - 1] if len(starts) else stops
        self._runs = list(map(_Run, firsts.tolist(), starts[firsts].tolist(), ends.tolist()))
        #: Where the first runs up to each one end; rises even where runs overlap.
        self._reach = list(accumulate((run.stop for run in self._runs), max))
        self._deliver = deliver

    def deliver(self, start: int, data: Bytes) -> None:
        """Deliver what the extents want of `data`, which begins at `start` of the data section."""
        stop = start + len(data)
        for number in range(bisect_right(self._reach, start), len(self._runs)):
            run = self._runs[number]
            if run.start >= stop:
                break
            low, high = max(run.start, start), min(run.stop, stop)
            if low < high:
                first = run.first if low == run.start else self._extent_at(number, low)
                self._deliver(first, low - int(self._starts[first]), data[low - start : high - start])

    def _extent_at(self, number: int, byte: int) -> int:
        """The extent of a run that holds `byte`."""
        first = self._runs[number].first
        behind = self._runs[number + 1].first if number + 1 < len(self._runs) else len(self._stops)
        return first + int(np.searchsorted(self._stops[first:behind], byte, side="right"))


class _Request(NamedTuple):
    """One read of bytes [start, stop) of a file's data section."""

    target: _Target
    start: int
    stop: int


def _serve(request: _Request, buffer: Bytes, on_corrupt: Callable[[DataFile, int], CorruptError]) -> None:
    file = request.target.file
    data = buffer[: request.stop - request.start]
    file.reader.read_at(file.data_start + request.start, data)
    if file.table is not None:
        bad_block = first_bad_block(data, file.table, first=request.start // BLOCK_NBYTES)
        if bad_block is not None:
            raise on_corrupt(file, bad_block)
    request.target.deliver(request.start, data)


class _Requests:
    """Turns jobs into requests, for several threads.

    A thread that finds no request opens the next file, outside the lock, so that files are opened in parallel. A
    thread that finds no file either waits while others are opening theirs: it shall serve their requests too.
    """

    def __init__(self, jobs: Iterable[ReadJob], request_nbytes: int) -> None:
        self.bytes_read = 0
        self.bytes_needed = 0
        self._request_nbytes = request_nbytes
        self._jobs = iter(jobs)
        self._changed = threading.Condition()
        self._pending: deque[_Request] = deque()
        self._open: set[_Target] = set()
        self._num_opening = 0
        self._exhausted = False
        self._stopped = False

    def __iter__(self) -> Iterator[_Request]:
        while (item := self._take()) is not None:
            if isinstance(item, _Request):
                yield item
            else:
                self._add(item, item.open())

    def _take(self) -> _Request | ReadJob | None:
        with self._changed:
            while not self._stopped:
                if self._pending:
                    return self._pending.popleft()
                if not self._exhausted:
                    job = next(self._jobs, None)
                    if job is not None:
                        self._num_opening += 1
                        return job
                    self._exhausted = True
                if not self._num_opening:
                    break
                self._changed.wait()
        return None

    def _add(self, job: ReadJob, file: DataFile) -> None:
        starts, stops = np.asarray(job.extents, np.int64).reshape(-1, 2).T
        target = _Target(file, starts, stops, job.deliver)
        with self._changed:
            self._open.add(target)
        requests = [
            _Request(target, at, min(at + self._request_nbytes, stop))
            for start, stop in _ranges_to_read(file, starts, stops)
            for at in range(start, stop, self._request_nbytes)
        ]
        with self._changed:
            self._num_opening -= 1
            self.bytes_needed += int((stops - starts).sum())
            target.num_open_requests = len(requests)
            self._pending.extend(requests)
            self._changed.notify_all()
        if not requests:
            self._close(target)

    def done(self, request: _Request) -> None:
        """Count `request` as served; its file's last one closes the file."""
        target = request.target
        with self._changed:
            self.bytes_read += request.stop - request.start
            target.num_open_requests -= 1
            last = target.num_open_requests == 0
        if last:
            self._close(target)

    def _close(self, target: _Target) -> None:
        with self._changed:
            self._open.remove(target)
        target.file.reader.close()

    def stop(self) -> None:
        """Hand out nothing more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def close_files(self) -> None:
        """Close the files that an error left open."""
        while self._open:
            self._open.pop().file.reader.close()


def _ranges_to_read(file: DataFile, starts: Int64s, stops: Int64s) -> list[tuple[int, int]]:
    """What to read for extents: whole blocks of the data section, neighbours merged."""
    wrong = (starts > stops) | (stops > file.data_nbytes) | (starts < np.r_[0, starts[:-1]])
    if wrong.any():
        at = int(np.argmax(wrong))
        what = f"[{starts[at]}, {stops[at]}) is out of order or not in {file.data_nbytes} bytes"
        raise ValueError(f"{file.path}: {what}")
    grain = _PAGE_NBYTES if file.table is None else BLOCK_NBYTES
    filled = starts < stops
    lows = starts[filled] // grain * grain
    highs = np.maximum.accumulate(np.minimum(-(-stops[filled] // grain) * grain, file.data_nbytes))
    if not len(lows):
        return []
    fresh = np.flatnonzero(np.r_[True, lows[1:] > highs[:-1] + _BRIDGE_NBYTES])
    return list(zip(lows[fresh].tolist(), highs[np.append(fresh[1:], len(highs)) - 1].tolist(), strict=True))
