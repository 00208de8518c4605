"""Caches: how the benchmarks make reads come from the device, and writes go to it."""

from __future__ import annotations

import os
from pathlib import Path

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_PAGES_AND_INODES = "3"


def how_dropped() -> str:
    """The way in which `settle` empties the page cache on this machine, in words for the result file."""
    if os.access(_DROP_CACHES, os.W_OK):
        return "sync and drop_caches before each timing"
    return "sync and posix_fadvise(DONTNEED) of the files read before each timing (drop_caches is denied)"


def settle(folder: Path) -> None:
    """Write all dirty pages back, then drop cached pages: all of them, or where denied those of `folder`."""
    os.sync()
    if os.access(_DROP_CACHES, os.W_OK):
        _DROP_CACHES.write_text(_PAGES_AND_INODES)
        return
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
