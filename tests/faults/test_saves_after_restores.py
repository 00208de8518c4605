"""A job that restored from memory what storage does not have yet: its saves go on, or say at once why they do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch

import holdfast
from holdfast import Checkpointer, DeadlineError, FencedError, Memory
from holdfast.keeper import client
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.checkpointer.test_checkpointer import holdfast_rollback
from tests.faults.engine_job import node_memory
from tests.store.test_posix_storage import mounted
from tests.support import nursery
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.nursery import until

TIMEOUT_S = 20.0
#: No save may wait for that long.
AT_ONCE_S = 5.0
NUMEL = 1 << 20


def leave(run: str, node_dir: Path, disk: Path) -> None:
    """Save step 0, which becomes durable, and step 1, which stays in memory: the disk takes records and no more data
    by then. Die."""
    state = {"w": torch.zeros(NUMEL, dtype=torch.int64)}
    checkpointer = Checkpointer(run, state, memory=Memory(node_dir=node_dir))
    checkpointer.save(0).durable.wait(60)
    subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
    state["w"].fill_(1)
    checkpointer.save(1).staged.wait(60)
    os.kill(os.getpid(), signal.SIGKILL)


class Left(NamedTuple):
    """A run whose step 0 is in storage, on a `disk` that takes no more data, and whose step 1 is in memory alone."""

    run: str
    disk: Path
    memory: Memory

    def make_room(self) -> None:
        subprocess.run(["mount", "-o", "remount,size=128m", str(self.disk)], check=True)

    def doctor_removes(self) -> None:
        command = [sys.executable, "-m", "holdfast.cli", "doctor", self.run, "--remove", "--force", "--yes"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        assert "removed" in done.stdout

    def lineage(self) -> list[int]:
        return [commit.step for commit in Run.open(open_store(Location(self.run))).lineage()]


@pytest.fixture
def left(tmp_path: Path) -> Iterator[Left]:
    with mounted(tmp_path / "disk", "tmpfs", "size=20m") as disk, node_memory(tmp_path) as (node_dir,):
        run = str(disk / "run")
        job = nursery.start(leave, run, node_dir, disk, err=tmp_path / "err")
        assert job.wait() == -signal.SIGKILL, job.err
        until(lambda: any((disk / "run" / "checkpoints").glob("step-0000000001-*/manifest*")))  # the keeper has tried
        start_new_job()
        yield Left(run, disk, Memory(node_dir=node_dir))
        end_keepers(node_dir)


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.full((NUMEL,), -1, dtype=torch.int64)}


@contextmanager
def checkpointer_of(
    left: Left, into: dict[str, torch.Tensor], when_full: Literal["wait", "skip"] = "wait", timeout_s: float = TIMEOUT_S
) -> Iterator[Checkpointer]:
    with Checkpointer(left.run, into, memory=left.memory, when_full=when_full, timeout_s=timeout_s) as checkpointer:
        yield checkpointer


def save_at_once(checkpointer: Checkpointer, into: dict[str, torch.Tensor], *steps: int) -> None:
    """Save these steps, and wait until each is durable; no save may wait for anything else."""
    for step in steps:
        into["w"].fill_(step)
        begun_s = time.monotonic()
        handle = checkpointer.save(step)
        assert time.monotonic() - begun_s < AT_ONCE_S
        handle.durable.wait(60)


def assert_restores(left: Left, step: int) -> None:
    """Another job restores `step`, and saves on."""
    start_new_job()
    into = state()
    with checkpointer_of(left, into) as checkpointer:
        assert checkpointer.restore().step == step
        assert (into["w"] == step).all()
        save_at_once(checkpointer, into, step + 1)


@pytest.mark.parametrize("keeper", ["alive", "dead"])
def test_a_checkpoint_that_the_doctor_gave_up_is_restored_from_memory_and_no_save_follows_it(
    left: Left, keeper: str
) -> None:
    if keeper == "dead":
        end_keepers(left.memory.node_dir)
    left.doctor_removes()
    into = state()
    with checkpointer_of(left, into) as checkpointer:
        report = checkpointer.restore()
        assert (report.step, int(into["w"][0])) == (0, 0)
        left.make_room()
        save_at_once(checkpointer, into, 2, 3, 4)
    assert left.lineage() == [4, 3, 2, 0]
    assert_restores(left, 4)


def test_a_checkpoint_that_the_doctor_gives_up_after_its_restore_holds_up_every_save(
    left: Left, caplog: pytest.LogCaptureFixture
) -> None:
    into = state()
    with checkpointer_of(left, into) as checkpointer:
        assert checkpointer.restore().step == 1
        left.doctor_removes()
        into["w"].fill_(2)
        begun_s = time.monotonic()
        first = checkpointer.save(2)  # the disk is still full
        first.staged.wait(AT_ONCE_S)
        assert time.monotonic() - begun_s < AT_ONCE_S
        assert "was never committed: the history goes on from 1.1, with this job's state" in caplog.text
        left.make_room()
        first.durable.wait(60)
        save_at_once(checkpointer, into, 3, 4)
    assert left.lineage() == [4, 3, 2, 0]
    assert_restores(left, 4)


def test_a_job_that_a_rollback_stopped_before_its_first_save_waits_in_every_save_instead_of_being_told(
    left: Left,
) -> None:
    into = state()
    with checkpointer_of(left, into) as checkpointer:
        assert checkpointer.restore().step == 1
        holdfast_rollback(left.run, "step=0")
        for step in (2, 3):
            begun_s = time.monotonic()
            with pytest.raises(FencedError) as caught:
                checkpointer.save(step)
            assert caught.value.code == "fenced.newer_epoch"
            assert time.monotonic() - begun_s < AT_ONCE_S
        assert checkpointer.restore().step == 0
        into["w"].fill_(2)
        begun_s = time.monotonic()
        first = checkpointer.save(2)  # the disk is still full
        assert time.monotonic() - begun_s < AT_ONCE_S
        left.make_room()
        first.durable.wait(60)
        save_at_once(checkpointer, into, 3)
    assert left.lineage() == [3, 2, 0]


def test_where_no_keeper_starts_after_a_restore_from_memory_no_save_goes_to_storage(
    left: Left, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    into = state()
    with checkpointer_of(left, into) as checkpointer:
        assert checkpointer.restore().step == 1
        end_keepers(left.memory.node_dir)
        left.make_room()
        with monkeypatch.context() as patch:
            patch.setattr(client, "_started", lambda *_: 1)
            save_at_once(checkpointer, into, 2)
            assert "saves go to storage, and training waits for them" in caplog.text
        assert left.lineage() == [2, 0]
        save_at_once(checkpointer, into, 3, 4, 5)
        assert "saves go to memory again" in caplog.text
    assert left.lineage() == [5, 4, 3, 2, 0]
    assert_restores(left, 5)


@pytest.mark.slow
@pytest.mark.parametrize("when_full", ["wait", "skip"])
def test_beside_a_full_disk_every_save_after_a_restore_from_memory_waits_in_vain(
    left: Left, when_full: Literal["wait", "skip"]
) -> None:
    into = state()
    with checkpointer_of(left, into, when_full) as checkpointer:
        assert checkpointer.restore().step == 1
        checkpointer._timeout_s = 3.0  # the first save waits for the commit
        for step in (2, 3, 4):
            begun_s = time.monotonic()
            handle = checkpointer.save(step)
            error = handle.durable.error
            if when_full == "wait":
                assert "The checkpoint 1.2, restored from memory" in str(error)
                assert isinstance(error, DeadlineError)
                assert error.code == "timeout.commit"
            else:
                assert handle.skipped
            assert "No space left" in str(error)
            assert time.monotonic() - begun_s < (4.0 if step == 2 else 2.5)
        checkpointer._timeout_s = TIMEOUT_S
        left.make_room()
        until(lambda: left.lineage()[0] == 1)  # the keeper tries again every second
        save_at_once(checkpointer, into, 5, 6)
    assert left.lineage() == [6, 5, 1, 0]


def test_a_job_that_went_back_in_storage_after_its_restore_from_memory_waits_for_a_commit_that_cannot_come(
    left: Left,
) -> None:
    into = state()
    with checkpointer_of(left, into) as checkpointer:
        assert checkpointer.restore().step == 1
        holdfast.load(left.run, into, continues=True)
        assert (into["w"] == 0).all()
        end_keepers(left.memory.node_dir)  # so that none commits it
        left.make_room()
        into["w"].fill_(2)
        holdfast.save(left.run, into, 2)  # opens an epoch of this job
        save_at_once(checkpointer, into, 3, 4)
    assert left.lineage() == [4, 3, 2, 0]
