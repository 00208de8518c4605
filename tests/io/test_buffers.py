"""The memory of a pipeline: aligned, bounded, waited for, given back."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from holdfast.io.buffers import BufferPool, run_threads
from tests.io.test_io import MIB, PAGE


def test_buffers_are_page_aligned_and_disjoint() -> None:
    with BufferPool(5 * MIB, buffer_nbytes=2 * MIB) as pool, pool.buffer() as first, pool.buffer() as second:
        assert pool.num_buffers == 2
        assert first.ctypes.data % PAGE == second.ctypes.data % PAGE == 0
        assert abs(first.ctypes.data - second.ctypes.data) >= len(first) == len(second) == 2 * MIB


def test_taking_a_buffer_waits_until_one_is_free() -> None:
    taken = threading.Event()

    def take(pool: BufferPool) -> None:
        with pool.buffer():
            taken.set()

    with BufferPool(MIB, buffer_nbytes=MIB) as pool:
        thread = threading.Thread(target=take, args=(pool,))
        with pool.buffer():
            thread.start()
            assert not taken.wait(0.05)
        assert taken.wait(30)
        thread.join()


def test_a_closed_pool_has_given_its_memory_back() -> None:
    def resident_nbytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    pool = BufferPool(64 * MIB, buffer_nbytes=32 * MIB)
    before = resident_nbytes()
    with pool.buffer() as first, pool.buffer() as second:
        first[:] = second[:] = 1
        assert resident_nbytes() - before > 48 * MIB
    pool.close()
    assert resident_nbytes() - before < 16 * MIB


@pytest.mark.parametrize(("nbytes", "buffer_nbytes"), [(MIB, 2 * MIB), (MIB, 1000), (MIB, 0)])
def test_a_pool_without_room_for_a_whole_block_is_refused(nbytes: int, buffer_nbytes: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        BufferPool(nbytes, buffer_nbytes=buffer_nbytes)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_stops_the_work_of_all_threads_and_reaches_the_caller(num_threads: int) -> None:
    stopped = threading.Event()
    names = set()

    def work() -> None:
        names.add(threading.current_thread().name)
        raise ValueError("no such chunk")

    with pytest.raises(ValueError, match="no such chunk"):
        run_threads(num_threads, work, stop=stopped.set)
    assert stopped.is_set()
    assert names == ({threading.current_thread().name} if num_threads == 1 else {"holdfast-transfer"})
