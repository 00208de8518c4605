"""One process's part of a reading: it brings chunks into its buffers, delivers them, and passes them on.

A `ChunkReading` reads chunks from files, or takes them from a `Transport` where another rank has read them. It delivers
to its targets the bytes that they want, and passes each chunk on to the ranks that want some of it. One thread reads
chunks that follow each other in a file, so that a store can send them in answer to one request.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import NamedTuple, Protocol

from holdfast.format.container import BLOCK_NBYTES
from holdfast.io.buffers import NUM_THREADS, run_threads
from holdfast.io.digest import bad_blocks
from holdfast.io.jobs import DataFile, FileDelivery, OnCorrupt
from holdfast.store.base import Bytes, StreamingReader


class Transport(Protocol):
    """The way of chunks between the ranks of one reading. Several threads call the methods.

    A transport that *lends* shows a chunk to other ranks in the buffer of the rank that has it: they hear of it by
    `ChunkReading.offered`, and give it back. Any other transport copies it, and the receiver calls `bring`. The order
    of the chunks between two ranks is the same on both.
    """

    @property
    def lends(self) -> bool:
        """Whether the buffer of a chunk that was passed on stays in use until all ranks have given it back."""

    def serving(self, reading: ChunkReading) -> AbstractContextManager[None]:
        """Tell `reading` what the other ranks say, while a ``with`` block runs."""

    def bring(self, rank: int, number: int, out: Bytes) -> None:
        """Fill `out` with chunk `number`, verified, that `rank` passes on. Blocks until it has arrived."""

    def pass_on(self, ranks: Sequence[int], number: int, buffer: int, data: Bytes) -> None:
        """Give chunk `number`, whose bytes `data` are in buffer number `buffer`, to other ranks."""

    def give_back(self, offer: Offer) -> None:
        """Tell the rank that lent a chunk that this process needs it no more."""

    def awaited(self) -> Sequence[int]:
        """The ranks whose messages this process waits for."""

    def interrupt(self) -> None:
        """Make calls that block end soon, with an error. Never raises."""


class Route(NamedTuple):
    """Ranks that want some of a chunk, and the transport that takes it to them."""

    transport: Transport
    ranks: Sequence[int]


class Origin(NamedTuple):
    """The rank that a chunk comes from, and the transport that brings or lends it."""

    transport: Transport
    rank: int


class Chunk(NamedTuple):
    """Bytes [start, stop) of the data section of one file, at most one buffer; ranks know the chunk by `number`.

    If there is an `origin`, another rank lends or brings it; else this process reads it from the file. `routes` lead to
    the ranks that want some of it. The request that begins with this chunk ends at `expects`: it is 0 where the chunk
    is the whole request, or continues one.
    """

    number: int
    file: FileDelivery
    start: int
    stop: int
    origin: Origin | None = None
    routes: Sequence[Route] = ()
    expects: int = 0

    @property
    def num_borrowers(self) -> int:
        """Number of ranks that will use the buffer of this chunk until they give it back."""
        return sum(len(route.ranks) for route in self.routes if route.transport.lends)


class Offer(NamedTuple):
    """A chunk that `rank` lends: `data` in its buffer number `buffer`, until it is given back to `transport`."""

    transport: Transport
    rank: int
    buffer: int
    chunk: Chunk
    data: Bytes


class ChunkReading:
    """One process's reading of `chunks`, in turn, through `buffers`, and its delivery of them and of offers.

    Other ranks lend the `expected` chunks, given by their numbers, through `transports`. These are delivered before
    more chunks are read, because the rank that lends may have no free buffer until then. A chunk is begun only when a
    buffer is free. Chunks that follow each other in a file are one request of up to `request_nbytes`; at most
    `num_readers` requests are in progress at a time. If a transport copies, one more thread delivers what is lent: all
    readers may wait in `Transport.bring` for ranks that wait for others to deliver what was lent to them. `prepare` is
    called with memory before it is filled.
    """

    def __init__(
        self,
        chunks: Iterable[Chunk],
        buffers: Sequence[Bytes],
        on_corrupt: OnCorrupt,
        *,
        num_readers: int = NUM_THREADS,
        request_nbytes: int = 0,
        transports: Sequence[Transport] = (),
        expected: Mapping[int, Chunk] = MappingProxyType({}),
        prepare: Callable[[Bytes], None] = lambda _: None,
    ) -> None:
        self._requests = _requests(chunks, request_nbytes)
        self._buffers = buffers
        self._on_corrupt = on_corrupt
        self._num_readers = num_readers
        self._transports = transports
        self._num_threads = num_readers + any(not transport.lends for transport in transports)
        self.expected = expected
        self._num_offers = len(expected)
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
        """Read and deliver everything. Blocks until this process and its borrowers are done with all chunks."""
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

    def _interrupt(self) -> None:
        for transport in self._transports:
            transport.interrupt()

    def offered(self, offer: Offer) -> None:
        """Take an offer, to deliver it later."""
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
        request: deque[Chunk] = deque()  # what is left of the one that this thread reads
        while (item := self._take(request)) is not None:
            if isinstance(item, Offer):
                self._deliver(item.chunk, item.data)
                item.transport.give_back(item)
            else:
                self._serve(*item, is_last=not request)

    def _take(self, request: deque[Chunk]) -> Offer | tuple[Chunk, int] | None:
        """The next offer, or chunk of the `request` or of a new one, to work on. Waits for one; returns None when no
        more can come."""
        with self._changed:
            while not self._stopped:
                if self._offers:
                    self._num_offers -= 1
                    return self._offers.popleft()
                if self._free:
                    if not request:
                        request += self._begun()
                    if request:
                        chunk = request.popleft()
                        return chunk, self._lend(chunk)
                if self._exhausted and not (request or self._num_offers or self._lent):
                    self._changed.notify_all()
                    break
                self._changed.wait()
        return None

    def _begun(self) -> Sequence[Chunk]:
        """The chunks of the next request; none where enough requests are in progress, or all are begun."""
        if self._exhausted or self._num_begun == self._num_readers:
            return ()
        request = next(self._requests, ())
        if request:
            self._num_begun += 1
        else:
            self._exhausted = True
            self._requests = iter(())  # the old iterator may refer to this object and would keep its buffers
        return request

    def _lend(self, chunk: Chunk) -> int:
        """Take a free buffer for a chunk."""
        if chunk.origin is None:
            self._open.add(chunk.file)
            self._num_reading += 1
        buffer = self._free.pop()
        self._lent[buffer] = chunk.num_borrowers + 1
        return buffer

    def _serve(self, chunk: Chunk, buffer: int, *, is_last: bool) -> None:
        data = self._buffers[buffer][: chunk.stop - chunk.start]
        if chunk.origin is None:
            data = self._read(chunk, data)
        else:
            self._prepare(data)
            chunk.origin.transport.bring(chunk.origin.rank, chunk.number, data)
        for route in chunk.routes:
            route.transport.pass_on(route.ranks, chunk.number, buffer, data)
        self._deliver(chunk, data)
        was_last = chunk.origin is None and chunk.file.was_read()
        with self._changed:
            self._num_begun -= is_last
            if was_last:
                self._open.discard(chunk.file)
        self.given_back(buffer)

    def _read(self, chunk: Chunk, buffer: Bytes) -> Bytes:
        """Read and verify a chunk, into `buffer` unless the file is in memory and no rank borrows the buffer."""
        file = chunk.file.open()
        start = file.data_start + chunk.start
        if file.reader.memory is None or chunk.num_borrowers:
            data = buffer
            self._prepare(data)
            if chunk.expects and isinstance(file.reader, StreamingReader):
                file.reader.expect(start, file.data_start + chunk.expects)
            file.reader.read_at(start, data)
        else:
            data = file.reader.memory[start : start + len(buffer)]
        with self._changed:
            self._num_reading -= 1
        verify_s = self._verify(file, chunk.start, data)
        with self._changed:
            self.verify_s += verify_s
            self.bytes_read += len(data)
        return data

    def _verify(self, file: DataFile, start: int, data: Bytes) -> float:
        """Compare whole blocks from `start` on with their digests; returns the seconds that it took."""
        if file.table is None:
            return 0.0
        start_s = time.perf_counter()
        bad = bad_blocks(data, file.table, first=start // BLOCK_NBYTES, kind=file.digests)
        if bad:
            raise self._on_corrupt(file, bad[0])
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


def _requests(chunks: Iterable[Chunk], nbytes: int) -> Iterator[Sequence[Chunk]]:
    """Divide chunks into requests of up to `nbytes`, at least one chunk each. Chunks of a request follow each other in
    a file that this process reads."""
    request: list[Chunk] = []
    for chunk in chunks:
        if request and not (_continues(request[-1], chunk) and chunk.stop - request[0].start <= nbytes):
            yield _expecting(request)
            request = []
        request.append(chunk)
    if request:
        yield _expecting(request)


def _continues(before: Chunk, chunk: Chunk) -> bool:
    is_read = before.origin is None and chunk.origin is None
    return is_read and before.file is chunk.file and before.stop == chunk.start


def _expecting(request: Sequence[Chunk]) -> Sequence[Chunk]:
    """The chunks of a request, of which the first says where it ends."""
    return request if len(request) == 1 else [request[0]._replace(expects=request[-1].stop), *request[1:]]
