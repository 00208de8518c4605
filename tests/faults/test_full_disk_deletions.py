"""`keep=` on a disk with room for one checkpoint more than it keeps: whatever was missed before, saves go on by
themselves, because what the policy does not keep is deleted without a commit. Real tmpfs mounts, real SIGKILL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import holdfast
from holdfast import Checkpointer, EverySteps, KeepLast, Memory, StorageError
from holdfast.checkpointer import pruning
from holdfast.format.records import SEAL_NAME, Place, commit_name
from holdfast.run import removal
from holdfast.run.diagnosis import examine
from holdfast.run.history import Run
from holdfast.run.retention import Retention, RetentionOutcome, RetentionSurvey
from holdfast.store.posix import PosixWriter
from holdfast.store.urls import location_of, open_store
from tests.store.test_posix_storage import mounted
from tests.support import nursery
from tests.support.models import start_new_job
from tests.support.nursery import until
from tests.support.ranks import run_ranks

#: The elements of the state, which take 2 MB: two checkpoints fit on the disk, and three do not.
NUM_ELEMENTS = 500_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "tmpfs", "size=5m") as folder:
        yield folder


def steps(run: str) -> list[int]:
    return [each.step for each in holdfast.ls(run)]


def state_of(value: float) -> dict[str, object]:
    return {"w": torch.full((NUM_ELEMENTS,), float(value))}


def fill(disk: Path) -> Path:
    """Leave no byte of the disk."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        file.write(bytes(os.statvfs(disk).f_bavail * 4096))
    assert os.statvfs(disk).f_bavail == 0
    return filler


def folder_names(run: str) -> list[str]:
    return sorted(name for name in os.listdir(f"{run}/checkpoints"))


def loaded(run: str) -> float:
    into = state_of(-1)
    holdfast.load(run, into)
    return float(into["w"].unique())  # type: ignore[attr-defined]


