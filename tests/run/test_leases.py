"""Readers keep what they read from being deleted, where checkpoints are deleted by a policy, and wait for nothing."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import holdfast
from holdfast.format.hold_records import parse_hold_name
from holdfast.format.records import Place
from holdfast.loading.filling import Filling
from holdfast.run import leases
from holdfast.run.history import Run
from holdfast.run.leases import ReadLease, want_leases
from holdfast.store.posix import PosixStore
from holdfast.store.urls import location_of, open_store
from tests.support.nursery import until


@pytest.fixture
def saved(run: str) -> Run:
    """A run with the steps 1, 2, 3, whose checkpoints are deleted by a policy."""
    for step in (1, 2, 3):
        holdfast.save(run, {"w": torch.full((10,), step)}, step)
    opened = Run.open(open_store(location_of(run)))
    want_leases(opened.storage)
    return opened


def leased_places(run: Run) -> list[Place]:
    """The places that readers have leased, as of now."""
    names = map(parse_hold_name, run.storage.list("pins"))
    return [name.place for name in names if name is not None and name.kind == "until"]


@contextmanager
def reads_that_last(run: Run, found: list[list[Place]]) -> Iterator[None]:
    """In this block, each load waits for a lease before its end, and adds the leased places to `found`."""
    finish = Filling.finish

    def look(self: Filling, *arguments: object) -> object:
        until(lambda: leased_places(run) != [])
        found.append(leased_places(run))
        return finish(self, *arguments)

    with patch.object(Filling, "finish", look):
        yield


def test_a_load_has_a_lease_until_it_ends(saved: Run, run: str) -> None:
    found: list[list[Place]] = []
    with reads_that_last(saved, found):
        holdfast.load(f"{run}@step=2", {"w": torch.zeros(10, dtype=torch.int64)})
    assert found == [[Place(1, 2)]]
    until(lambda: leased_places(saved) == [])


def test_a_checkpoint_is_removed_right_after_it_was_loaded(saved: Run, run: str) -> None:
    for step in (1, 2):
        holdfast.load(f"{run}@step={step}", {"w": torch.zeros(10, dtype=torch.int64)})
        holdfast.remove(f"{run}@step={step}")
    assert [each.step for each in holdfast.ls(run)] == [3]


def test_a_load_that_fails_gives_its_lease_back(saved: Run, run: str) -> None:
    with pytest.raises(holdfast.IncompatibleError):
        holdfast.load(run, {"other": torch.zeros(10)})
    until(lambda: leased_places(saved) == [])


def test_where_nobody_deletes_by_a_policy_a_read_leaves_nothing(run: str) -> None:
    holdfast.save(run, {"w": torch.zeros(10)}, 1)
    holdfast.load(run, {"w": torch.zeros(10)})
    view = holdfast.open(run)
    assert view["w"].numpy().tolist() == [0] * 10
    assert not (Path(run) / "pins").exists()


def test_a_policy_makes_readers_leave_leases(run: str) -> None:
    with holdfast.Checkpointer(run, {"w": torch.zeros(3)}, memory=None, keep=holdfast.KeepLast(2)) as checkpointer:
        checkpointer.save(1)
    assert leases.lease_is_wanted(open_store(location_of(run)))


def test_an_open_view_keeps_its_checkpoint(saved: Run, run: str) -> None:
    view = holdfast.open(f"{run}@step=1")
    tensor = view["w"]
    until(lambda: leased_places(saved) == [Place(1, 1)])
    with pytest.raises(holdfast.ConfigurationError) as caught:
        holdfast.remove(f"{run}@step=1")
    assert caught.value.code == "config.in_use"
    del view
    assert tensor.numpy().tolist() == [1] * 10
    assert leased_places(saved) == [Place(1, 1)]
    del tensor
    until(lambda: leased_places(saved) == [])
    holdfast.remove(f"{run}@step=1")


def test_a_view_with_a_lease_goes_to_other_processes(saved: Run, run: str) -> None:
    view = holdfast.open(run)
    again = pickle.loads(pickle.dumps(view))
    assert again["w"].numpy().tolist() == [3] * 10


def test_a_lease_is_renewed_before_it_ends(saved: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 0.1)
    seen = set[str]()
    lease = ReadLease(saved.storage, Place(1, 1))

    def is_renewed() -> bool:
        seen.update(saved.storage.list("pins"))
        return len(seen) > 4

    until(is_renewed)
    assert leased_places(saved)
    lease.end()
    until(lambda: leased_places(saved) == [])
    lease.end()


def test_a_reader_does_not_wait_for_a_lease(saved: Run, run: str) -> None:
    create, goes_on = PosixStore.create, threading.Event()

    def slow(store: PosixStore, key: str, data: bytes) -> bool:
        assert goes_on.wait(60)
        return create(store, key, data)

    with patch.object(PosixStore, "create", slow):
        begun_s = time.monotonic()
        holdfast.load(run, {"w": torch.zeros(10, dtype=torch.int64)})
        assert time.monotonic() - begun_s < 30
        goes_on.set()
        until(lambda: not leases._LIVING)
    assert leased_places(saved) == []


def test_a_store_that_takes_no_records_is_read_without_a_lease(saved: Run, run: str) -> None:
    def refuse(store: PosixStore, key: str, data: bytes) -> bool:
        raise holdfast.StorageError("no", code="storage.denied", action="", path=key)

    into = {"w": torch.zeros(10, dtype=torch.int64)}
    with patch.object(PosixStore, "create", refuse):
        holdfast.load(run, into)
        until(lambda: not leases._LIVING)
    assert into["w"].tolist() == [3] * 10
    assert leased_places(saved) == []


def test_the_end_of_a_process_deletes_its_leases(saved: Run, run: str) -> None:
    code = (
        "import sys, time, holdfast\n"
        "from pathlib import Path\n"
        "view = holdfast.open(sys.argv[1])\n"
        "while not list((Path(sys.argv[1]) / 'pins').glob('*until*')): time.sleep(0.01)\n"
    )
    subprocess.run([sys.executable, "-c", code, run], check=True, timeout=60)
    assert leased_places(saved) == []


def test_a_view_says_that_its_checkpoint_was_deleted_where_a_first_prune_came_without_a_lease(run: str) -> None:
    """The error took it for damage, and advised to restore a file."""
    for step in (1, 2):
        holdfast.save(run, {"w": torch.full((10,), step)}, step)
    view = holdfast.open(f"{run}@step=1")
    holdfast.remove(f"{run}@step=1")
    with pytest.raises(holdfast.CorruptError, match=r"step 1 was deleted from its run after.*Pin the one you read"):
        view["w"].numpy()
