"""The raw limit: the fastest plain loop that moves the same bytes between memory and the same device.

No names, no layout, no digests: each rank writes one file of its bytes with `pwritev` and reads it back with
`preadv`, in aligned requests from a few threads, past the page cache where the filesystem takes O_DIRECT. It does so
in several ways, and the fastest is the limit: which one that is depends on the machine.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.state import digest

BLOCK_NBYTES = 4096


class RawWay(NamedTuple):
    """A way of raw I/O: so many threads make requests of so many bytes, straight between memory and the device, or
    through buffers of that size, with a copy on the way. (Buffers that stay in the processor's cache can be faster than
    memory.)"""

    threads: int
    request_nbytes: int
    copied: bool = False


#: The ways that every round tries.
RAW_WAYS = {
    "1 x 16 MiB": RawWay(1, 16 << 20),
    "2 x 16 MiB": RawWay(2, 16 << 20),
    "4 x 16 MiB": RawWay(4, 16 << 20),
    "3 x 2 MiB copied": RawWay(3, 2 << 20, copied=True),
}


class RawImage:
    """One rank's bytes in one aligned mapping, padded to whole blocks."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self.nbytes = sum(part.nbytes for part in parts)
        self.view = _memory(-(-self.nbytes // BLOCK_NBYTES) * BLOCK_NBYTES)
        position = 0
        for part in parts:
            self.view[position : position + part.nbytes] = part
            position += part.nbytes

    def clear(self) -> None:
        np.frombuffer(self.view, np.uint8)[:] = 0

    def digests(self) -> dict[str, str]:
        return {"image": digest(self.view[: self.nbytes])}

    def write(self, path: Path, way: RawWay) -> None:
        """Write the image to `path`, durably."""
        with open_direct(path, os.O_CREAT | os.O_RDWR) as fd:
            # Reserved space lets several threads write at once: extending writes are serialised by the kernel.
            os.posix_fallocate(fd, 0, len(self.view))
            self._move(fd, way, is_write=True)
            os.ftruncate(fd, self.nbytes)
            os.fdatasync(fd)

    def read(self, path: Path, way: RawWay) -> None:
        with open_direct(path, os.O_RDONLY) as fd:
            self._move(fd, way, is_write=False)

    def _move(self, fd: int, way: RawWay, *, is_write: bool) -> None:
        starts = range(0, len(self.view), way.request_nbytes)
        transfer, end = (os.pwritev, len(self.view)) if is_write else (os.preadv, self.nbytes)

        def stripe(thread: int) -> None:
            buffer = _memory(way.request_nbytes) if way.copied else None
            for start in starts[thread :: way.threads]:
                part = self.view[start : start + way.request_nbytes]
                memory = part if buffer is None else buffer[: len(part)]
                if buffer is not None and is_write:
                    _copy(memory, part)
                _fully(transfer, fd, memory, start, min(len(part), end - start))
                if buffer is not None and not is_write:
                    _copy(part, memory)

        with ThreadPoolExecutor(way.threads) as pool:
            list(pool.map(stripe, range(way.threads)))


def copy_file(source: Path, target: Path, way: RawWay) -> None:
    """Copy a file durably, in requests of which some read while others write."""
    with open_direct(source, os.O_RDONLY) as read_fd, open_direct(target, os.O_CREAT | os.O_RDWR) as write_fd:
        nbytes = os.fstat(read_fd).st_size
        os.posix_fallocate(write_fd, 0, -(-nbytes // BLOCK_NBYTES) * BLOCK_NBYTES)
        starts = range(0, nbytes, way.request_nbytes)

        def stripe(thread: int) -> None:
            buffer = _memory(way.request_nbytes)
            for start in starts[thread :: way.threads]:
                needed = min(way.request_nbytes, nbytes - start)
                _fully(os.preadv, read_fd, buffer, start, needed)
                _fully(os.pwritev, write_fd, buffer[: -(-needed // BLOCK_NBYTES) * BLOCK_NBYTES], start, needed)

        with ThreadPoolExecutor(way.threads) as pool:
            list(pool.map(stripe, range(way.threads)))
        os.ftruncate(write_fd, nbytes)
        os.fdatasync(write_fd)


def _fully(
    transfer: Callable[[int, Sequence[memoryview], int], int], fd: int, memory: memoryview, start: int, needed: int
) -> None:
    """Read into `memory` or write it, until `needed` bytes are done, by calls that may do less."""
    done = 0
    while done < needed:
        count = transfer(fd, [memory[done:]], start + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ended at byte {start + done} of {start + needed}")
        done += count


@contextmanager
def open_direct(path: Path, flags: int) -> Iterator[int]:
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.open(path, flags, 0o644)  # this filesystem refuses O_DIRECT
    try:
        yield fd
    finally:
        os.close(fd)


def _copy(target: memoryview, source: memoryview) -> None:
    # Unlike an assignment to the view, this does not keep other threads from running.
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def _memory(nbytes: int) -> memoryview:
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)
