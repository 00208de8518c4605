"""The jobs that have ended on a run, counted from its history."""

from __future__ import annotations

import time

import pytest

from holdfast.format.records import Place
from holdfast.run.ended_jobs import EndedJobs, ended_jobs
from holdfast.run.history import Run
from holdfast.run.removal import remove_checkpoint
from holdfast.testing import MemoryStore
from tests.support.checkpoints import begin, save


@pytest.fixture
def history() -> Run:
    return Run.create(MemoryStore())


def test_a_run_without_a_checkpoint_has_none(history: Run) -> None:
    assert ended_jobs(history, before=time.time()) == EndedJobs(0, 0.0)


def test_each_epoch_that_began_before_is_a_job(history: Run) -> None:
    begin(history)
    for epoch in range(1, 4):
        place = save(history, Place(epoch, 1), epoch).place
        begin(history, opened_from=place)
    found = ended_jobs(history, before=time.time() + 1)
    assert found.num_jobs == 4
    assert 0 <= found.trained_s < 60
    assert ended_jobs(history, before=0.0).num_jobs == 0


def test_a_removed_checkpoint_changes_nothing(history: Run) -> None:
    begin(history)
    first = save(history, Place(1, 1), 1)
    save(history, Place(1, 2), 2)
    remove_checkpoint(history, first)
    assert ended_jobs(history, before=time.time() + 1).num_jobs == 1


def test_a_clock_that_jumped_ahead_during_a_job_does_not_count_as_years_without_a_failure(
    history: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Auto` took the run for one that hardly ever fails, and saved too seldom."""
    begin(history)
    now_s = time.time()
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now_s + 1e8)
        save(history, Place(1, 1), 1)
    assert ended_jobs(history, before=now_s + 30).trained_s < 60
