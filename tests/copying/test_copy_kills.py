"""A copy that is killed with SIGKILL leaves a valid run, and the next call completes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest

import holdfast
from holdfast.errors import NotFoundError
from holdfast.format.records import Place
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import location_of, open_store
from tests.support import nursery
from tests.support.checkpoints import begin, check, save
from tests.support.faulty_storage import FaultyStore
from tests.support.servers.fault_proxy import FaultProxy
from tests.support.servers.faults import on
from tests.support.servers.s3 import Bucket


@pytest.fixture
def source(tmp_path: Path) -> Run:
    run = Run.create(open_store(Location(str(tmp_path / "source"))))
    begin(run)
    for seq in (1, 2, 3, 4):
        save(run, Place(1, seq), 10 * seq)
    begin(run, opened_from=Place(1, 2))
    save(run, Place(2, 1), 50)
    return run


def check_valid(url: str) -> None:
    """Every checkpoint of the run is whole, and the lineage of its head can be read."""
    try:
        run = Run.open(open_store(location_of(url)))
    except NotFoundError:
        return  # it was not begun
    assert run.head_place() in (Place(2, 1), Place(1, 2), Place(1, 1), None)
    for place in {*run.places(), *run.lineage_places()}:
        check(run, run.commit(place))


def check_same(src: str, dst: str) -> None:
    """The copy has the same files. A killed process may leave some bytes of a record's temporary file, and a lease."""
    subprocess.run(["diff", "-r", "-x", ".tmp-*", "-x", "pins", src, dst], check=True)
    assert sum(path.stat().st_size for path in Path(dst).rglob(".tmp-*")) < 10_000


def copy_and_die(src: str, dst: str, environment: Mapping[str, str], change: int) -> None:
    """Copy, and kill this process right before or behind a change of the target."""
    os.environ.update(environment)
    count = 0

    def watch(_: int, when: str, name: str, path: str) -> None:
        nonlocal count
        if name in ("create", "writer", "write_at", "publish", "delete"):
            if count == change:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    with patch("holdfast.copying.open_store", lambda location: FaultyStore(open_store(location), watch)):
        holdfast.copy_run(src, dst)


def check_kills(src: str, dst: str, environment: Mapping[str, str], changes: list[int], err: Path) -> int:
    """Kill a copy at each of `changes` in turn. Returns how many of them there were."""
    num_killed = 0
    for change in changes:
        status = nursery.start(copy_and_die, src, dst, environment, change, err=err).wait()
        assert status in (0, -signal.SIGKILL), err.read_text()
        num_killed += status != 0
        check_valid(dst)
    report = holdfast.copy_run(src, dst)
    assert report.head == "2.1"
    assert len(report.copied) + len(report.present) == 5
    check_valid(dst)
    return num_killed


def test_a_copy_that_is_killed_again_and_again_ends_whole(source: Run, tmp_path: Path) -> None:
    src, dst = source.storage.location.url, str(tmp_path / "copy")
    assert check_kills(src, dst, {}, [0, 3, 8, 13, 21, 21, 21], tmp_path / "err") == 7
    check_same(src, dst)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_kills_at_random_instants(source: Run, tmp_path: Path, seed: int) -> None:
    src, dst = source.storage.location.url, str(tmp_path / "copy")
    random.seed(seed)
    for _ in range(20):
        process = nursery.start(holdfast.copy_run, src, dst, err=tmp_path / "err")
        time.sleep(random.uniform(0, 0.3))
        assert process.kill() in (0, -signal.SIGKILL)
        check_valid(dst)
    holdfast.copy_run(src, dst)
    check_same(src, dst)


@pytest.mark.slow
def test_a_copy_into_a_bucket_that_is_killed(
    source: Run, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    src, dst = source.storage.location.url, f"{bucket.url}/copy"
    assert check_kills(src, dst, bucket.environment, [*range(0, 40, 3)], tmp_path / "err") > 8


@pytest.mark.slow
def test_lost_answers_and_broken_connections_of_a_bucket_do_no_harm(
    source: Run, bucket: Bucket, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    dst = f"{bucket.url}/copy?endpoint={proxy.endpoint}"
    faults = (
        on("PUT", "*/history/*").once().loses_the_answer(),
        on("PUT", "*/epochs/*").once().loses_the_answer(),
        on("PUT", "*data-00001*").once().loses_the_answer(),
        on("PUT", "*seal.json*").once().breaks_the_connection(),
        on("PUT", "*manifest*").once().answers(503),
    )
    with proxy.faults(*faults):
        assert len(holdfast.copy_run(source.storage.location.url, dst).copied) == 5
    check_valid(f"{bucket.url}/copy")
