"""Limits in the URL of a bucket: how many requests and bytes one process sends and takes for each second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigurationError, StorageError
from holdfast.io.buffers import run_threads
from holdfast.store.objects import ObjectStore
from holdfast.store.rate_limit import RateLimits, RequestPace
from holdfast.store.timed import TimedStore
from holdfast.store.urls import location_of, text_of
from tests.store.test_posix_storage import random_bytes
from tests.support.servers.s3 import Bucket

#: The smallest part that S3 takes.
PART = 5 << 20


@pytest.fixture(autouse=True)
def _environment(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)


def store_at(bucket: Bucket, limit: str, *, name: str = "run") -> ObjectStore:
    return ObjectStore(location_of(f"{bucket.url}/{name}?{limit}"), part_nbytes=PART)


@contextmanager
def takes_at_least(least_s: float) -> Iterator[None]:
    begun_s = time.monotonic()
    yield
    assert time.monotonic() - begun_s >= least_s


@given(
    st.lists(st.tuples(st.floats(0, 9), st.integers(0, 10**9)), min_size=1, max_size=40),
    st.floats(0.1, 1e9),
    st.floats(0.01, 1e5),
)
def test_no_request_begins_before_those_before_it_have_had_their_time(
    asked: list[tuple[float, int]], bytes_per_s: float, requests_per_s: float
) -> None:
    now_s = 0.0
    pace = RequestPace("s3://b/run", RateLimits(bytes_per_s, requests_per_s), now=lambda: now_s)
    sent_nbytes = 0
    for number, (pause_s, nbytes) in enumerate(asked):
        now_s += pause_s if number else 0.0
        delay_s = pace.delay_s(nbytes=nbytes)
        assert delay_s >= 0
        earliest_s = max(number / requests_per_s, sent_nbytes / bytes_per_s if nbytes else 0.0)
        assert now_s + delay_s >= earliest_s * (1 - 1e-9)
        sent_nbytes += nbytes


def test_a_place_that_was_left_alone_is_free_at_once() -> None:
    now_s = 0.0
    pace = RequestPace("s3://b/run", RateLimits(100.0, 1.0), now=lambda: now_s)
    assert [pace.delay_s(nbytes=400), pace.delay_s(nbytes=1), pace.delay_s()] == [0.0, 4.0, 2.0]
    now_s = 60.0
    assert [pace.delay_s(nbytes=1), pace.delay_s(nbytes=1)] == [0.0, 1.0]


def test_without_a_limit_nothing_waits() -> None:
    pace = RequestPace("s3://b/run", RateLimits())
    assert [pace.delay_s(nbytes=1 << 40) for _ in range(9)] == [0.0] * 9


def test_requests_of_all_threads_and_stores_of_a_place_count_together(bucket: Bucket) -> None:
    stores = [store_at(bucket, "max_requests_per_s=20") for _ in range(2)]
    keys = iter([f"{number}.json" for number in range(11)])

    def create() -> None:
        for key in keys:
            assert stores[hash(key) % 2].create(key, b"x")

    with takes_at_least(10 / 20):
        run_threads(2, create, stop=lambda: None)


def test_another_place_has_a_pace_of_its_own(bucket: Bucket) -> None:
    one, other = (store_at(bucket, "max_requests_per_s=0.001", name=name) for name in ("one", "other"))
    assert one.create("a", b"x")
    assert other.create("a", b"x")  # the next request of either one may begin after a quarter of an hour


def test_an_upload_in_parts_keeps_to_the_bytes_of_each_second(bucket: Bucket) -> None:
    store = store_at(bucket, "max_bytes_per_s=20e6")
    data = np.frombuffer(random_bytes(2 * PART + 999), np.uint8)
    with takes_at_least(2 * PART / 20e6):
        writer = store.writer("file", nbytes=len(data))
        writer.write_at(0, data)
        writer.publish(len(data))
    other = ObjectStore(location_of(f"{bucket.url}/run"))
    assert other.read("file") == data.tobytes()


def test_reads_keep_to_the_bytes_of_each_second(bucket: Bucket) -> None:
    data = np.frombuffer(random_bytes(6 << 20), np.uint8)
    assert ObjectStore(location_of(f"{bucket.url}/run")).create("file", data.tobytes())
    reader = store_at(bucket, "max_bytes_per_s=10e6").reader("file")
    out = np.empty(len(data), np.uint8)
    with takes_at_least((5 << 20) / 10e6):
        for start in range(0, len(data), 1 << 20):
            reader.read_at(start, out[start : start + (1 << 20)])
    assert np.array_equal(out, data)


def test_whoever_has_a_deadline_hears_of_it_in_time(bucket: Bucket) -> None:
    store = store_at(bucket, "max_requests_per_s=0.01")
    begun_s = time.monotonic()
    with TimedStore(store, timeout_s=0.5) as timed:
        timed.create("a", b"x")
        with pytest.raises(StorageError, match="the next one may begin in 9") as error:
            timed.create("b", b"x")
    assert error.value.code == "storage.timeout"
    assert time.monotonic() - begun_s < 10
    assert ObjectStore(location_of(f"{bucket.url}/run")).nbytes("b") is None


def test_an_upload_that_its_limit_slows_down_ends_when_it_is_aborted(bucket: Bucket) -> None:
    store = store_at(bucket, "max_bytes_per_s=1000")
    data = np.zeros(3 * PART, np.uint8)
    writer = store.writer("file", nbytes=len(data))
    writer.write_at(0, data[: 1 << 20])
    begun_s = time.monotonic()
    writer.abort()
    assert time.monotonic() - begun_s < 10
    assert ObjectStore(location_of(f"{bucket.url}/run")).nbytes("file") is None


def test_a_keeper_gets_the_limits_with_the_place(bucket: Bucket) -> None:
    url = f"{bucket.url}/run?max_bytes_per_s=20e6&max_requests_per_s=5"
    assert location_of(text_of(location_of(url))) == location_of(url)


@pytest.mark.parametrize("value", ["0", "-1", "many", "inf", "nan", ""])
def test_a_limit_that_is_no_positive_number_is_an_error(bucket: Bucket, value: str) -> None:
    with pytest.raises(ConfigurationError, match="max_bytes_per_s") as error:
        location_of(f"{bucket.url}/run?max_bytes_per_s={value}")
    assert error.value.code == "config.store_option"
