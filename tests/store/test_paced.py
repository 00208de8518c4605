"""A paced store rests after each request, and ends between two of them."""

from __future__ import annotations

import time

import pytest

from holdfast.latch import Latch
from holdfast.store.paced import PacedStore, PacingStoppedError
from holdfast.testing.memory_store import MemoryStore


def test_each_request_comes_after_a_rest() -> None:
    paced = PacedStore(MemoryStore(), hurry=Latch(), stop=Latch())
    begun_s = time.monotonic()
    for number in range(20):
        paced.create(f"x/{number}", b"x")
    assert time.monotonic() - begun_s >= 20 * 0.002


def test_the_rest_grows_with_the_processor_time_of_its_caller() -> None:
    paced = PacedStore(MemoryStore(), hurry=Latch(), stop=Latch())
    end_s = time.thread_time() + 0.02
    while time.thread_time() < end_s:
        pass
    begun_s = time.monotonic()
    paced.nbytes("x")
    assert time.monotonic() - begun_s >= 0.3


def test_in_a_hurry_it_rests_no_more() -> None:
    hurry = Latch()
    paced = PacedStore(MemoryStore(), hurry=hurry, stop=Latch())
    hurry.set()
    begun_s = time.monotonic()
    for number in range(5000):
        paced.create(f"x/{number}", b"x")
    assert time.monotonic() - begun_s < 5.0  # rests alone would take 10 s


def test_after_the_stop_no_request_is_made() -> None:
    storage, stop = MemoryStore(), Latch()
    paced = PacedStore(storage, hurry=Latch(), stop=stop)
    paced.create("x", b"x")
    stop.set()
    for request in (lambda: paced.create("y", b"y"), lambda: paced.delete("x"), lambda: paced.list("")):
        with pytest.raises(PacingStoppedError):
            request()
    assert list(storage.objects) == ["x"]
