"""From sources to one file: copy, hash and write in bounded memory, different chunks at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from holdfast.errors import StateError
from holdfast.format.container import ALIGNMENT
from holdfast.io.buffers import NUM_THREADS, BufferPool, run_threads
from holdfast.io.digest import digest_blocks
from holdfast.io.meter import Meter
from holdfast.io.sources import JoinedSources, Source
from holdfast.store.base import Bytes, FileWriter
from holdfast.wording import count

#: Size of one write from memory that is not copied to a buffer first: larger than a buffer, for fewer requests.
_REQUEST_NBYTES = 16 << 20
#: The same for a store that writes in order: it divides a write into requests of its own, several at a time.
_IN_ORDER_NBYTES = 64 << 20


def write_file(
    writer: FileWriter,
    sources: Sequence[Source],
    *,
    data_start: int,
    header: bytes | Callable[[bytes], bytes],
    pool: BufferPool,
    in_order: bool = False,
    num_threads: int = NUM_THREADS,
    meter: Meter | None = None,
) -> bytes:
    """Write and publish one file, and return the digest table of its data section. Blocks until the file is durable.

    The data section is `sources`, packed one after another from `data_start` (a multiple of 4096). When it is
    written, `header` is called with its digest table and returns the first `data_start` bytes of the file; it may also
    be these bytes. Where the store writes `in_order`, the head comes first: unless it is known, the sources are read
    twice, and `StateError`, code ``state.changed``, is raised if they changed between.
    On any error the writer is aborted and the first error raised. Takes one buffer per thread from `pool`. `meter`
    follows the number of chunks begun.
    """
    try:
        if data_start % ALIGNMENT:
            raise ValueError(f"data_start is {data_start}: it must be a multiple of {ALIGNMENT}")
        data = _DataSection(sources, pool, num_threads)
        expected = None
        if in_order and not isinstance(header, bytes):
            expected = digests_of(sources, pool=pool, num_threads=num_threads)
            header = header(expected)
        if in_order and isinstance(header, bytes):
            _write_header(writer, header, data_start, pool)
        if meter is not None:
            meter.follow(data.nbytes, lambda: data.num_begun * pool.buffer_nbytes)
        table = data.digests(
            lambda start, chunk: writer.write_at(data_start + start, chunk),
            alignment=writer.alignment,
            stop=writer.abort if in_order else lambda: None,
        )
        if expected is not None and table != expected:
            raise _changed()
        if not in_order:
            _write_header(writer, header if isinstance(header, bytes) else header(table), data_start, pool)
        writer.publish(data_start + data.nbytes)
    except BaseException:
        writer.abort()
        raise
    return table


def digests_of(sources: Sequence[Source], *, pool: BufferPool, num_threads: int = NUM_THREADS) -> bytes:
    """The digest table of the data section that `sources` are, without writing it. Blocks."""
    return _DataSection(sources, pool, num_threads).digests(lambda _, __: None, stop=lambda: None)


def write_memory(
    writer: FileWriter,
    data: Bytes,
    *,
    nbytes: int,
    head_nbytes: int,
    await_head: Callable[[], None],
    in_order: bool = False,
    num_threads: int = 2,
) -> None:
    """Write and publish a file that is in memory: the first `nbytes` of `data`. It is durable and visible on return.

    The file's head (`head_nbytes`, a multiple of 4096) is written last, after `await_head` has returned: by then the
    caller must have completed the head in `data`. Where the store writes `in_order`, all is written after that. The
    device reads `data` in place, so `data` should have the writer's alignment; bytes behind `nbytes` are read up to the
    next multiple of that alignment. On any error the writer is aborted.
    """
    request_nbytes = _IN_ORDER_NBYTES if in_order else _REQUEST_NBYTES
    starts = iter(range(0 if in_order else head_nbytes, nbytes, request_nbytes))
    stopped = threading.Event()
    lock = threading.Lock()

    def write() -> None:
        while not stopped.is_set():
            with lock:
                start = next(starts, None)
            if start is None:
                return
            stop = min(start + request_nbytes, nbytes + -nbytes % writer.alignment, len(data))
            writer.write_at(start, data[start:stop])

    def end() -> None:
        stopped.set()
        if in_order:
            writer.abort()  # wakes writes that wait for those before them

    try:
        if in_order:
            await_head()
        run_threads(num_threads, write, stop=end)
        if not in_order:
            await_head()
            writer.write_at(0, data[:head_nbytes])
        writer.publish(nbytes)
    except BaseException:
        writer.abort()
        raise


class _DataSection:
    """The data section, in chunks of one buffer each. Each thread takes the next chunk until none is left."""

    def __init__(self, sources: Sequence[Source], pool: BufferPool, num_threads: int) -> None:
        self._sources = JoinedSources(sources)
        self._pool = pool
        self.nbytes = self._sources.nbytes
        num_chunks = -(-self.nbytes // pool.buffer_nbytes)
        self._num_threads = min(num_threads, max(num_chunks, 1))
        self._digests = [b""] * num_chunks
        self._chunks = iter(range(num_chunks))
        self.num_begun = 0
        self._lock = threading.Lock()
        self._stopped = False

    def digests(self, take: Callable[[int, Bytes], None], *, alignment: int = 1, stop: Callable[[], None]) -> bytes:
        """Read all chunks, and return their digest table. `take` gets the start of each chunk, and its bytes, padded
        with zeros to `alignment`. `stop` is called on the first error."""

        def end() -> None:
            self._stopped = True
            stop()

        run_threads(self._num_threads, lambda: self._pass_chunks(take, alignment), stop=end)
        return b"".join(self._digests)

    def _pass_chunks(self, take: Callable[[int, Bytes], None], alignment: int) -> None:
        while not self._stopped:
            # The buffer comes first: a thread that has a chunk must not wait for threads that have later ones.
            with self._pool.buffer() as buffer:
                with self._lock:
                    chunk = next(self._chunks, None)
                if chunk is None:
                    return
                self.num_begun = chunk
                start = chunk * len(buffer)
                nbytes = min(len(buffer), self.nbytes - start)
                self._sources.read_into(start, buffer[:nbytes])
                self._digests[chunk] = digest_blocks(buffer[:nbytes])
                # Pad the last chunk to whole blocks, so that it goes to the device directly, too; publish cuts the
                # padding off.
                padded = nbytes + -nbytes % alignment
                buffer[nbytes:padded] = 0
                take(start, buffer[:padded])


def _write_header(writer: FileWriter, header: bytes, data_start: int, pool: BufferPool) -> None:
    assert len(header) == data_start, f"the header has {count(len(header), 'byte')} instead of {data_start}"
    content = np.frombuffer(header, np.uint8)
    with pool.buffer() as buffer:
        for start in range(0, data_start, len(buffer)):
            piece = content[start : start + len(buffer)]
            buffer[: len(piece)] = piece
            writer.write_at(start, buffer[: len(piece)])


def _changed() -> StateError:
    return StateError(
        "the state changed while it was saved: the bytes that were written are not those of a moment before.",
        code="state.changed",
        action="Do not train, and change nothing in the state, until the save has returned.",
    )
