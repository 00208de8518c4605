"""``Checkpointer(keep=...)``: the first rank deletes in the background what the policy does not keep."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import Checkpointer, ConfigurationError, EverySteps, KeepBest, KeepEvery, KeepFor, KeepLast, Memory
from holdfast.checkpointer import pruning
from holdfast.errors import StorageError
from holdfast.run.retention import Retention
from holdfast.run.session import JOB
from holdfast.store.posix import PosixStore
from tests.support.models import start_new_job
from tests.support.nursery import until
from tests.support.ranks import run_ranks


@pytest.fixture
def state() -> dict[str, object]:
    return {"w": torch.zeros(100), "progress": {"samples": 0}}


def steps(run: str) -> list[int]:
    return [each.step for each in holdfast.ls(run)]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("in_memory", [True, False])
def test_after_each_commit_what_the_policy_does_not_keep_is_deleted(
    run: str, state: dict[str, object], memory: Memory, *, in_memory: bool
) -> None:
    keep = KeepLast(2) | KeepEvery(4) | KeepBest("loss")
    with Checkpointer(run, state, memory=memory if in_memory else None, keep=keep) as checkpointer:
        for step in range(1, 10):
            checkpointer.save(step, metrics={"loss": abs(step - 3)}).durable.wait()
        until(lambda: steps(run) == [9, 8, 4, 3])
    assert len(os.listdir(f"{run}/checkpoints")) == 4


def test_close_waits_a_little_for_the_deletions_that_are_due(run: str, state: dict[str, object]) -> None:
    with Checkpointer(run, state, memory=None, keep=KeepLast(1)) as checkpointer:
        checkpointer.save(1)
        checkpointer.save(2)
    assert steps(run) == [2]
    begun_s = time.monotonic()
    checkpointer.close()
    assert time.monotonic() - begun_s < 5


def test_a_misspelt_metric_of_keep_is_told_at_the_first_step_and_once(
    run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    keep = KeepBest("los")
    with Checkpointer(run, state, memory=None, save=EverySteps(2), keep=keep) as checkpointer:
        checkpointer.step(1, metrics={"loss": 1.0})
        told = warnings_of(caplog)
        for step in range(2, 9):
            checkpointer.step(step, metrics={"loss": 1.0})
    assert len(told) == 1
    assert "the loop gives no metric 'los'; did you mean 'loss'?" in told[0]
    assert "KeepBest('los') cannot choose the best ones, and nothing is deleted" in told[0]
    assert warnings_of(caplog) == told
    assert steps(run) == [8, 6, 4, 2]


def test_by_default_everything_stays(run: str, state: dict[str, object]) -> None:
    with Checkpointer(run, state, memory=None) as checkpointer:
        for step in range(4):
            checkpointer.save(step)
    assert steps(run) == [3, 2, 1, 0]


def test_restarts_do_not_collect_checkpoints(run: str, state: dict[str, object]) -> None:
    for step in range(12):
        start_new_job()
        with Checkpointer(run, state, memory=None, keep=KeepLast(2)) as checkpointer:
            checkpointer.restore()
            checkpointer.save(step)
    until(lambda: len(steps(run)) == 2)
    assert steps(run) == [11, 10]


def test_a_pinned_checkpoint_stays(run: str, state: dict[str, object]) -> None:
    with Checkpointer(run, state, memory=None, keep=KeepLast(1)) as checkpointer:
        checkpointer.save(1)
        holdfast.pin(run)
        for step in (2, 3):
            checkpointer.save(step)
    assert steps(run) == [3, 1]


def test_a_metric_that_never_appears_deletes_nothing_and_is_told_once(
    run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(run, state, memory=None, keep=KeepBest("recall", mode="max")) as checkpointer:
        for step in range(4):
            checkpointer.save(step, metrics={"accuracy": step / 10})
    assert steps(run) == [3, 2, 1, 0]
    (told,) = warnings_of(caplog)
    assert "no checkpoint has the metric 'recall' (they have 'accuracy')" in told
    assert "nothing of it is deleted" in told


def test_a_metric_that_is_nan_now_and_then_is_told_once_and_never_the_best(
    run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(run, state, memory=None, keep=KeepBest("loss")) as checkpointer:
        for step, loss in enumerate((2.0, float("nan"), 1.0, float("nan"), 3.0)):
            checkpointer.save(step, metrics={"loss": loss})
    until(lambda: len(steps(run)) == 2)
    assert steps(run) == [4, 2]
    (told,) = warnings_of(caplog)
    assert "'loss' is nan in some checkpoints" in told
    assert "nothing of it is deleted" not in told


def test_trouble_of_the_store_never_reaches_training_and_is_told_once(
    run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(store: PosixStore, key: str) -> bool:
        raise StorageError("no", code="storage.denied", action="Ask.", path=key)

    with patch.object(PosixStore, "delete", fail):
        checkpointer = Checkpointer(run, state, memory=None, keep=KeepLast(1))
        for step in range(4):
            checkpointer.save(step)
        checkpointer.close()
    (told,) = warnings_of(caplog)
    assert "training goes on: no Ask." in told
    assert steps(run)[0] == 3
    with Checkpointer(run, state, memory=None, keep=KeepLast(1)) as checkpointer:
        checkpointer.save(4)
    assert steps(run) == [4], "the next job finishes what was left"
    assert len(os.listdir(f"{run}/checkpoints")) == 1


def test_a_defect_of_ours_never_reaches_training(
    run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        patch.object(Retention, "survey", side_effect=ZeroDivisionError("oh")),
        Checkpointer(run, state, memory=None, keep=KeepLast(1)) as checkpointer,
    ):
        for step in range(3):
            checkpointer.save(step)
    (told,) = warnings_of(caplog)
    assert "ZeroDivisionError: oh This is a defect of holdfast." in told


def test_close_leaves_a_store_that_hangs_behind(run: str, state: dict[str, object]) -> None:
    num_threads, answers = threading.active_count(), threading.Event()
    with (
        patch.object(Retention, "survey", lambda *_: answers.wait(60) and None),
        patch("holdfast.checkpointer.CLOSING_S", 0.2),
    ):
        checkpointer = Checkpointer(run, state, memory=None, keep=KeepLast(1))
        checkpointer.save(1)
        begun_s = time.monotonic()
        checkpointer.close()
        assert time.monotonic() - begun_s < 30
        answers.set()
        until(lambda: threading.active_count() <= num_threads)  # so that no thread meets the store of another test


def test_the_policy_of_a_job_that_was_replaced_counts_no_more(run: str, state: dict[str, object]) -> None:
    with Checkpointer(run, state, memory=None) as checkpointer:
        for step in range(3):
            checkpointer.save(step)
        start_new_job()
        with Checkpointer(run, state, memory=None, takeover=True) as other:
            other.save(3)
        old = pruning.Pruning(KeepLast(1), lambda: checkpointer._run)
        with patch.object(JOB, "incarnation", lambda _: "0" * 32):
            old.begin_round()
            old.close(5.0)
    assert steps(run) == [3, 2, 1, 0]


def test_a_forked_process_deletes_nothing(run: str, state: dict[str, object]) -> None:
    with Checkpointer(run, state, memory=None) as checkpointer:
        for step in range(3):
            checkpointer.save(step)
        mine = pruning.Pruning(KeepLast(1), lambda: checkpointer._run)
        with patch("holdfast.checkpointer.pruning.os.getpid", lambda: -1):
            mine.begin_round()
            mine.close(5.0)
    assert steps(run) == [2, 1, 0]


def test_a_policy_that_cannot_be_is_refused_at_construction(run: str, state: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"keep must be KeepLast, .* not 3"):
        Checkpointer(run, state, keep=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="contradict each other"):
        Checkpointer(run, state, keep=KeepLast(3) | KeepLast(5))
    with pytest.raises(ValueError, match="a positive time"):
        KeepFor(0)
    assert not Path(run).exists()


def test_a_run_that_is_deleted_meanwhile_does_not_end_training(
    run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(run, state, memory=None, keep=KeepLast(1)) as checkpointer:
        checkpointer.save(1)
        until(lambda: not checkpointer._pruning._threads)
        shutil.rmtree(run)
        checkpointer._pruning.begin_round()
    assert len(warnings_of(caplog)) == 1
    with pytest.raises(ConfigurationError, match="closed"):
        checkpointer.save(2)


def save_in_turns(run: str) -> list[str]:
    """Save five steps; return the names of the threads that deleted on this rank."""
    start_new_job()
    deleting: list[str] = []
    work = Retention.apply

    def noted(*arguments: object, **options: object) -> object:
        deleting.append(str(dist.get_rank()))
        return work(*arguments, **options)  # type: ignore[arg-type]

    with (
        patch.object(Retention, "apply", noted),
        Checkpointer(run, {"w": torch.zeros(8)}, memory=None, keep=KeepLast(2)) as checkpointer,
    ):
        for step in range(5):
            checkpointer.save(step)
    return deleting


def test_only_the_first_rank_deletes(run: str) -> None:
    first, second = run_ranks(2, save_in_turns, run)
    assert set(first) == {"0"}
    assert second == []
    assert steps(run) == [4, 3]
