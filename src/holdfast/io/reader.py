"""From files to targets: read, verify and deliver in bounded memory, different chunks at the same time.

A `ChunkReading` is one process's part of that. It reads the chunks that are its own, and delivers to its targets the
bytes that they want. Where neighbours want some of a chunk, too, it offers them the chunk, and uses the buffer again
when all of them have given it back. It delivers chunks that neighbours offer from their buffers in the same way.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from holdfast.errors import CorruptError
from holdfast.format.container import BLOCK_NBYTES
from holdfast.geometry import Int64s
from holdfast.io.buffers import NUM_THREADS, BufferPool, run_threads
from holdfast.io.digest import first_bad_block, table_nbytes
from holdfast.store.base import Bytes, FileReader

_PAGE_NBYTES = 4096
#: Gaps up to this size are read together with the bytes around them: a second request would cost more.
_BRIDGE_NBYTES = 64 << 10


@dataclass(frozen=True)
class DataFile:
    """An open data file. With a `table` (the digests of its data section), every block that is read is verified."""

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

    def ranges(self) -> Int64s:
        """The ranges to read, as rows ``start, stop``: whole blocks of the data section, with neighbours merged.

        Without verification, whole pages instead of blocks. Raises `ValueError` for extents out of order or bounds.
        """
        starts, stops = np.asarray(self.extents, np.int64).reshape(-1, 2).T
        wrong = (starts > stops) | (stops > self.data_nbytes) | (starts < np.r_[0, starts[:-1]])
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(f"[{starts[at]}, {stops[at]}) is out of order or not in {self.data_nbytes} bytes")
        grain = BLOCK_NBYTES if self.verify else _PAGE_NBYTES
        filled = starts < stops
        lows = starts[filled] // grain * grain
        highs = np.maximum.accumulate(np.minimum(-(-stops[filled] // grain) * grain, self.data_nbytes))
        if not len(lows):
            return np.zeros((0, 2), np.int64)
        fresh = np.flatnonzero(np.r_[True, lows[1:] > highs[:-1] + _BRIDGE_NBYTES])
        return np.stack([lows[fresh], highs[np.append(fresh[1:], len(highs)) - 1]], axis=1)


class ReadStats(NamedTuple):
    """Numbers of bytes: those read from storage, and those of the extents that they were read for."""

    bytes_read: int
    bytes_needed: int


class Chunk(NamedTuple):
    """Bytes [start, stop) of the data section of one file, at most one buffer; ranks know the chunk by `number`.

    `wanted_by` are the neighbours that want some of it. Where `receive` is given, it fetches the chunk from another
    node, already verified; else the chunk is read from the file. `send` sends it to other nodes.
    """

    number: int
    file: FileDelivery
    start: int
    stop: int
    wanted_by: Sequence[int] = ()
    receive: Callable[[Bytes], None] | None = None
    send: Callable[[Bytes], None] | None = None


class Offer(NamedTuple):
    """A chunk that neighbour `rank` holds in its buffer number `buffer`, with bytes `data`, until it is given back."""

    rank: int
    buffer: int
    chunk: Chunk
    data: Bytes


class Partners(Protocol):
    """The messages that a `ChunkReading` sends to its neighbours. Several threads call the methods."""

    def offer(self, chunk: Chunk, buffer: int) -> None:
        """Tell the neighbours that want `chunk` that it is in buffer number `buffer`."""

    def give_back(self, offer: Offer) -> None:
        """Tell the neighbour that this process is done with the chunk that it offered."""


def read_files(
    jobs: Iterable[ReadJob], *, pool: BufferPool, on_corrupt: OnCorrupt, num_threads: int = NUM_THREADS
) -> ReadStats:
    """Read and deliver the extents of `jobs`, in their order. Blocks until all bytes are delivered.

    Extents are widened to whole 1 MiB blocks (to 4096 bytes where nothing is verified), merged, and read in requests
    of at most one buffer. Blocks are verified before they are delivered; a block that fails raises the error that
    `on_corrupt` makes. The first error ends everything promptly, with part of the bytes delivered. `jobs` is consumed
    as reading proceeds, and few files are open at a time. Takes all buffers of `pool`.
    """
    needed: list[int] = []

    def chunks() -> Iterator[Chunk]:
        for job in jobs:
            spans = list(_divided(job.ranges(), pool.buffer_nbytes))
            target = FileDelivery(job, num_chunks=len(spans))
            needed.append(target.bytes_needed)
            for start, stop in spans:
                yield Chunk(0, target, start, stop)

    with pool.all_buffers() as buffers:
        reading = ChunkReading(chunks(), buffers, on_corrupt, num_readers=num_threads)
        reading.run()
    return ReadStats(reading.bytes_read, sum(needed))


def _divided(ranges: Int64s, chunk_nbytes: int) -> Iterator[tuple[int, int]]:
    for start, stop in ranges.tolist():
        for at in range(start, stop, chunk_nbytes):
            yield at, min(at + chunk_nbytes, stop)


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


class ChunkReading:
    """One process's reading of `chunks`, in turn, through `buffers`, and its delivery of them and of offers.

    Neighbours make `num_offers` offers. They are delivered before more chunks are read, because a neighbour may have no
    free buffer until then. A chunk is begun only when a buffer is free, and at most `num_readers` are in progress at a
    time. Where chunks come from other nodes, `num_deliverers` must be 1: all readers may wait for ranks that wait for a
    neighbour to deliver the chunks offered to it. `interrupt` makes all receiving and sending of chunks end soon, with
    an error. `prepare` is called with memory before it is filled.
    """

    def __init__(
        self,
        chunks: Iterable[Chunk],
        buffers: Sequence[Bytes],
        on_corrupt: OnCorrupt,
        *,
        num_readers: int = NUM_THREADS,
        num_deliverers: int = 0,
        partners: Partners | None = None,
        num_offers: int = 0,
        interrupt: Callable[[], None] = lambda: None,
        prepare: Callable[[Bytes], None] = lambda _: None,
    ) -> None:
        self._chunks = iter(chunks)
        self._buffers = buffers
        self._on_corrupt = on_corrupt
        self._num_readers = num_readers
        self._num_threads = num_readers + num_deliverers
        self._partners = partners
        self._num_offers = num_offers
        self._interrupt = interrupt
        self._prepare = prepare
        # Last in, first out: few threads touch few buffers, and those stay in the cache.
        self._free = list(range(len(buffers)))
        #: For each taken buffer, how many ranks still want some of its chunk.
        self._lent: dict[int, int] = {}
        self._offers: deque[Offer] = deque()
        self._open: set[FileDelivery] = set()
        self._changed = threading.Condition()
        self._exhausted = False
        self._stopped = False
        self._error: BaseException | None = None
        self._num_delivering = 0
        self._num_reading = 0
        self._num_begun = 0
        self.bytes_read = 0
        self.verify_s = 0.0

    @property
    def is_reading(self) -> bool:
        """Whether a thread waits for an answer from storage."""
        return self._num_reading > 0

    def run(self) -> None:
        """Read and deliver everything. Blocks until this process and its neighbours are done with all chunks."""
        try:
            run_threads(self._num_threads, self._work, stop=self.stop)
        finally:
            for target in self._open:
                target.close()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop: begin no more chunks, and deliver nothing after the return. Reads in progress may continue."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._num_delivering)
        self._interrupt()

    def fail(self, error: BaseException) -> None:
        """Make `run` end and raise `error`, unless it has failed already."""
        with self._changed:
            self._error = self._error or error
            self._stopped = True
            self._changed.notify_all()
        self._interrupt()

    def offered(self, offer: Offer) -> None:
        """Take a neighbour's offer, to deliver it later."""
        with self._changed:
            self._offers.append(offer)
            self._changed.notify()

    def given_back(self, buffer: int) -> None:
        """Note that one of the ranks that wanted some of the chunk in buffer number `buffer` is done with it."""
        with self._changed:
            self._lent[buffer] -= 1
            if not self._lent[buffer]:
                del self._lent[buffer]
                self._free.append(buffer)
                self._changed.notify_all()

    def _work(self) -> None:
        while (item := self._take()) is not None:
            if isinstance(item, Offer):
                self._deliver(item.chunk, item.data)
                assert self._partners is not None
                self._partners.give_back(item)
            else:
                self._serve(*item)

    def _take(self) -> Offer | tuple[Chunk, int] | None:
        """The next offer or chunk to work on. Waits for one; returns None when no more can come."""
        with self._changed:
            while not self._stopped:
                if self._offers:
                    self._num_offers -= 1
                    return self._offers.popleft()
                if self._free and not self._exhausted and self._num_begun < self._num_readers:
                    chunk = next(self._chunks, None)
                    if chunk is not None:
                        return chunk, self._lend(chunk)
                    self._exhausted = True
                    self._chunks = iter(())  # the old iterator may refer to this object and would keep its buffers
                if self._exhausted and not self._num_offers and not self._lent:
                    self._changed.notify_all()
                    break
                self._changed.wait()
        return None

    def _lend(self, chunk: Chunk) -> int:
        """Take a free buffer for a chunk."""
        self._num_begun += 1
        if chunk.receive is None:
            self._open.add(chunk.file)
            self._num_reading += 1
        buffer = self._free.pop()
        self._lent[buffer] = len(chunk.wanted_by) + 1
        return buffer

    def _serve(self, chunk: Chunk, buffer: int) -> None:
        data = self._buffers[buffer][: chunk.stop - chunk.start]
        if chunk.receive is None:
            data = self._read(chunk, data)
        else:
            self._prepare(data)
            chunk.receive(data)
        if chunk.wanted_by:
            assert self._partners is not None
            self._partners.offer(chunk, buffer)
        self._deliver(chunk, data)
        if chunk.send is not None:
            chunk.send(data)
        was_last = chunk.receive is None and chunk.file.was_read()
        with self._changed:
            self._num_begun -= 1
            if was_last:
                self._open.discard(chunk.file)
        self.given_back(buffer)

    def _read(self, chunk: Chunk, buffer: Bytes) -> Bytes:
        """Read and verify a chunk, into `buffer` unless the file is in memory and no neighbour wants the chunk."""
        file = chunk.file.open()
        start = file.data_start + chunk.start
        if file.reader.memory is None or chunk.wanted_by:
            data = buffer
            self._prepare(data)
            file.reader.read_at(start, data)
        else:
            data = file.reader.memory[start : start + len(buffer)]
        with self._changed:
            self._num_reading -= 1
        verify_s = self._verify(file, chunk.start, data)
        with self._changed:
            self.verify_s += verify_s
            self.bytes_read += chunk.stop - chunk.start
        return data

    def _verify(self, file: DataFile, start: int, data: Bytes) -> float:
        """Compare whole blocks from `start` on with their digests; returns the seconds that it took."""
        if file.table is None:
            return 0.0
        start_s = time.perf_counter()
        bad_block = first_bad_block(data, file.table, first=start // BLOCK_NBYTES)
        if bad_block is not None:
            raise self._on_corrupt(file, bad_block)
        return time.perf_counter() - start_s

    def _deliver(self, chunk: Chunk, data: Bytes) -> None:
        with self._changed:
            if self._stopped:
                return
            self._num_delivering += 1
        try:
            chunk.file.deliver(chunk.start, data)
        finally:
            self._delivered()

    def _delivered(self) -> None:
        with self._changed:
            self._num_delivering -= 1
            if self._stopped:
                self._changed.notify_all()
