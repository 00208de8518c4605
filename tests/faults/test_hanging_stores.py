"""A store that is slow or silent: every rank raises an error in time, with cause, place and action; no half
checkpoint appears; the head stays; the next save works."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import HoldfastError, StorageError, loading, saving
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel
from holdfast.store.base import Store
from holdfast.store.posix import PosixStore
from holdfast.store.timed import TimedStore
from tests.faults.small_job import check_aftermath, failure, head, save, save_in_new_job, state, temporaries
from tests.support.faulty_storage import FaultyStore, HangAt, watched_store
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks

#: Of the saves that a store hangs in. The store is given up at nine tenths, and what is left must be enough for a rank
#: on a busy machine to tell the others.
TIMEOUT_S = 3.0
#: The time after that within which a busy machine must notice it.
SLACK_S = 8.0


def timed(call: Callable[[], object]) -> tuple[HoldfastError, float]:
    start = time.monotonic()
    error = failure(call)
    return error, time.monotonic() - start


def timed_together(call: Callable[[], object]) -> tuple[HoldfastError, float]:
    """As `timed`, on all ranks from the same time on: the deadline of a rank begins when it makes the call, so one that
    comes late tells the others of its store when these have given it up."""
    dist.barrier()
    return timed(call)


def is_request(name: str, kind: str, when: str = "before") -> Callable[[int, str, str, str], bool]:
    """Picks requests of that name for that part of a run."""
    return lambda _, when_, name_, path: (when_, name_) == (when, name) and kind in path


def save_hanging(run: str, rank: int, name: str, kind: str, when: str) -> tuple[str, str, str | None, float, str, str]:
    """Save twice on a store that falls silent to `rank` in the first save."""
    resumed_here(run)
    hang = HangAt(is_request(name, kind, when) if dist.get_rank() == rank else lambda *_: False)
    with watched_store(hang):
        error, took_s = timed_together(lambda: save(run, 2, timeout_s=TIMEOUT_S))
        place = save(run, 3)
        hang.release()
        later = save(run, 4)
    return type(error).__name__, error.code, error.path, took_s, place, later


def resumed_here(run: str) -> None:
    """Make this rank a new job that has loaded the head of `run` and remembers no plan."""
    start_new_job()
    saving._known.clear()
    holdfast.load(run, into=state(0, rank=dist.get_rank(), world_size=dist.get_world_size()), continues=True)


HANGS = [
    (1, "write_at", "", "before"),
    (1, "publish", "", "after"),
    (0, "create", "manifest", "before"),
    (0, "create", "seal", "before"),
]
RARE_HANGS = [
    (1, "writer", "", "before"),
    (1, "writer", "", "after"),
    (1, "read", "manifest", "before"),
    (1, "nbytes", "manifest", "before"),
    (0, "list", "", "before"),
    (0, "create", "epochs", "before"),
    (0, "create", "epochs", "after"),
    (0, "write_at", "", "after"),
    (0, "create", "history", "before"),
]


@pytest.mark.parametrize(
    ("rank", "name", "kind", "when"),
    [pytest.param(*hang, id="-".join(map(str, hang))) for hang in HANGS]
    + [pytest.param(*hang, id="-".join(map(str, hang)), marks=pytest.mark.slow) for hang in RARE_HANGS],
)
@pytest.mark.few(2)
def test_a_store_that_falls_silent_to_one_rank_is_told_to_all_in_time(
    tmp_path: Path, rank: int, name: str, kind: str, when: str
) -> None:
    run = str(tmp_path / "run")
    run_ranks(2, save_in_new_job, run, 1)
    outcomes = run_ranks(2, save_hanging, run, rank, name, kind, when)
    assert len({(type_, code, path, *places) for type_, code, path, _, *places in outcomes}) == 1
    for type_, code, path, took_s, _, _ in outcomes:
        assert (type_, code) == ("StorageError", "storage.timeout")
        assert path is not None
        assert path.startswith(run)
        assert took_s < TIMEOUT_S + SLACK_S
    assert head(run) == 4
    # A commit whose answer was given up may come to be later: at its own place, behind the head.
    assert [step for step in range(1, 5) if not commits(run, step)] == ([] if kind == "history" else [2])
    assert temporaries(Path(run)) == []


def commits(run: str, step: int) -> bool:
    try:
        return holdfast.open(f"{run}@step={step}").step == step
    except holdfast.NotFoundError:
        return False


def save_on_dead_store(run: str, name: str) -> tuple[str, float, str]:
    """Save twice; in the first save the store falls silent to all ranks, for good."""
    resumed_here(run)
    hang = HangAt(is_request(name, ""), for_good=True)
    with watched_store(hang):
        error, took_s = timed_together(lambda: save(run, 2, timeout_s=TIMEOUT_S))
        hang.release()
        return error.code, took_s, save(run, 3)


@pytest.mark.parametrize("name", ["write_at", "publish", pytest.param("list", marks=pytest.mark.slow)])
@pytest.mark.few(1)
def test_a_store_that_dies_for_all_ranks_hangs_none(tmp_path: Path, name: str) -> None:
    run = str(tmp_path / "run")
    run_ranks(2, save_in_new_job, run, 1)
    for code, took_s, _ in run_ranks(2, save_on_dead_store, run, name):
        assert code == "storage.timeout"
        assert took_s < TIMEOUT_S + SLACK_S
    assert head(run) == 3


def test_a_store_that_is_too_slow_is_given_up_in_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_in_new_job(str(run), 1)

    def dawdle(*_: object) -> None:
        time.sleep(0.05)

    with watched_store(dawdle):
        error, took_s = timed(lambda: save(str(run), 2, timeout_s=0.5))
    assert (type(error), error.code) == (StorageError, "storage.timeout")
    assert "0.45 s" in str(error)
    assert took_s < 0.5 + SLACK_S
    check_aftermath(run, error)


class LoadOnSilentStore(NamedTuple):
    """The error of a load, and its time; and the step of a later load, which nothing changed afterwards."""

    type_: str
    code: str
    took_s: float
    step: int
    is_unchanged: bool


def load_hanging(run: str, name: str, late_s: float) -> LoadOnSilentStore:
    """Load twice; in the first load the store, which each rank opens `late_s` after its deadline has begun, falls
    silent to rank 1."""
    into = state(0, rank=dist.get_rank(), world_size=2)
    tensors = [value for value in into.values() if isinstance(value, torch.Tensor)]
    hang = HangAt(is_request(name, "") if dist.get_rank() == 1 else lambda *_: False)

    def late_channel(label: str, group: dist.ProcessGroup | None, *, deadline: Deadline) -> Channel:
        time.sleep(late_s)
        return default_channel(label, group, deadline=deadline)

    with watched_store(hang), pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "default_channel", late_channel)
        error, took_s = timed_together(lambda: holdfast.load(run, into=into, timeout_s=TIMEOUT_S))
        step = holdfast.load(run, into=into, timeout_s=60).step
        loaded = [tensor.clone() for tensor in tensors]
        torch._foreach_add_(tensors, 1)  # training goes on
        hang.release()
        time.sleep(0.2)
    unchanged = all(map(torch.equal, tensors, [tensor + 1 for tensor in loaded]))
    return LoadOnSilentStore(type(error).__name__, error.code, took_s, step, unchanged)


@pytest.mark.parametrize(
    ("name", "late_s"),
    [("read_at", 1.0), *(pytest.param(name, 0.0, marks=pytest.mark.slow) for name in ("reader", "read", "list"))],
)
def test_a_store_that_falls_silent_in_a_load_is_told_to_all_and_changes_nothing_later(
    tmp_path: Path, name: str, late_s: float
) -> None:
    run = str(tmp_path / "run")
    run_ranks(2, save_in_new_job, run, 1)
    for load in run_ranks(2, load_hanging, run, name, late_s):
        assert (load.type_, load.code) == ("StorageError", "storage.timeout")
        assert load.took_s < TIMEOUT_S + SLACK_S
        assert load.step == 1
        assert load.is_unchanged


class SilentStorage(FaultyStore):
    """A store of which the question where it is may hang, too."""

    def resolved(self) -> str:
        with self.watched("resolved", ""):
            return super().resolved()


REQUESTS: dict[str, Callable[[Store], object]] = {
    "resolved": lambda storage: storage.resolved(),
    "read": lambda storage: storage.read("file"),
    "nbytes": lambda storage: storage.nbytes("file"),
    "list": lambda storage: storage.list(""),
    "create": lambda storage: storage.create("file", b""),
    "writer": lambda storage: storage.writer("file", nbytes=4096),
    "reader": lambda storage: storage.reader("file"),
    "delete": lambda storage: storage.delete("file"),
    "leftovers": lambda storage: storage.leftovers(""),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_every_request_of_a_store_that_hangs_is_given_up_in_time(tmp_path: Path, name: str) -> None:
    hang = HangAt(lambda *_: True)
    silent = SilentStorage(PosixStore(str(tmp_path)), hang)
    codes: list[str] = []

    def ask() -> None:
        with TimedStore(silent, timeout_s=0.3) as storage, pytest.raises(StorageError) as caught:
            REQUESTS[name](storage)
        codes.append(caught.value.code)

    caller = threading.Thread(target=ask, daemon=True)
    caller.start()
    caller.join(0.3 + SLACK_S)
    hang.release()
    assert codes == ["storage.timeout"]
