"""A rollback makes an older checkpoint the head: the next job goes on from there, a running one is stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

import holdfast
from holdfast.errors import CorruptError, FencedError, NotFoundError
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.run.history import Run
from holdfast.run.removal import remove_checkpoint
from holdfast.run.rollback import rollback
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from holdfast.testing.memory_store import MemoryStore
from tests.support.checkpoints import begin, save
from tests.support.models import build, differing, filled, start_new_job


@pytest.fixture
def run() -> Run:
    """A run with the steps 10, 20, 30 in its first epoch."""
    run = Run.create(MemoryStore())
    begin(run)
    for seq in (1, 2, 3):
        save(run, Place(1, seq), seq * 10)
    return run


def steps(run: Run) -> list[int]:
    return [commit.step for commit in run.lineage()]


def test_a_place_or_a_step_becomes_the_head_in_a_new_epoch_and_nothing_is_deleted(run: Run) -> None:
    assert rollback(run, Place(1, 2)).step == 20
    assert steps(run) == [20, 10]
    assert (run.epoch(2).why, run.epoch(2).opened_from) == ("rollback", Place(1, 2))
    assert rollback(run, 10).place == Place(1, 1)
    assert steps(run) == [10]
    assert len(run.places()) == 3


def test_an_abandoned_future_can_be_gone_back_to_by_its_place(run: Run) -> None:
    rollback(run, 10)
    with pytest.raises(NotFoundError, match="step 30"):
        rollback(run, 30)
    rollback(run, Place(1, 3))
    assert steps(run) == [30, 20, 10]


def test_a_late_commit_of_the_old_epoch_stays_in_the_abandoned_future(run: Run) -> None:
    rollback(run, 20)
    save(run, Place(1, 4), 40)
    assert steps(run) == [20, 10]


def test_what_cannot_be_loaded_is_refused_and_the_head_stays(run: Run) -> None:
    folders = [run.commit(Place(1, seq)).checkpoint for seq in (1, 2)]
    run.storage.delete(records.checkpoint_key(folders[0], records.SEAL_NAME))
    run.storage.delete(records.checkpoint_key(folders[1], "data-00001.safetensors"))
    for step, what in ((10, "is missing"), (20, r"of the wrong size: data-00001\.safetensors")):
        with pytest.raises(CorruptError, match=what):
            rollback(run, step)
    assert run.epochs() == [1]
    assert steps(run)[0] == 30


def test_a_removed_checkpoint_is_nothing_to_go_back_to(run: Run) -> None:
    remove_checkpoint(run, run.find(step=20))
    with pytest.raises(NotFoundError, match=r"no commit at 1\.2 any more: it was removed.*places: 1\.3, 1\.1\."):
        rollback(run, Place(1, 2))


class RemovedMeanwhile(MemoryStore):
    """A storage on which the checkpoint of step 10 is removed right before an epoch is opened."""

    def create(self, key: str, data: bytes) -> bool:
        if key == records.epoch_key(2):
            remove_checkpoint(Run.open(self), Run.open(self).find(step=10))
        return super().create(key, data)


def test_a_removal_at_the_same_moment_is_told_and_leaves_a_head_that_loads() -> None:
    run = Run.create(RemovedMeanwhile())
    begin(run)
    save(run, Place(1, 1), 5)
    save(run, Place(1, 2), 10)
    save(run, Place(1, 3), 15)
    with pytest.raises(NotFoundError, match="was removed during the rollback") as caught:
        rollback(run, 10)
    assert caught.value.code == "not_found.removed"
    assert steps(run) == [5]


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """A run of this process with the steps 1, 2, 3."""
    start_new_job()
    for seed in (1, 2, 3):
        holdfast.save(tmp_path / "run", filled("plain", seed).state, seed)
    return str(tmp_path / "run")


def test_the_next_job_loads_what_was_gone_back_to_and_continues_from_there(saved: str) -> None:
    run = Run.open(open_store(Location(saved)))
    rollback(run, 2)
    start_new_job()
    job = build("plain", num_steps=0)
    assert holdfast.load(saved, job.state).step == 2
    assert differing(job, 2) == []
    assert holdfast.save(saved, job.state, 3).place == "3.1"
    assert [str(commit.place) for commit in run.lineage()] == ["3.1", "1.2", "1.1"]


def test_a_running_job_is_fenced_until_it_loads_the_run_again(saved: str) -> None:
    rollback(Run.open(open_store(Location(saved))), 2)
    job = build("plain", num_steps=0)
    with pytest.raises(FencedError, match="epoch 2 exists"):
        holdfast.save(saved, filled("plain", 4).state, 4)
    assert holdfast.load(saved, job.state).place == "1.2"
    assert holdfast.save(saved, job.state, 3).place == "3.1"


def test_a_job_that_had_loaded_before_the_rollback_does_not_undo_it(saved: str) -> None:
    start_new_job()
    job = build("plain", num_steps=0)
    assert holdfast.load(saved, job.state).step == 3
    rollback(Run.open(open_store(Location(saved))), 2)
    with pytest.raises(FencedError, match="epoch 2 exists"):
        holdfast.save(saved, job.state, 4)
    assert holdfast.open(saved).step == 2
