"""SIGKILL at every named point of a deletion: each checkpoint is whole or invisible, and the next deletion goes on.

Every point is a change that a real deletion of two checkpoints of a real run makes; what it passes and what is listed
must be the same. The process that deletes kills itself for good.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.format.records import SEAL_NAME, Place
from holdfast.policy.keep import KeepLast
from holdfast.run.diagnosis import examine
from holdfast.run.history import Run
from holdfast.run.leases import await_ended_reads
from holdfast.run.retention import Retention
from holdfast.store.urls import location_of, open_store
from tests.support import nursery
from tests.support.checkpoints import begin, names, publish_manifest, write_data
from tests.support.faulty_storage import FaultyStore

#: The changes of one deletion, in order. Before the first one, readers are asked to leave leases (the wish).
CHANGES = (
    "create notice",
    "create tombstone",
    "delete notice",
    "delete commit",
    "delete quarantine",
    "delete seal",
    "delete data",
    "delete manifest",
)
NUM_DELETED = 2
POINTS = [
    "before create wish 0",
    "after create wish 0",
    *(
        f"{when} {change} {number}"
        for number in range(NUM_DELETED)
        for change in CHANGES
        for when in ("before", "after")
    ),
]
#: Killed at in every run of the tests; the others belong to the sweep.
SAMPLE = {"after create notice 0", "after create tombstone 0", "before delete data 1", "before delete manifest 1"}


def kind_of(path: str) -> str:
    """The kind of the record at `path`, as `CHANGES` names it."""
    folder, _, name = path.rpartition("/")
    if folder.endswith("/pins"):
        return "wish" if name == "leases.json" else "notice"
    if folder.endswith("/quarantine"):
        return "quarantine"
    if folder.endswith("/history"):
        return "tombstone" if "removed" in name else "commit"
    return {"seal.json": "seal", "manifest.hfm": "manifest"}.get(name, "data")


class Deletion:
    """The points that a deletion passes, in order; the process dies at `deadly`."""

    def __init__(self, deadly: str | None = None) -> None:
        self.passed: list[str] = []
        self._deadly = deadly

    def watch(self, number: int, when: str, name: str, path: str) -> None:
        if name not in ("create", "delete"):
            return
        change = f"{when} {name} {kind_of(path)}"
        point = f"{change} {sum(passed.rpartition(' ')[0] == change for passed in self.passed)}"
        self.passed.append(point)
        if point == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)


def delete(run: str, deletion: Deletion) -> None:
    """Delete all checkpoints but the head."""
    opened = Run.open(FaultyStore(open_store(location_of(run)), deletion.watch))
    retention = Retention(KeepLast(1))
    retention.apply(opened, retention.survey(opened))


def delete_and_die(run: str, point: str) -> None:
    delete(run, Deletion(point))


@pytest.fixture
def saved_run(run: str) -> str:
    """A run with the steps 1, 2, 3."""
    for step in (1, 2, 3):
        holdfast.save(run, {"w": torch.full((10,), step)}, step)
    return run


def test_a_deletion_passes_exactly_the_listed_points(saved_run: str) -> None:
    deletion = Deletion()
    delete(saved_run, deletion)
    assert deletion.passed == POINTS


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=() if point in SAMPLE else pytest.mark.slow) for point in POINTS]
)
def test_after_a_death_at_a_point_all_visible_checkpoints_load_and_the_next_deletion_goes_on(
    saved_run: str, tmp_path: Path, point: str
) -> None:
    process = nursery.start(delete_and_die, saved_run, point, err=tmp_path / "err")
    assert process.wait() == -signal.SIGKILL, process.err
    visible = [each.step for each in holdfast.ls(saved_run)]
    done = POINTS.index(point) >= POINTS.index("after create tombstone 0")
    assert (visible[0], 1 in visible) == (3, not done)
    for step in visible:
        into = {"w": torch.zeros(10, dtype=torch.int64)}
        holdfast.load(f"{saved_run}@step={step}", into)
        assert into["w"].tolist() == [step] * 10
    await_ended_reads()
    delete(saved_run, Deletion())
    opened = Run.open(open_store(location_of(saved_run)))
    assert [each.step for each in holdfast.ls(saved_run)] == [3]
    assert len(opened.storage.list("checkpoints")) == 1
    assert examine(opened) == []


@pytest.mark.parametrize("point", ["after create seal 0", "after delete data 0", "before delete manifest 0"])
def test_after_a_death_in_the_deletion_of_a_cut_off_save_the_next_one_ends_it(
    saved_run: str, tmp_path: Path, point: str
) -> None:
    opened = Run.open(open_store(location_of(saved_run)))
    folder = publish_manifest(opened, Place(1, 4), 4)
    write_data(opened, folder, 0)
    begin(opened, opened_from=Place(1, 3))
    process = nursery.start(delete_and_die, saved_run, point, err=tmp_path / "err")
    assert process.wait() == -signal.SIGKILL, process.err
    delete(saved_run, Deletion())
    assert names(opened, folder) == [SEAL_NAME]
    assert [each.step for each in holdfast.ls(saved_run)] == [3]
    assert examine(opened) == []
