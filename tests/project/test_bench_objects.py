"""``bench objects``: its S3 server, the bars that it judges by, and the tables made of its results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.__main__ import measure
from bench.benchmark import Options
from bench.bucket_ways import KEEPER, num_requests, served, url
from bench.objects import NUM_COMMITS, OBJECTS, S3, commits, head_of, requests_of_save
from bench.schema import OURS, read_result
from bench.state import content
from holdfast.store.base import Store
from holdfast.store.objects import ObjectStore
from holdfast.store.urls import location_of, open_store
from holdfast.testing import StoreConformance
from tests.project.bench_results import objects_result


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with served():
        yield


class TestServer(StoreConformance):
    @pytest.fixture(autouse=True)
    def _url(self, request: pytest.FixtureRequest) -> None:
        self.url = url(request.node.name)

    def make_store(self, tmp_path: Path) -> Store:
        return ObjectStore(location_of(self.url), part_nbytes=5 << 20)


def test_the_requests_of_a_save_are_counted_and_do_not_depend_on_the_number_of_tensors() -> None:
    found = []
    for number in (3, 300):
        state = {str(index): content(str(index), (4,)) for index in range(number)}
        found.append([requests_of_save(url(f"run-{number}"), state, step) for step in (1, 2, 3)])
    assert found[0] == found[1]
    assert found[0][1] == found[0][2] < found[0][0] <= 25


def test_the_head_among_many_commits_takes_as_many_requests_as_among_few() -> None:
    numbers = []
    for length in (3, 300):
        store = open_store(location_of(url(f"head-{length}")))
        for key, data in commits(length).items():
            store.create(key, data)
        before = num_requests()
        assert head_of(store).step == length
        numbers.append(num_requests() - before)
    assert numbers[0] == numbers[1]


def test_each_bar_has_its_own_verdict() -> None:
    assert {what: bar.met for what, bar in OBJECTS.judged(objects_result()).items() if not bar.met} == {
        f"one rank, save {OURS}, of raw": False,
        f"one rank, save {KEEPER}, CPU s/GB": False,
        f"requests for the head among {NUM_COMMITS:,} commits beyond those among 10, {S3}": False,
    }
    bars = OBJECTS.judged(objects_result())
    assert bars["one rank, load, time of dcp-s3torchconnector"].text() == "0.50 (at most 1): met"


def test_the_tables_have_all_parts() -> None:
    lines = OBJECTS.render(objects_result()).splitlines()
    assert "| 10,000 tensors | 21, 11 | 30, 14 |" in lines
    assert "| 10,000 commits | 4.0 (4.0 to 4.0); 5 | 1.0 (1.0 to 1.0); 4 |" in lines
    assert "| a run in a bucket | 3.0 (3.0 to 3.0) |" in lines


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_leaves_a_result_that_its_tables_can_be_made_from(tmp_path: Path) -> None:
    measure(OBJECTS, Options(scale=0, rounds=1, folder=tmp_path), None, tmp_path)
    found = read_result("objects", tmp_path)
    assert {each.contender for each in found.part("transfer").samples} >= {OURS, KEEPER}
    assert OBJECTS.render(found)
    assert not list(tmp_path.glob("bench-*"))
