"""From files to targets: read, verify and deliver in bounded memory, different chunks at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from holdfast.geometry import Int64s
from holdfast.io.buffers import NUM_THREADS, BufferPool
from holdfast.io.chunks import Chunk, ChunkReading
from holdfast.io.jobs import FileDelivery, OnCorrupt, ReadJob


class ReadStats(NamedTuple):
    """Numbers of bytes: those read from storage, and those of the extents that they were read for."""

    bytes_read: int
    bytes_needed: int


def read_files(
    jobs: Iterable[ReadJob],
    *,
    pool: BufferPool,
    on_corrupt: OnCorrupt,
    num_threads: int = NUM_THREADS,
    request_nbytes: int = 0,
) -> ReadStats:
    """Read and deliver the extents of `jobs`, in their order. Blocks until all bytes are delivered.

    Extents are widened to whole 1 MiB blocks (to 4096 bytes where nothing is verified), merged, and read in requests
    of one buffer, or of several up to `request_nbytes`. Blocks are verified before they are delivered; a block that
    fails raises the error that `on_corrupt` makes. The first error ends everything promptly, with part of the bytes
    delivered. `jobs` is consumed as reading proceeds, and few files are open at a time. Takes one buffer per thread
    from `pool`. Calls may share a pool that has buffers for all of them.
    """
    needed: list[int] = []

    def chunks() -> Iterator[Chunk]:
        for job in jobs:
            spans = list(_divided(job.ranges(), pool.buffer_nbytes))
            target = FileDelivery(job, num_chunks=len(spans))
            needed.append(target.bytes_needed)
            for start, stop in spans:
                yield Chunk(0, target, start, stop)

    with pool.buffers(num_threads) as buffers:
        reading = ChunkReading(chunks(), buffers, on_corrupt, num_readers=num_threads, request_nbytes=request_nbytes)
        reading.run()
    return ReadStats(reading.bytes_read, sum(needed))


def _divided(ranges: Int64s, chunk_nbytes: int) -> Iterator[tuple[int, int]]:
    for start, stop in ranges.tolist():
        for at in range(start, stop, chunk_nbytes):
            yield at, min(at + chunk_nbytes, stop)
