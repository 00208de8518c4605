"""Memory in huge pages, for buffers that a device fills and empties.

A device needs one request for each contiguous range of memory. Pages of 4096 bytes lie anywhere in memory: 8 MiB of
them can take sixteen requests, which halves the speed of a disk, and the first touch of each page costs time. Where the
system gives no huge pages, the memory works all the same.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Final, NamedTuple
from weakref import WeakSet

import numpy as np

from holdfast.store.base import Bytes
from holdfast.store.linux import collapse_pages, keep_private, map_file

HUGE_PAGE_NBYTES = 2 << 20


class Mapped(NamedTuple):
    """Memory: `data` lies in `mapping`, which is unmapped when nothing refers to it any more."""

    mapping: mmap.mmap
    data: Bytes


def anonymous(nbytes: int) -> Mapped:
    """New memory of this process that begins at a huge page. The system gives its pages when they are first touched."""
    memory = _room(nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.mapping.madvise(mmap.MADV_HUGEPAGE)
    return memory


def shared(fd: int, nbytes: int, *, for_children: bool = True) -> Bytes:
    """Map the first `nbytes` bytes of the memory file `fd`, beginning at a huge page. See `in_huge_pages`.

    Without `for_children`, neither processes that are forked from this one have the mapping, nor core dumps.
    """
    mapping, data = _room(nbytes)
    # Mapped over the middle of a mapping of our own, so that both are unmapped together.
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    map_file(fd, nbytes, protection=protection, flags=mmap.MAP_SHARED, address=data.ctypes.data)
    if not for_children:
        _not_for_children.add(mapping)
        keep_private(data.ctypes.data, nbytes)
    return data


def in_huge_pages() -> Callable[[Bytes], None]:
    """A function that turns parts of a `shared` mapping into huge pages, each when the function first sees it.

    The system gives a memory file small pages, each of which costs time. Any thread may call the function, for parts
    that begin at huge pages; calls at the same time must be for different huge pages. The first call for a huge page
    loses its content. A rest at the end of a part that is less than a huge page stays as it is.
    """
    done: set[int] = set()

    def make(part: Bytes) -> None:
        first: int = part.ctypes.data
        for start in range(0, len(part) - HUGE_PAGE_NBYTES + 1, HUGE_PAGE_NBYTES):
            if first + start not in done:
                done.add(first + start)
                part[start] = 0  # touches one small page, around which the system makes the huge one
                collapse_pages(first + start, HUGE_PAGE_NBYTES)

    return make


#: The mappings that children of this process do not have.
_not_for_children: Final[WeakSet[mmap.mmap]] = WeakSet()


def _keep_in_child() -> None:
    """Keep the objects of mappings that this child does not have. They would unmap their addresses at their end, and
    by then something of the child's own may be there."""
    for mapping in tuple(_not_for_children):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))  # for ever: also when the interpreter ends


os.register_at_fork(after_in_child=_keep_in_child)


def _room(nbytes: int) -> Mapped:
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE_NBYTES
    return Mapped(memory, np.frombuffer(memory, np.uint8, nbytes, start))
