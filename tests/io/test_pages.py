"""Buffers in huge pages: aligned, shared, gone without a trace. The same holds on a system that has none."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from holdfast.io.pages import HUGE_PAGE_NBYTES, anonymous, in_huge_pages, shared

NBYTES = 4 * HUGE_PAGE_NBYTES
NAME = "holdfast-test-pages"


def memory_file(nbytes: int = NBYTES) -> int:
    fd = os.memfd_create(NAME)
    os.ftruncate(fd, nbytes)
    return fd


def in_maps() -> bool:
    return NAME in Path("/proc/self/maps").read_text()


def test_memory_of_the_process_begins_at_a_huge_page_and_is_empty() -> None:
    data = anonymous(NBYTES + 4096).data
    assert len(data) == NBYTES + 4096
    assert data.ctypes.data % HUGE_PAGE_NBYTES == 0
    assert not data.any()


def test_shared_memory_is_the_files_own() -> None:
    fd = memory_file()
    data = shared(fd, NBYTES)
    data[:] = np.arange(NBYTES, dtype=np.uint32).astype(np.uint8)
    assert data.ctypes.data % HUGE_PAGE_NBYTES == 0
    assert os.pread(fd, NBYTES, 0) == data.tobytes()
    os.pwrite(fd, b"other", 4095)
    assert data[4095:4100].tobytes() == b"other"
    os.close(fd)


def test_a_part_becomes_huge_pages_once_and_stays_the_files_own() -> None:
    fd = memory_file()
    half = shared(fd, NBYTES)[: NBYTES // 2]
    make = in_huge_pages()
    make(half)
    half[:] = 7
    make(half)
    assert os.pread(fd, NBYTES, 0) == b"\7" * (NBYTES // 2) + bytes(NBYTES // 2)
    os.close(fd)


def test_a_part_smaller_than_a_huge_page_is_left_as_it_is() -> None:
    fd = memory_file(8192)
    data = shared(fd, 8192)
    in_huge_pages()(data)
    data[:] = 1
    assert os.pread(fd, 8192, 0) == b"\1" * 8192
    os.close(fd)


def test_shared_memory_goes_with_the_last_array_over_it() -> None:
    fd = memory_file()
    data = shared(fd, NBYTES)
    part = data[1:2]
    os.close(fd)
    del data
    gc.collect()
    assert in_maps()
    part[:] = 1
    del part
    gc.collect()
    assert not in_maps()


CHILD = """
import gc, mmap, os, sys, tempfile
from holdfast.io.pages import shared

with tempfile.TemporaryFile() as file:
    file.truncate(64 << 20)
    data = shared(file.fileno(), 64 << 20, for_children=False)
    low, high = data.ctypes.data, data.ctypes.data + (64 << 20)
pid = os.fork()
if pid:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
own = [mmap.mmap(-1, 1 << 20) for _ in range(60)]
import ctypes
places = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in own]
assert any(low <= place < high for place in places), "the child's mappings lie elsewhere: this shows nothing"
del data
gc.collect()
for each in own:
    each[0] = 1
"""


def test_a_forked_child_does_not_lose_memory_of_its_own_with_a_mapping_that_it_does_not_have() -> None:
    """A forked worker of a DataLoader died of SIGSEGV after a restore from node memory."""
    assert subprocess.run([sys.executable, "-c", CHILD], check=False).returncode == 0
