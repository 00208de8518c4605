"""A save whose slot holds something else when the watcher looks: storage tells how the save ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from holdfast.checkpointer.events import SaveCommitted, SaveEvent, SaveFailed
from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.checkpointer.watcher import Watcher
from holdfast.errors import HoldfastError
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.node_memory.slots import Slot
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store

#: The slot of another checkpoint.
TAKEN = cast(
    "Slot",
    SimpleNamespace(
        refresh=lambda: SimpleNamespace(contents=SimpleNamespace(checkpoint_id="theirs")), is_damaged=False
    ),
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.create(open_store(Location(str(tmp_path / "run"))))
    made.open_epoch(after=0, opened_from=None, why="start", world_size=1)
    return made


@pytest.fixture
def watcher(run: Run, tmp_path: Path) -> Iterator[Watcher]:
    watcher = Watcher(run.storage.location, tmp_path, rank=0)
    yield watcher
    watcher.close()


def end_of(watcher: Watcher) -> SaveEvent:
    """The last event of a save at place 1.1 whose slot was taken."""
    heard: list[SaveEvent] = []
    machine = SaveMachine(7, heard.append)
    machine.put(Place(1, 1))
    machine.stage(8)
    watcher.add(machine, "mine", TAKEN)
    watcher.look_at(TAKEN)
    assert machine.is_over
    return heard[-1]


def error_of(event: SaveEvent) -> HoldfastError:
    assert isinstance(event, SaveFailed)
    return event.error


def test_a_job_that_lost_the_race_for_a_runs_memory_is_told_that_it_is_fenced(run: Run, watcher: Watcher) -> None:
    run.open_epoch(after=1, opened_from=None, why="takeover", world_size=1)
    error = error_of(end_of(watcher))
    assert error.code == "fenced.epoch"
    assert "epoch 2 exists" in str(error)
    assert error.action == "Stop this job."


def test_a_save_that_became_durable_before_its_slot_was_freed_is_committed(run: Run, watcher: Watcher) -> None:
    run.storage.create(records.commit_key(Place(1, 1)), b"{}")
    assert isinstance(end_of(watcher), SaveCommitted)


@pytest.mark.parametrize("damage", ["", "the run is gone"])
def test_a_save_that_left_memory_for_no_known_reason_is_given_up(run: Run, watcher: Watcher, damage: str) -> None:
    if damage:
        run.storage.delete(records.MARKER_KEY)
    assert error_of(end_of(watcher)).code == "state.incomplete"
