"""Memory in huge pages, for buffers that a device fills and empties.

A device takes one request for memory that is contiguous. Pages of 4096 bytes lie anywhere: 8 MiB of them can be sixteen
requests, which halves the speed of a disk, and each page costs time when it is first touched. Where the system has no
huge pages for us, the memory works all the same.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from holdfast.store.base import Bytes
from holdfast.store.linux import collapse_pages, map_file

HUGE_PAGE_NBYTES = 2 << 20


class Mapped(NamedTuple):
    """Memory: `data`, somewhere in `mapping`, which goes when nothing refers to it any more."""

    mapping: mmap.mmap
    data: Bytes


def anonymous(nbytes: int) -> Mapped:
    """New memory of this process, which begins at a huge page. It is taken from the system as it is touched."""
    memory = _room(nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.mapping.madvise(mmap.MADV_HUGEPAGE)
    return memory


def shared(fd: int, nbytes: int) -> Bytes:
    """The first bytes of the memory file `fd`, which begin at a huge page. See `in_huge_pages`."""
    data = _room(nbytes).data
    # Over the middle of a mapping of our own, with which it goes.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    map_file(fd, nbytes, protection=protection, flags=mmap.MAP_SHARED, address=data.ctypes.data)
    return data


def in_huge_pages() -> Callable[[Bytes], None]:
    """A function that makes huge pages of memory of a `shared` mapping when it sees it for the first time.

    The system gives a memory file small pages, each of which costs time. The function may be called from any thread,
    for parts that begin at huge pages, and have none in common at the same time; the memory's content is lost the first
    time. What is less than a huge page at the end of a part stays as it is.
    """
    done: set[int] = set()

    def make(part: Bytes) -> None:
        first: int = part.ctypes.data
        for start in range(0, len(part) - HUGE_PAGE_NBYTES + 1, HUGE_PAGE_NBYTES):
            if first + start not in done:
                done.add(first + start)
                part[start] = 0  # a small page, around which the huge one is made
                collapse_pages(first + start, HUGE_PAGE_NBYTES)

    return make


def _room(nbytes: int) -> Mapped:
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE_NBYTES
    return Mapped(memory, np.frombuffer(memory, np.uint8, nbytes, start))
