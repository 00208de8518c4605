"""A file system that falls silent under a job: no call outlasts its time, and the job goes on when it is back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, HoldfastError, Memory
from tests.faults.silent_mount import can_fall_silent, silent
from tests.support.models import start_new_job

TIMEOUT_S = 3.0
#: The time after that within which a busy machine must notice it.
SLACK_S = 6.0


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder that may fall silent."""
    folder = tmp_path / "store"
    folder.mkdir()
    if not can_fall_silent(folder):
        pytest.skip("needs /dev/fuse and the right to mount")
    return folder


def state() -> dict[str, object]:
    return {"weight": torch.arange(1000.0), "epoch": 3}


def in_time(call: Callable[[], object], *, limit_s: float = TIMEOUT_S + SLACK_S) -> HoldfastError | None:
    """The error that `call` raises; `call` must end in time."""
    outcome: list[HoldfastError | None] = []

    def make() -> None:
        try:
            call()
            outcome.append(None)
        except HoldfastError as error:
            outcome.append(error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    thread.join(limit_s)
    assert not thread.is_alive(), "it hangs"
    return outcome[0]


VERBS: dict[str, Callable[[str], object]] = {
    "save": lambda run: holdfast.save(run, state(), 2, timeout_s=TIMEOUT_S),
    "load": lambda run: holdfast.load(run, state(), timeout_s=TIMEOUT_S),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.few(1)
def test_a_verb_on_a_store_that_fell_silent_ends_in_time_and_works_when_it_is_back(store: Path, verb: str) -> None:
    start_new_job()
    run = str(store / "run")
    holdfast.save(run, state(), 1)
    with silent(store):
        error = in_time(lambda: VERBS[verb](run))
    assert error is not None
    assert error.code == "storage.timeout"
    VERBS[verb](run)


@pytest.mark.slow
def test_a_checkpointer_whose_store_falls_silent_holds_nobody_up(store: Path, memory: Memory) -> None:
    start_new_job()
    run = str(store / "run")
    checkpointer = Checkpointer(run, state(), memory=memory, timeout_s=TIMEOUT_S)
    checkpointer.save(1).durable.wait(20)
    with silent(store):
        # The save takes its place without the store, and stays in memory; training goes on.
        handle = checkpointer.save(2)
        error = in_time(lambda: handle.durable.wait(TIMEOUT_S))
        assert error is not None
        assert error.code == "timeout.save"
    handle.durable.wait(60)
    checkpointer.save(4).durable.wait(20)
    checkpointer.close()
    assert holdfast.open(run).step == 4


@pytest.mark.slow
def test_a_checkpointer_closes_in_time_on_a_store_that_fell_silent(store: Path, memory: Memory) -> None:
    start_new_job()
    run = str(store / "run")
    checkpointer = Checkpointer(run, state(), memory=memory, timeout_s=TIMEOUT_S)
    checkpointer.save(1).durable.wait(20)
    with silent(store):
        checkpointer.save(2)
        error = in_time(checkpointer.close)
        assert error is not None


@pytest.mark.parametrize("verb", ["save", "restore"])
@pytest.mark.few(1)
def test_a_new_job_on_a_store_that_fell_silent_ends_in_time(store: Path, memory: Memory, verb: str) -> None:
    start_new_job()
    run = str(store / "run")
    with Checkpointer(run, state(), memory=memory) as checkpointer:
        checkpointer.save(1)
    start_new_job()
    with silent(store):
        new: list[Checkpointer] = []
        assert in_time(lambda: new.append(Checkpointer(run, state(), memory=memory, timeout_s=TIMEOUT_S))) is None
        error = in_time(new[0].restore if verb == "restore" else lambda: new[0].save(2))
        assert error is not None
    new[0].restore()
    new[0].save(3).durable.wait(20)
    new[0].close()
