"""SIGKILL at every change of a garbage collection, and collections beside a job that trains: no checkpoint is lost, and
the next collection goes on.

The processes are real, and kill themselves for good. Every point is a change that a real collection makes; what it
passes and what is listed must be the same.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import holdfast
from holdfast.format.records import SEAL_NAME, Place
from holdfast.run.diagnosis import examine
from holdfast.run.garbage import LEAST_GRACE_S, collect, plan_collection
from holdfast.run.history import Run
from holdfast.run.holds import CLOCKS_S, create_lease
from holdfast.run.removal import remove_checkpoint
from holdfast.store.urls import location_of, open_store
from tests.faults.small_job import head, resumed, save, save_in_new_job
from tests.faults.test_removal_kill import kind_of
from tests.run.test_garbage import OLD, cut_off
from tests.support import nursery
from tests.support.checkpoints import begin, names
from tests.support.faulty_storage import FaultyStore

#: The changes of a collection of the run below, in order: the rest of a deletion, parts of a save, a lease, and a
#: temporary file beside the commits.
CHANGES = (
    "delete commit",
    "delete quarantine",
    "delete seal",
    "delete data",
    "delete manifest",
    "create seal",
    "delete data",
    "delete manifest",
    "delete notice",
    "delete commit",
)
POINTS = [(when, number) for number in range(len(CHANGES)) for when in ("before", "after")]
#: Killed at in every run of the tests; the others belong to the sweep.
SAMPLE = {("after", 0), ("before", 4), ("after", 5)}


class Changes:
    """The changes that a process makes; it dies at the one that is `deadly`."""

    def __init__(self, deadly: tuple[str, int] | None = None) -> None:
        self.made: list[str] = []
        self._deadly = deadly

    def watch(self, _: int, when: str, name: str, path: str) -> None:
        if name not in ("create", "delete"):
            return
        if (when, len(self.made) - (when == "after")) == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        if when == "before":
            self.made.append(f"{name} {kind_of(path)}")


def opened(run: str) -> Run:
    return Run.open(open_store(location_of(run)))


def collect_all(run: str, changes: Changes) -> None:
    watched = Run.open(FaultyStore(open_store(location_of(run)), changes.watch))
    collect(watched, plan_collection(watched))


def collect_and_die(run: str, when: str, number: int) -> None:
    collect_all(run, Changes((when, number)))


def remove_and_die(run: str) -> None:
    """Remove the checkpoint of step 2, and die once its commit is hidden."""

    def watch(_: int, when: str, name: str, path: str) -> None:
        if (when, name) == ("before", "delete") and path.endswith(".json") and "/history/" in path:
            os.kill(os.getpid(), signal.SIGKILL)

    watched = Run.open(FaultyStore(open_store(location_of(run)), watch))
    remove_checkpoint(watched, watched.find(step=2))


@pytest.fixture
def littered(run: str, tmp_path: Path) -> str:
    """A run with the steps 1 and 3, and what killed processes left of others."""
    for step in (1, 2, 3):
        save_in_new_job(run, step) if step == 1 else save(run, step)
    found = opened(run)
    cut_off(found, Place(1, 4))
    begin(found, opened_from=Place(1, 3))
    assert nursery.start(remove_and_die, run, err=tmp_path / "err").wait() == -signal.SIGKILL
    create_lease(found.storage, Place(1, 1), lasting_s=-CLOCKS_S - 1)
    temporary = Path(run) / "history" / ".tmp-0123456789abcdef"
    temporary.write_bytes(b"half")
    os.utime(temporary, (OLD, OLD))
    return run


def test_a_collection_passes_exactly_the_listed_points(littered: str) -> None:
    changes = Changes()
    collect_all(littered, changes)
    assert changes.made == list(CHANGES)


@pytest.mark.parametrize(
    "point",
    [pytest.param(point, marks=() if point in SAMPLE else pytest.mark.slow) for point in POINTS],
    ids=lambda point: f"{point[0]} {CHANGES[point[1]]} {point[1]}",
)
def test_after_a_death_at_a_point_all_checkpoints_load_and_the_next_collection_goes_on(
    littered: str, tmp_path: Path, point: tuple[str, int]
) -> None:
    process = nursery.start(collect_and_die, littered, *point, err=tmp_path / "err")
    assert process.wait() == -signal.SIGKILL, process.err
    assert ([each.step for each in holdfast.ls(littered)], head(littered)) == ([3, 1], 3)
    collect_all(littered, Changes())
    found = opened(littered)
    assert plan_collection(found).garbage == ()
    assert sorted(map(len, (names(found, folder) for folder in found.storage.list("checkpoints")))) == [1, 3, 3]
    assert [*Path(littered).rglob(".tmp-*")] == []
    assert ([each.step for each in holdfast.ls(littered)], head(littered)) == ([3, 1], 3)
    assert examine(found) == []


def train(run: str, first: int, last: int) -> None:
    """A job that goes on from the head, and saves the steps from `first` to `last`."""
    if first > 1:
        resumed(run)
    for step in range(first, last + 1):
        save(run, step)
    os.kill(os.getpid(), signal.SIGKILL)


def collect_for_ever(run: str) -> None:
    while True:
        found = opened(run)
        collect(found, plan_collection(found, grace_s=LEAST_GRACE_S))


def test_jobs_that_die_and_go_on_beside_collections_lose_nothing(run: str, tmp_path: Path) -> None:
    save_in_new_job(run, 1)
    collector = nursery.start(collect_for_ever, run, err=tmp_path / "err of gc")
    left = []
    for first in (2, 4, 6):
        job = nursery.start(train, run, first, first + 1, err=tmp_path / f"err {first}")
        assert job.wait() == -signal.SIGKILL, job.err
        found = opened(run)
        epoch = found.newest_epoch()
        assert epoch is not None
        left.append(cut_off(found, Place(epoch, 99)))
    assert collector.is_running, collector.err
    nursery.until(lambda: all(names(opened(run), folder) == [SEAL_NAME] for folder in left[:-1]))
    collector.kill()
    assert len(names(opened(run), left[-1])) == 2, "the newest epoch's save may be under way"
    assert ([each.step for each in holdfast.ls(run)], head(run)) == ([*range(7, 0, -1)], 7)
