"""From files to targets: read, verify and deliver in bounded memory, different requests at the same time."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from holdfast.errors import CorruptError
from holdfast.format.container import BLOCK_NBYTES
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


#: Takes a piece of an extent: the extent's index, the piece's offset in it, the bytes, valid during the call only.
Deliver = Callable[[int, int, Bytes], None]


class ReadJob(NamedTuple):
    """What is wanted of one file: `extents` sorted by start (they may overlap).

    `open` is called when the file's turn comes; its reader is closed after the file's last request. `deliver` gets
    every byte of every extent exactly once, in pieces, from several threads at once. Both are called from threads.
    """

    open: Callable[[], DataFile]
    extents: Sequence[Extent]
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


class _Target:
    """One open file with its extents, prepared for finding those that a request overlaps."""

    def __init__(self, file: DataFile, job: ReadJob) -> None:
        self.file = file
        self.num_open_requests = 0
        self._starts = [start for start, _ in job.extents]
        self._stops = [stop for _, stop in job.extents]
        #: Where the first extents up to each index end; rises even where extents overlap.
        self._reach = list(accumulate(self._stops, max))
        self._deliver = job.deliver

    def deliver(self, start: int, data: Bytes) -> None:
        """Deliver what the extents want of `data`, which begins at `start` of the data section."""
        stop = start + len(data)
        for index in range(bisect_right(self._reach, start), len(self._starts)):
            extent_start = self._starts[index]
            if extent_start >= stop:
                break
            first, last = max(extent_start, start), min(self._stops[index], stop)
            if first < last:
                self._deliver(index, first - extent_start, data[first - start : last - start])


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
        target = _Target(file, job)
        with self._changed:
            self._open.add(target)
        requests = [
            _Request(target, at, min(at + self._request_nbytes, stop))
            for start, stop in _ranges_to_read(file, job.extents)
            for at in range(start, stop, self._request_nbytes)
        ]
        with self._changed:
            self._num_opening -= 1
            self.bytes_needed += sum(stop - start for start, stop in job.extents)
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


def _ranges_to_read(file: DataFile, extents: Sequence[Extent]) -> list[tuple[int, int]]:
    """What to read for `extents`: whole blocks of the data section, neighbours merged."""
    grain = _PAGE_NBYTES if file.table is None else BLOCK_NBYTES
    ranges: list[tuple[int, int]] = []
    previous = 0
    for start, stop in extents:
        if not previous <= start <= stop <= file.data_nbytes:
            raise ValueError(f"{file.path}: [{start}, {stop}) is out of order or not in {file.data_nbytes} bytes")
        previous = start
        if start == stop:
            continue
        first, last = start - start % grain, min(stop + -stop % grain, file.data_nbytes)
        if ranges and first <= ranges[-1][1] + _BRIDGE_NBYTES:
            ranges[-1] = ranges[-1][0], max(ranges[-1][1], last)
        else:
            ranges.append((first, last))
    return ranges
