"""Files mapped into memory without a descriptor each, which Python's own `mmap` keeps: there may be thousands."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from pathlib import Path

import numpy as np

from holdfast.store import linux
from holdfast.store.base import Bytes

CAN_MAP = sys.platform == "linux"

#: Has the kernel charge private memory when it is written to, not when it is mapped: files may be larger than memory.
_MAP_NORESERVE = 0x4000


def map_file(path: str, start: int, stop: int, *, private: bool) -> Bytes:
    """Map bytes ``[start, stop)`` of a file into memory, for as long as an array over it lives; the file may be removed
    meanwhile.

    The memory is read-only; if `private`, the caller may write to it, which does not change the file. Raises `OSError`
    if the file cannot be mapped, or is too short: an access behind its end would kill the process.
    """
    skipped = start % mmap.ALLOCATIONGRANULARITY
    with Path(path).open("rb") as file:
        if os.fstat(file.fileno()).st_size < stop:
            raise OSError(errno.EINVAL, "the file is too short", path)
        memory = _map(file.fileno(), start - skipped, stop - start + skipped, private=private)
    return np.frombuffer(memory, np.uint8)[skipped:] if skipped else np.frombuffer(memory, np.uint8)


def _map(descriptor: int, start: int, nbytes: int, *, private: bool) -> memoryview:
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if private else 0)
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE if private else mmap.MAP_SHARED
    address = linux.map_file(descriptor, nbytes, start=start, protection=protection, flags=flags)
    memory = (ctypes.c_ubyte * nbytes).from_address(address)
    # Not at exit, because other objects may still read the memory then.
    weakref.finalize(memory, linux.unmap, address, nbytes).atexit = False
    return memoryview(memory) if private else memoryview(memory).toreadonly()
