"""A lost record of an epoch: no reader takes an older checkpoint for the head, or the run for a new one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, CorruptError, NotFoundError
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.run.diagnosis import examine, finish
from holdfast.run.history import Run
from holdfast.run.removal import remove_checkpoint
from holdfast.run.rollback import rollback
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.support.command_line import holdfast_command
from tests.support.models import start_new_job


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run of two jobs: steps 101 and 102, then 201 and 202."""
    state = {"w": torch.zeros(4)}
    for job in (100, 200):
        if job == 200:
            start_new_job()
            holdfast.load(tmp_path / "run", state)
        for step in (job + 1, job + 2):
            state["w"].fill_(step)
            holdfast.save(tmp_path / "run", state, step)
    start_new_job()
    return tmp_path / "run"


def opened(root: Path) -> Run:
    return Run.open(open_store(Location(str(root))))


def lose(root: Path, *epochs: int) -> None:
    for epoch in epochs:
        (root / records.epoch_key(epoch)).unlink()


@pytest.mark.parametrize("lost", [(2,), (1, 2)], ids=["newest", "all"])
def test_losing_the_newest_epoch_record_is_damage_and_not_an_older_head(root: Path, lost: tuple[int, ...]) -> None:
    lose(root, *lost)
    into = {"w": torch.zeros(4)}
    for load in (
        lambda: holdfast.load(root, into),
        lambda: holdfast.load(root, into, fallback=True),
        lambda: holdfast.load(f"{root}@step=102", into),
        lambda: holdfast.open(root),
        lambda: rollback(opened(root), Place(1, 1)),
    ):
        with pytest.raises(CorruptError, match=r"record of epoch 2 of .* is missing.*holdfast doctor") as caught:
            load()
        assert caught.value.code == "corrupt.history"
    with pytest.raises(CorruptError):
        holdfast.save(root, into, 7, takeover=True)
    assert holdfast.load(f"{root}@2.2", into).step == 202
    with pytest.raises(CorruptError):
        holdfast.save(root, into, 203)  # it would open epoch 2 anew, around commits of another one


def test_a_first_start_pattern_does_not_restart_a_training_whose_epochs_folder_is_lost(root: Path) -> None:
    shutil.rmtree(root / "epochs")
    with Checkpointer(root, {"w": torch.zeros(4)}, memory=None) as checkpointer, pytest.raises(CorruptError):
        checkpointer.restore()


def test_a_run_in_which_nothing_was_committed_is_still_a_first_start(tmp_path: Path) -> None:
    Run.create(open_store(Location(str(tmp_path))))
    with pytest.raises(NotFoundError, match=r"not_found\.head"):
        holdfast.load(tmp_path, {"w": torch.zeros(4)})


def test_the_record_of_an_older_epoch_is_missed_only_where_the_lineage_needs_it(root: Path) -> None:
    lose(root, 1)
    into = {"w": torch.zeros(4)}
    assert holdfast.load(root, into).step == 202
    with pytest.raises(CorruptError, match="record of epoch 1 of"):
        holdfast.load(f"{root}@step=101", into)


def test_the_doctor_makes_lost_records_anew_from_the_commits_of_their_epochs(root: Path) -> None:
    whole = [commit.place for commit in opened(root).lineage()]
    shutil.rmtree(root / "epochs")
    assert holdfast_command("ls", root).status == 1
    found = holdfast_command("doctor", root, "--json")
    assert [each["code"] for each in found.json["findings"]] == ["epoch.missing"] * 2
    assert "From their steps doctor guesses that the epoch went on from 1.2" in found.json["findings"][1]["text"]
    done = holdfast_command("doctor", root, "--finish", "--json")
    assert (done.status, done.json["head"]["place"]) == (0, "2.2")
    run = opened(root)
    assert [commit.place for commit in run.lineage()] == whole
    assert [(run.epoch(n).why, run.epoch(n).opened_from) for n in (1, 2)] == [("start", None), ("resume", Place(1, 2))]
    into = {"w": torch.zeros(4)}
    assert holdfast.load(root, into).step == 202
    assert holdfast.save(root, into, 203).place == "3.1"


def test_an_epoch_after_a_rollback_is_made_anew_as_one(root: Path) -> None:
    into = {"w": torch.zeros(4)}
    holdfast.load(f"{root}@step=101", into)
    holdfast.save(root, into, 102)
    lose(root, 3)
    (finding,) = examine(opened(root))
    assert finish(opened(root), finding).place == Place(3, 1)
    record = opened(root).epoch(3)
    assert (record.why, record.opened_from) == ("rollback", Place(1, 1))


def test_a_checkpoint_that_was_removed_proves_its_epoch_too(root: Path) -> None:
    run = opened(root)
    rollback(run, Place(1, 2))
    for place in (Place(2, 1), Place(2, 2)):
        remove_checkpoint(run, run.find(place=place))
    lose(root, 2, 3)
    with pytest.raises(CorruptError, match="record of epoch 2"):
        holdfast.open(root)
