"""Memory of a node that belongs to another history than storage is recognised, and let go with a warning."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

import holdfast
from holdfast import Checkpointer, Memory
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.checkpointer.test_checkpointer import Loop
from tests.support.models import start_new_job

#: No save may come near it.
TIMEOUT_S = 30.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


def checkpointer_of(root: Path, loop: Loop, memory: Memory) -> Checkpointer:
    return Checkpointer(root, loop.state, memory=memory, timeout_s=TIMEOUT_S)


def train(checkpointer: Checkpointer, loop: Loop, *steps: int) -> None:
    """Save after each step, and wait until it is durable; no save may wait for anything else."""
    for step in steps:
        loop.step()
        handle = checkpointer.save(step)
        checkpointer.wait()
        assert handle.durable.error is None
        assert handle.blocked_s is not None
        assert handle.blocked_s < 5


def steps(root: Path) -> list[int]:
    return [commit.step for commit in Run.open(open_store(Location(str(root)))).lineage()]


def test_a_run_removed_and_begun_again_while_training_saves_on(
    root: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    with checkpointer_of(root, loop, memory) as checkpointer:
        train(checkpointer, loop, 1, 2, 3)
        shutil.rmtree(root)
        with caplog.at_level(logging.WARNING):
            train(checkpointer, loop, 4)
        assert "was removed or replaced: the checkpoints that this job saved there, up to 1.3, are gone" in caplog.text
        train(checkpointer, loop, 5, 6, 7, 8, 9)
    assert steps(root) == [9, 8, 7, 6, 5, 4]
    saved = loop.bits()
    start_new_job()
    other = Loop(seed=1)
    with checkpointer_of(root, other, memory) as checkpointer:
        assert checkpointer.restore().step == 9
    assert other.bits() == saved


@pytest.mark.parametrize("restart", [True, False], ids=["new_job", "same_job"])
def test_a_run_restored_from_a_backup_of_the_same_epoch_is_gone_on_from(
    root: Path, memory: Memory, caplog: pytest.LogCaptureFixture, restart: bool
) -> None:
    loop = Loop()
    with checkpointer_of(root, loop, memory) as checkpointer:
        train(checkpointer, loop, 1, 2)
        shutil.copytree(root, root.parent / "backup")
        at_backup = loop.bits()
        train(checkpointer, loop, 3, 4)
        if not restart:
            go_back(root)
            assert_goes_on_from_the_backup(root, checkpointer, loop, at_backup, caplog)
    if restart:
        go_back(root)
        start_new_job()
        other = Loop(seed=1)
        with checkpointer_of(root, other, memory) as checkpointer:
            assert_goes_on_from_the_backup(root, checkpointer, other, at_backup, caplog)
    start_new_job()
    third = Loop(seed=2)
    with checkpointer_of(root, third, memory) as checkpointer:
        assert checkpointer.restore().step == 8
        train(checkpointer, third, 9)
    assert steps(root) == [9, 8, 7, 6, 5, 2, 1]


def go_back(root: Path) -> None:
    shutil.rmtree(root)
    shutil.copytree(root.parent / "backup", root)


def assert_goes_on_from_the_backup(
    root: Path, checkpointer: Checkpointer, loop: Loop, at_backup: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        report = checkpointer.restore()
    assert (report.step, report.tier) != (4, "node memory")
    assert (report.step, loop.bits()) == (2, at_backup)
    told = " ".join(record.getMessage() for record in caplog.records)
    assert "steps 3, 4" in told
    assert "another history" in told
    train(checkpointer, loop, 5, 6, 7, 8)


def test_an_epoch_opened_anew_after_a_backup_is_not_taken_for_the_one_in_memory(root: Path, memory: Memory) -> None:
    first = Loop()
    with checkpointer_of(root, first, memory) as checkpointer:
        train(checkpointer, first, 1)
    shutil.copytree(root, root.parent / "backup")
    start_new_job()
    second = Loop(seed=1)
    with checkpointer_of(root, second, memory) as checkpointer:
        checkpointer.restore()
        train(checkpointer, second, 2, 3, 4)  # epoch 2
    go_back(root)
    start_new_job()
    third = Loop(seed=2)
    holdfast.load(root, third.state)  # from storage; the next save opens an epoch 2 too
    with checkpointer_of(root, third, memory) as checkpointer:
        train(checkpointer, third, 20, 21)
        saved = third.bits()
    start_new_job()
    fourth = Loop(seed=3)
    with checkpointer_of(root, fourth, memory) as checkpointer:
        assert checkpointer.restore().step == 21
        assert fourth.bits() == saved
        train(checkpointer, fourth, 22, 23, 24)
    assert steps(root) == [24, 23, 22, 21, 20, 1]
