"""SIGKILL at every change that a save with references makes, and a removal of what it refers to: what is visible is
whole, the next save goes on, and in the end nothing is left of what nobody needs.

The processes that save and remove are real, and kill themselves for good. The changes are those of the library; only
the state and the other ranks are missing (see `tests.run.test_reference_races`).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.policy.keep import KeepLast
from holdfast.run.complete import complete
from holdfast.run.diagnosis import examine, finish
from holdfast.run.history import Run
from holdfast.run.removal import remove_checkpoint
from holdfast.run.retention import Retention
from holdfast.store.posix import PosixStore
from tests.run.test_reference_races import HEAD, HOLDER, write
from tests.support import nursery
from tests.support.checkpoints import begin
from tests.support.faulty_storage import FaultyStore

SAVED = Place(1, 3)
#: The changes of a save that refers to a file, and of a removal of the checkpoint that has it.
CHANGES_OF_SAVE = (
    "references",
    "manifest.hfm",
    "data-00000.safetensors",
    "still-00001.same.json",
    "seal.json",
    "history",
)
CHANGES_OF_REMOVAL = ("removing", "removed", "removing", "history", "quarantine", "seal.json", "data-00000.safetensors")
POINTS = [
    *(("save", number) for number in range(len(CHANGES_OF_SAVE) + 1)),
    *(("remove", number) for number in range(len(CHANGES_OF_REMOVAL) + 1)),
]
#: Killed at in every run of the tests; the others belong to the sweep.
SAMPLE = {("save", 1), ("save", 4), ("remove", 7)}


class Changes:
    """The changes that a process makes; it dies before number `deadly`."""

    def __init__(self, deadly: int | None = None) -> None:
        self.made: list[str] = []
        self._deadly = deadly

    def watch(self, number: int, when: str, name: str, path: str) -> None:
        if name not in ("create", "delete") or when != "before":
            return
        if len(self.made) == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        self.made.append(path)


def act(path: str, what: str, changes: Changes) -> None:
    run = Run.open(FaultyStore(PosixStore(path), changes.watch))
    if what == "save":
        complete(run, write(run, SAVED), deep=False)
    else:
        remove_checkpoint(run, run.commit(HOLDER))


def act_and_die(path: str, what: str, deadly: int) -> None:
    act(path, what, Changes(deadly))


def assert_whole(run: Run) -> None:
    for place in run.places():
        assert verify_checkpoint(Checkpoint(run.locate(run.commit(place))), deep=True) == [], place


@pytest.fixture
def saved_run(tmp_path: Path) -> Run:
    run = Run.create(PosixStore(str(tmp_path / "run")))
    begin(run)
    for place in (HOLDER, HEAD):
        complete(run, write(run, place), deep=False)
    return run


@pytest.mark.parametrize(("what", "expected"), [("save", CHANGES_OF_SAVE), ("remove", CHANGES_OF_REMOVAL)])
def test_the_changes_are_the_listed_ones(saved_run: Run, what: str, expected: tuple[str, ...]) -> None:
    changes = Changes()
    act(saved_run.storage.location.url, what, changes)
    assert [part in path for part, path in zip(expected, changes.made, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize(
    ("what", "number"),
    [pytest.param(*point, marks=() if point in SAMPLE else pytest.mark.slow) for point in POINTS],
)
def test_after_a_death_all_that_is_visible_is_whole_and_the_rest_goes(
    saved_run: Run, tmp_path: Path, what: str, number: int
) -> None:
    path = saved_run.storage.location.url
    process = nursery.start(act_and_die, path, what, number, err=tmp_path / "err")
    died = process.wait() == -signal.SIGKILL
    assert died == (number < len(CHANGES_OF_SAVE if what == "save" else CHANGES_OF_REMOVAL)), process.err
    assert_whole(saved_run)
    # The doctor commits what lacks nothing else. The next job begins, saves, and deletes all but its own checkpoint.
    for finding in examine(saved_run):
        if finding.remedy == "finish":
            finish(saved_run, finding)
            assert_whole(saved_run)
    begin(saved_run, opened_from=saved_run.head_place())
    complete(saved_run, write(saved_run, Place(2, 7)), deep=False)
    assert_whole(saved_run)
    retention = Retention(KeepLast(1))
    for _ in range(2):
        retention.apply(saved_run, retention.survey(saved_run))
        assert_whole(saved_run)
    assert list(saved_run.places()) == [Place(2, 7)]
    kept = saved_run.locate(saved_run.commit(Place(2, 7))).seal.referenced
    holders = {file.checkpoint for file in kept}
    left = [name for name in saved_run.storage.list(records.CHECKPOINTS) if has_files(saved_run, name)]
    assert set(left) == {saved_run.commit(Place(2, 7)).checkpoint, *holders}
    assert examine(saved_run) == []


def has_files(run: Run, folder: str) -> bool:
    """Whether a checkpoint's folder has more than the record of one that was given up."""
    return any(name != records.SEAL_NAME for name in run.storage.list(f"{records.CHECKPOINTS}/{folder}"))
