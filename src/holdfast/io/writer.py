"""From sources to one file: copy, hash and write in bounded memory, different chunks at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from holdfast.format.container import ALIGNMENT
from holdfast.format.digests import XXH3, DigestKind
from holdfast.io.buffers import IN_ORDER_NBYTES, NUM_THREADS, BufferedChunks, BufferPool, run_threads
from holdfast.io.digest import digest_blocks
from holdfast.io.meter import Meter
from holdfast.io.ordered import OrderedData
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
    header: bytes | Callable[[bytes], bytes],
    pool: BufferPool,
    num_threads: int = NUM_THREADS,
    meter: Meter | None = None,
    check: Callable[[bytes], None] = lambda _: None,
    kind: DigestKind = XXH3,
) -> bytes:
    """Write and publish one file, and return the digest table of its data section, of this `kind`. Blocks until the
    file is durable.

    The data section is `sources`, packed one after another from `data_start` (a multiple of 4096). When it is
    written, `header` is called with its digest table and returns the first `data_start` bytes of the file; it may also
    be these bytes. Where `writer` writes in order, the head comes first: unless it is known, the sources are read
    twice, and `StateError`, code ``state.changed``, is raised if they changed between. `check` gets the digest table
    before the file is published, and may raise, so that a file with other bytes than it expects never appears.
    On any error the writer is aborted and the first error raised. Takes one buffer per thread from `pool`. `meter`
    follows the number of chunks begun.
    """
    try:
        if data_start % ALIGNMENT:
            raise ValueError(f"data_start is {data_start}: it must be a multiple of {ALIGNMENT}")
        write = _write_in_order if writer.in_order else _write_head_last
        return write(
            writer,
            sources,
            data_start,
            header,
            pool=pool,
            num_threads=num_threads,
            meter=meter,
            check=check,
            kind=kind,
        )
    except BaseException:
        writer.abort()
        raise


def _write_head_last(
    writer: FileWriter,
    sources: Sequence[Source],
    data_start: int,
    header: bytes | Callable[[bytes], bytes],
    *,
    pool: BufferPool,
    num_threads: int,
    meter: Meter | None,
    check: Callable[[bytes], None],
    kind: DigestKind,
) -> bytes:
    data = JoinedSources(sources)
    chunks = BufferedChunks(data.nbytes, pool, num_threads)
    digests = [b""] * chunks.number

    def write(chunk: int, start: int, nbytes: int, buffer: Bytes) -> None:
        data.read_into(start, buffer[:nbytes])
        digests[chunk] = digest_blocks(buffer[:nbytes], kind)
        # Pad the last chunk to whole blocks, so that it goes to the device directly, too; publish cuts the padding off.
        padded = nbytes + -nbytes % writer.alignment
        buffer[nbytes:padded] = 0
        writer.write_at(data_start + start, buffer[:padded])

    if meter is not None:
        meter.follow(data.nbytes, lambda: chunks.nbytes_begun)
    chunks.run(write)
    table = b"".join(digests)
    check(table)
    _write_header(writer, header if isinstance(header, bytes) else header(table), data_start, pool)
    writer.publish(data_start + data.nbytes)
    return table


def _write_in_order(
    writer: FileWriter,
    sources: Sequence[Source],
    data_start: int,
    header: bytes | Callable[[bytes], bytes],
    *,
    pool: BufferPool,
    num_threads: int,
    meter: Meter | None,
    check: Callable[[bytes], None],
    kind: DigestKind,
) -> bytes:
    data = OrderedData(sources, pool, num_threads, kind)
    expected = None
    if not isinstance(header, bytes):
        expected = data.digests()
        header = header(expected)
    _write_header(writer, header, data_start, pool)
    table = data.write(writer, data_start, expected, meter)
    check(table)
    writer.publish(data_start + data.nbytes)
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
    caller must have completed the head in `data`. Where `writer` writes in order, all is written after that. The
    device reads `data` in place, so `data` should have the writer's alignment; bytes behind `nbytes` are read up to the
    next multiple of that alignment. On any error the writer is aborted.
    """
    in_order = writer.in_order
    request_nbytes = IN_ORDER_NBYTES if in_order else _REQUEST_NBYTES
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


def _write_header(writer: FileWriter, header: bytes, data_start: int, pool: BufferPool) -> None:
    assert len(header) == data_start, f"the header has {count(len(header), 'byte')} instead of {data_start}"
    content = np.frombuffer(header, np.uint8)
    with pool.buffer() as buffer:
        for start in range(0, data_start, len(buffer)):
            piece = content[start : start + len(buffer)]
            buffer[: len(piece)] = piece
            writer.write_at(start, buffer[: len(piece)])