def test_prune_needs_no_byte(disk: Path) -> None:
    run = str(disk / "run")
    for step in (1, 2):
        holdfast.save(run, state_of(step), step)
    fill(disk)
    command = [sys.executable, "-m", "holdfast", "prune", run, "--keep-last", "1", "--yes"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert steps(run) == [2]
    assert len(folder_names(run)) == 1
    empty = [path.name for path in Path(run).rglob("*") if path.is_file() and not path.stat().st_size]
    assert sorted(empty) == ["9999999998-9999999998.removed.json", "leases.json"]
    assert examine(Run.open(open_store(location_of(run)))) == []
    assert loaded(run) == 2


def test_an_interrupted_deletion_goes_on_where_no_byte_is_left(disk: Path) -> None:
    run = str(disk / "run")
    for step in (1, 2):
        holdfast.save(run, state_of(step), step)
    opened = Run.open(open_store(location_of(run)))
    (folder,) = [name for name in folder_names(run) if name.startswith("step-0000000001-")]
    opened.storage.delete(f"history/{commit_name(Place(1, 1))}")
    opened.storage.delete(f"checkpoints/{folder}/{SEAL_NAME}")
    with (
        patch.object(removal, "_delete_files", side_effect=StorageError("no", code="storage.io", action="Ask.")),
        pytest.raises(StorageError),
    ):
        removal.abandon(opened, folder)
    fill(disk)
    retention = Retention(KeepLast(1))
    assert retention.apply(opened, retention.survey(opened)).finished == [folder]
    assert len(os.listdir(f"{run}/checkpoints/{folder}")) == 1


def train(run: str, node_dir: str, total: int, deadly: int) -> None:
    """Train to step `total`; die in the place of the deletion of step `deadly`."""
    state = {"w": torch.zeros(NUM_ELEMENTS)}
    work = Retention.apply

    def dies(self: Retention, opened: Run, survey: RetentionSurvey, **options: Any) -> RetentionOutcome:
        if deadly in [facts.step for facts in survey.decision.deleted]:
            os.kill(os.getpid(), signal.SIGKILL)
        return work(self, opened, survey, **options)

    memory = Memory(node_dir=Path(node_dir)) if node_dir else None
    with (
        patch.object(Retention, "apply", dies),
        Checkpointer(run, state, save=EverySteps(1), keep=KeepLast(1), memory=memory, timeout_s=20) as checkpointer,
    ):
        for step in checkpointer.steps(total):
            assert (state["w"] == step).all()
            state["w"] += 1
            checkpointer.step(step)


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_job_that_died_between_a_commit_and_its_deletion_goes_on(
    disk: Path, node_dir: Path, tmp_path: Path, *, in_memory: bool
) -> None:
    run = str(disk / "run")
    nodes = str(node_dir) if in_memory else ""
    process = nursery.start(train, run, nodes, 4, 1, err=tmp_path / "err")
    assert process.wait() == -signal.SIGKILL, process.err
    assert steps(run) == [2, 1]
    filler = fill(disk) if in_memory else None
    process = nursery.start(train, run, nodes, 5, -1, err=tmp_path / "err2")
    if filler is not None:
        until(lambda: 1 not in steps(run))  # no byte was left, and this job had no epoch
        filler.unlink()
    assert process.wait() == 0, process.err
    assert steps(run) == [4]
    assert loaded(run) == 5


def test_a_round_that_failed_is_tried_again_without_a_commit(disk: Path) -> None:
    run = str(disk / "run")
    work, num_calls = Retention.apply, 0

    def fails_twice(*arguments: object, **options: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= 2:
            raise StorageError("no", code="storage.io", action="Ask.")
        return work(*arguments, **options)  # type: ignore[arg-type]

    with (
        patch.object(pruning, "_PAUSE_S", 0.05),
        patch.object(Retention, "apply", fails_twice),
        Checkpointer(run, state_of(1), keep=KeepLast(1), memory=None) as checkpointer,
    ):
        checkpointer.save(1)
        checkpointer.save(2)
        until(lambda: steps(run) == [2])
        checkpointer.save(3)


def test_a_save_that_finds_no_space_says_why_and_goes_on_when_it_can(disk: Path) -> None:
    run = str(disk / "run")
    with Checkpointer(run, state_of(1), keep=KeepLast(1), memory=None) as checkpointer:
        checkpointer.save(1)
        holdfast.pin(run)
        checkpointer.save(2)
        error = checkpointer.save(3).durable.error
        assert error is not None
        assert error.code == "storage.full"
        assert "`keep` lets no other checkpoint be deleted (2 left)" in str(error)
        assert f"holdfast prune '{run}'" in error.action
        assert steps(run) == [2, 1]
        holdfast.unpin(f"{run}@step=1")
        checkpointer.save(4)
        until(lambda: steps(run) == [4])


def test_a_save_on_a_full_disk_without_a_policy_names_the_next_action(disk: Path) -> None:
    run = str(disk / "run")
    checkpointer = Checkpointer(run, state_of(1), memory=None)
    for step in (1, 2, 3):
        checkpointer.save(step)
    with pytest.raises(StorageError, match="The Checkpointer has no `keep`, so it deletes nothing") as caught:
        checkpointer.close()
    assert f"holdfast prune '{run}'" in caught.value.action


def test_a_rollback_deletes_nothing_before_it_has_an_epoch(disk: Path) -> None:
    run = str(disk / "run")
    for step in (1, 2):
        holdfast.save(run, state_of(step), step)
    start_new_job()
    with Checkpointer(run, state_of(0), save=EverySteps(1), keep=KeepLast(1), memory=None) as checkpointer:
        checkpointer.restore(at="step=1")
        for _ in checkpointer.steps(9):
            checkpointer._pruning.close(5.0)  # after the round that has begun
            break
    assert steps(run) == [2, 1]


def go_on(run: str) -> list[int]:
    """Restore, and save four steps more. Each rank writes a file."""
    start_new_job()
    state = {"w": torch.zeros(NUM_ELEMENTS)}
    with Checkpointer(run, state, keep=KeepLast(1), memory=None, timeout_s=20) as checkpointer:
        report = checkpointer.restore()
        for step in range(report.next_step, report.next_step + 4):
            state["w"] += 1
            checkpointer.save(step)
    return steps(run)


def test_all_ranks_save_again_when_the_first_one_has_made_room(disk: Path) -> None:
    run = str(disk / "run")
    for step in (1, 2):
        holdfast.save(run, state_of(step), step)
    assert run_ranks(2, go_on, run)[0][0] == 6
    until(lambda: steps(run) == [6])
    assert loaded(run) == 6
    assert len(folder_names(run)) == 1


def save_next(run: str, *, dies: bool) -> None:
    """Go on from the head, and save a step; with `dies`, be killed when its data is written and has no name yet."""

    def killed(_: PosixWriter, nbytes: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    state = {"w": torch.zeros(NUM_ELEMENTS)}
    with Checkpointer(run, state, keep=KeepLast(1), memory=None, timeout_s=20) as checkpointer:
        step = checkpointer.restore().next_step
        state["w"] += 1
        with patch.object(PosixWriter, "publish", killed) if dies else nullcontext():
            checkpointer.save(step)


def test_a_job_that_is_killed_in_every_save_saves_again_when_it_is_not(disk: Path, tmp_path: Path) -> None:
    """The files of the killed saves stayed, and from the second one on the disk was full for good."""
    run = str(disk / "run")
    holdfast.save(run, state_of(1), 1)
    for number in range(3):
        process = nursery.start(partial(save_next, dies=True), run, err=tmp_path / f"err{number}")
        assert process.wait() == -signal.SIGKILL, process.err
        assert loaded(run) == 1
    process = nursery.start(partial(save_next, dies=False), run, err=tmp_path / "err")
    assert process.wait() == 0, process.err
    assert (steps(run), loaded(run)) == ([2], 2)
    assert examine(Run.open(open_store(location_of(run)))) == []
