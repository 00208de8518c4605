"""From sources to one file: copy, hash and write in bounded memory, different chunks at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from holdfast.format.container import ALIGNMENT
from holdfast.io.buffers import NUM_THREADS, BufferPool, run_threads
from holdfast.io.digest import digest_blocks
from holdfast.io.meter import Meter
from holdfast.io.sources import JoinedSources, Source
from holdfast.store.base import Bytes, FileWriter
from holdfast.wording import count

#: Size of one write from memory that is not copied to a buffer first: larger than a buffer, for fewer requests.
_REQUEST_NBYTES = 16 << 20


def write_file(
    writer: FileWriter,
    sources: Sequence[Source],
    *,
    data_start: int,
    header: Callable[[bytes], bytes],
    pool: BufferPool,
    num_threads: int = NUM_THREADS,
    meter: Meter | None = None,
) -> bytes:
    """Write and publish one file, and return the digest table of its data section. Blocks until the file is durable.

    The data section is `sources`, packed one after another from `data_start` (a multiple of 4096). When it is
    written, `header` is called with its digest table and returns the first `data_start` bytes of the file.
    On any error the writer is aborted and the first error raised. Takes one buffer per thread from `pool`. `meter`
    follows the number of chunks begun.
    """
    try:
        if data_start % ALIGNMENT:
            raise ValueError(f"data_start is {data_start}: it must be a multiple of {ALIGNMENT}")
        data = _DataSection(writer, sources, data_start, pool)
        if meter is not None:
            meter.follow(data.nbytes, lambda: data.num_begun * pool.buffer_nbytes)
        run_threads(min(num_threads, max(data.num_chunks, 1)), data.write_chunks, stop=data.stop)
        table = b"".join(data.digests)
        _write_header(writer, header(table), data_start, pool)
        writer.publish(data_start + data.nbytes)
    except BaseException:
        writer.abort()
        raise
    return table


def write_memory(
    writer: FileWriter,
    data: Bytes,
    *,
    nbytes: int,
    head_nbytes: int,
    await_head: Callable[[], None],
    num_threads: int = 2,
) -> None:
    """Write and publish a file that is in memory: the first `nbytes` of `data`. It is durable and visible on return.

    The file's head (`head_nbytes`, a multiple of 4096) is written last, after `await_head` has returned: by then the
    caller must have completed the head in `data`. The device reads `data` in place, so `data` should have the writer's
    alignment; bytes behind `nbytes` are read up to the next multiple of that alignment. On any error the writer is
    aborted.
    """
    starts = iter(range(head_nbytes, nbytes, _REQUEST_NBYTES))
    stopped = threading.Event()
    lock = threading.Lock()

    def write() -> None:
        while not stopped.is_set():
            with lock:
                start = next(starts, None)
            if start is None:
                return
            stop = min(start + _REQUEST_NBYTES, nbytes + -nbytes % writer.alignment, len(data))
            writer.write_at(start, data[start:stop])

    try:
        run_threads(num_threads, write, stop=stopped.set)
        await_head()
        writer.write_at(0, data[:head_nbytes])
        writer.publish(nbytes)
    except BaseException:
        writer.abort()
        raise


class _DataSection:
    """The data section, in chunks of one buffer each. Each thread takes the next chunk until none is left."""

    def __init__(self, writer: FileWriter, sources: Sequence[Source], data_start: int, pool: BufferPool) -> None:
        self._writer = writer
        self._sources = JoinedSources(sources)
        self._data_start = data_start
        self._pool = pool
        self.nbytes = self._sources.nbytes
        self.num_chunks = -(-self.nbytes // pool.buffer_nbytes)
        self.digests = [b""] * self.num_chunks
        self._chunks = iter(range(self.num_chunks))
        self.num_begun = 0
        self._lock = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True

    def write_chunks(self) -> None:
        while not self._stopped:
            with self._lock:
                chunk = next(self._chunks, None)
            if chunk is None:
                return
            self.num_begun = chunk
            with self._pool.buffer() as buffer:
                self._write_chunk(chunk, buffer)

    def _write_chunk(self, chunk: int, buffer: Bytes) -> None:
        start = chunk * len(buffer)
        nbytes = min(len(buffer), self.nbytes - start)
        self._sources.read_into(start, buffer[:nbytes])
        self.digests[chunk] = digest_blocks(buffer[:nbytes])
        # Pad the last chunk to whole blocks, so that it goes to the device directly, too; publish cuts the padding off.
        padded = nbytes + -nbytes % self._writer.alignment
        buffer[nbytes:padded] = 0
        self._writer.write_at(self._data_start + start, buffer[:padded])


def _write_header(writer: FileWriter, header: bytes, data_start: int, pool: BufferPool) -> None:
    assert len(header) == data_start, f"the header has {count(len(header), 'byte')} instead of {data_start}"
    content = np.frombuffer(header, np.uint8)
    with pool.buffer() as buffer:
        for start in range(0, data_start, len(buffer)):
            piece = content[start : start + len(buffer)]
            buffer[: len(piece)] = piece
            writer.write_at(start, buffer[: len(piece)])
