"""The raw limit: the fastest plain loop that moves the same bytes between memory and the same device.

No names, no layout, no digests: each rank writes one file of its bytes with `pwritev` and reads it back with
`preadv`, in large aligned requests from a few threads, past the page cache where the filesystem takes O_DIRECT.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.state import digest

REQUEST_NBYTES = 16 << 20
BLOCK_NBYTES = 4096


class RawImage:
    """One rank's bytes in one aligned mapping, padded to whole blocks."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self.nbytes = sum(part.nbytes for part in parts)
        padded = -(-self.nbytes // BLOCK_NBYTES) * BLOCK_NBYTES
        mapping = mmap.mmap(-1, padded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        mapping.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(mapping)
        position = 0
        for part in parts:
            self.view[position : position + part.nbytes] = part
            position += part.nbytes

    def clear(self) -> None:
        """Zero all bytes."""
        zeros = bytes(REQUEST_NBYTES)
        for start in range(0, len(self.view), REQUEST_NBYTES):
            part = self.view[start : start + REQUEST_NBYTES]
            part[:] = memoryview(zeros)[: len(part)]

    def digests(self) -> dict[str, str]:
        """One digest of the whole image."""
        return {"image": digest(self.view[: self.nbytes])}


class RawFile:
    """The loop, with a fixed number of threads."""

    def __init__(self, image: RawImage, *, threads: int, direct: bool) -> None:
        self._image = image
        self._threads = threads
        self._flags = os.O_DIRECT if direct else 0

    def write(self, path: Path) -> None:
        """Write the image to the new file `path`, durably."""
        view = self._image.view
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | self._flags, 0o644)
        try:
            # Reserved space lets several threads write at once: extending writes are serialised by the kernel.
            os.posix_fallocate(fd, 0, len(view))
            self._each_request(lambda start: _write_all(fd, view[start : start + REQUEST_NBYTES], start))
            os.ftruncate(fd, self._image.nbytes)
            os.fdatasync(fd)
        finally:
            os.close(fd)

    def read(self, path: Path) -> None:
        """Fill the image from `path`."""
        view, nbytes = self._image.view, self._image.nbytes
        fd = os.open(path, os.O_RDONLY | self._flags)
        try:
            self._each_request(lambda start: _read_all(fd, view[start : start + REQUEST_NBYTES], start, nbytes))
        finally:
            os.close(fd)

    def _each_request(self, move: Callable[[int], None]) -> None:
        starts = range(0, len(self._image.view), REQUEST_NBYTES)

        def stripe(thread: int) -> None:
            for start in starts[thread :: self._threads]:
                move(start)

        with ThreadPoolExecutor(self._threads) as pool:
            list(pool.map(stripe, range(self._threads)))


def takes_direct(folder: Path) -> bool:
    """Whether files in `folder` take O_DIRECT writes of whole blocks."""
    path = folder / "direct-probe"
    block = mmap.mmap(-1, BLOCK_NBYTES)
    try:
        fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o644)
        try:
            os.pwrite(fd, block, 0)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        path.unlink(missing_ok=True)
    return True


def _write_all(fd: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwritev(fd, [data[done:]], start + done)


def _read_all(fd: int, out: memoryview, start: int, nbytes: int) -> None:
    """Fill `out` from `start`, up to the end of a file of `nbytes`."""
    done, needed = 0, min(len(out), nbytes - start)
    while done < needed:
        count = os.preadv(fd, [out[done:]], start + done)
        if count == 0:
            raise OSError(errno.EIO, f"the file ended at byte {start + done} of {nbytes}")
        done += count
