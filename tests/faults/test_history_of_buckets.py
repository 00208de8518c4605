"""The campaign: random histories of a run in a bucket whose server and network fail, against the model of histories.

Jobs save, resume, sleep, die, roll back, take over and remove, as in `tests.run.test_history_machine`. Their requests
pass a proxy that loses answers, breaks connections, and refuses some in the server's place. The history shows none of
this, and none of it is an error: each failure passes.

HOLDFAST_CAMPAIGN_SCHEDULES says how many histories there are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from holdfast.store.base import Store
from holdfast.store.objects import ObjectStore
from holdfast.store.urls import location_of
from tests.run.test_history_machine import HistoryMachine, explore, impatient
from tests.support.servers.fault_proxy import FaultProxy
from tests.support.servers.faults import Fault, on
from tests.support.servers.s3 import Bucket, FastServer

__all__ = ["impatient"]

#: The campaign is run in so many parts.
NUM_PARTS = 10
#: Failures that pass: what happens to one of the next requests, or to some.
FAULTS = (
    on("PUT", "*/history/*").once().loses_the_answer(),
    on("PUT", "*/history/*").once().answers(409),
    on("PUT", "*/history/*").once().breaks_the_connection(),
    on("PUT", "*/epochs/*").once().loses_the_answer(),
    on("PUT", "*/epochs/*").once().answers(409),
    on("PUT", "*seal*").once().loses_the_answer(),
    on("PUT", "*manifest*").once().loses_the_answer(),
    on("PUT").times(2).answers(503),
    on("PUT").times(2).answers(500),
    on("PUT").once().cuts_the_request(after=10),
    on("GET").times(2).answers(503),
    on("GET").once().cuts_the_answer(after=20),
    on("GET", "*list-type*").once().breaks_the_connection(),
    on("HEAD").once().breaks_the_connection(),
    on("DELETE").once().loses_the_answer(),
    on("DELETE").once().answers(503),
    on().once().waits(0.1),
)


class BucketHistoryMachine(HistoryMachine):
    """The run lies in a bucket. The model reads it there; processes reach it through the proxy."""

    bucket: ClassVar[Bucket]
    proxy: ClassVar[FaultProxy]
    num_faults: ClassVar[int] = 0
    _numbers: ClassVar = count()

    def new_storage(self) -> Store:
        self.url = f"{self.bucket.url}/run-{next(self._numbers)}"
        return ObjectStore(location_of(self.url))

    def reached_storage(self) -> Store:
        return ObjectStore(location_of(f"{self.url}?endpoint={self.proxy.endpoint}"))

    @rule(faults=st.lists(st.sampled_from(FAULTS), min_size=1, max_size=3))
    def fail(self, faults: list[Fault]) -> None:
        self.proxy.add(*faults)
        BucketHistoryMachine.num_faults += len(faults)

    def teardown(self) -> None:
        self.proxy.clear()
        super().teardown()


def explore_bucket(bucket: Bucket, proxy: FaultProxy, *, num_examples: int, num_steps: int) -> int:
    """Run so many histories of so many steps. Returns how many checkpoints were compared."""
    BucketHistoryMachine.bucket, BucketHistoryMachine.proxy = bucket, proxy
    return explore(BucketHistoryMachine, num_examples=num_examples, num_steps=num_steps)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FastServer]:
    server = FastServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def bucket(server: FastServer, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    bucket = server.new_bucket()
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    return bucket


@pytest.fixture
def proxy(server: FastServer) -> Iterator[FaultProxy]:
    with FaultProxy(server.endpoint) as proxy:
        yield proxy


@pytest.mark.timeout(300)
def test_no_passing_failure_is_seen_in_the_history_of_a_bucket(bucket: Bucket, proxy: FaultProxy) -> None:
    assert explore_bucket(bucket, proxy, num_examples=3, num_steps=10) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(NUM_PARTS))  # each with a server and a proxy of its own
def test_no_passing_failure_is_seen_in_a_thousand_histories_of_buckets(
    bucket: Bucket, proxy: FaultProxy, part: int
) -> None:
    num_schedules = int(os.environ.get("HOLDFAST_CAMPAIGN_SCHEDULES", "1000")) // NUM_PARTS
    before = BucketHistoryMachine.num_faults
    assert explore_bucket(bucket, proxy, num_examples=num_schedules, num_steps=10) >= num_schedules
    assert BucketHistoryMachine.num_faults - before >= num_schedules
