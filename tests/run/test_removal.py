"""A checkpoint that is deleted is invisible from the first change on, whatever happens before the last one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import ConfigurationError, FencedError, NotFoundError
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.format.tombstones import Removed, removed_key
from holdfast.run.complete import check_files, complete, read_manifest, seal_and_commit
from holdfast.run.diagnosis import examine, remove
from holdfast.run.history import Run, no_head
from holdfast.run.removal import abandon, remove_checkpoint
from holdfast.run.rollback import rollback
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from holdfast.testing.memory_store import MemoryStore
from tests.support.checkpoints import begin, check, names, publish_manifest, save, write, write_data
from tests.support.faulty_storage import FaultyStore


class PowerCutError(Exception):
    """The process ends here."""


class DieAt:
    """The process dies instead of making change number `num_changes`."""

    def __init__(self, num_changes: int) -> None:
        self._num_left = num_changes

    def __call__(self, number: int, when: str, name: str, path: str) -> None:
        if when == "before" and name in ("create", "delete"):
            if self._num_left == 0:
                raise PowerCutError
            self._num_left -= 1


@pytest.fixture(params=["memory", "posix"])
def new_run(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Run]:
    """Makes runs with the steps 10, 20, 30 and an unfinished 40."""

    def make() -> Run:
        count = len([*tmp_path.iterdir()])
        storage = MemoryStore() if request.param == "memory" else open_store(Location(str(tmp_path / f"run-{count}")))
        run = Run.create(storage)
        begin(run)
        for seq in (1, 2, 3):
            save(run, Place(1, seq), seq * 10)
        write_data(run, publish_manifest(run, Place(1, 4), 40, created=1e9), 1)
        return run

    return make


def steps(run: Run) -> list[int]:
    return [commit.step for commit in run.lineage()]


def folder_of(run: Run, step: int) -> str:
    return next(name for name in run.storage.list("checkpoints") if (records.parse_folder(name) or (0,))[0] == step)


def test_a_removed_checkpoint_leaves_nothing_but_its_tombstone(new_run: Callable[[], Run]) -> None:
    run = new_run()
    commit = run.find(step=20)
    remove_checkpoint(run, commit)
    assert steps(run) == [30, 10]
    assert commit.checkpoint not in run.storage.list("checkpoints")
    assert [name for name in run.storage.list("history") if "removed" in name] == ["9999999998-9999999997.removed.json"]
    remove_checkpoint(run, commit)
    with pytest.raises(NotFoundError, match="it was removed"):
        run.find(place=commit.place)
    assert [finding.folder for finding in examine(run)] == [folder_of(run, 40)]


def test_the_head_is_kept_also_where_a_new_epoch_has_no_checkpoint_yet(new_run: Callable[[], Run]) -> None:
    run = new_run()
    with pytest.raises(ConfigurationError, match="it is the head") as caught:
        remove_checkpoint(run, run.find(step=30))
    assert caught.value.code == "config.needed"
    rollback(run, 20)
    with pytest.raises(ConfigurationError, match="it is the head"):
        remove_checkpoint(run, run.find(place=Place(1, 2)))
    remove_checkpoint(run, run.find(place=Place(1, 3)))
    assert [str(place) for place in run.places()] == ["1.2", "1.1"]


def test_what_an_epoch_was_opened_from_is_removed_once_it_is_not_the_head(new_run: Callable[[], Run]) -> None:
    run = new_run()
    for epoch in range(2, 12):
        origin = run.head_place()
        assert origin is not None
        begin(run, opened_from=origin)
        save(run, Place(epoch, 1), 30 + epoch)
        remove_checkpoint(run, run.find(place=origin))
    assert steps(run) == [41, 20, 10]
    for place in run.lineage_places():
        check(run, run.find(place=place))
    assert [finding.folder for finding in examine(run)] == [folder_of(run, 40)]


def test_a_run_whose_whole_lineage_was_removed_is_not_begun_anew_silently(new_run: Callable[[], Run]) -> None:
    run = new_run()
    rollback(run, 10)
    # As a process does that looked before the rollback, and slept.
    run.storage.create(removed_key(Place(1, 1)), records.encode(Removed(place=Place(1, 1), checkpoint="x")))
    assert run.head() is None
    with pytest.raises(NotFoundError, match="no checkpoint on the lineage of its newest epoch") as caught:
        no_head(run)
    assert caught.value.code == "not_found.lineage"
    rollback(run, Place(1, 3))
    assert steps(run) == [30, 20]


def test_a_save_that_slept_while_others_finished_and_removed_its_checkpoint_is_told_so(
    new_run: Callable[[], Run],
) -> None:
    run = new_run()
    folder = write(run, Place(1, 5), 50)
    stored = read_manifest(run, folder)
    files = check_files(run, stored, deep=False)
    commit = complete(run, folder)
    save(run, Place(1, 6), 60)
    remove_checkpoint(run, commit)
    with pytest.raises(FencedError, match="was removed") as caught:
        seal_and_commit(run, stored, files)
    assert caught.value.code == "fenced.given_up"
    assert steps(run) == [60, 30, 20, 10]


def stopped(run: Run, work: Callable[[Run], object], num_changes: int) -> bool:
    """Whether the process died before it came to its end."""
    try:
        work(Run.open(FaultyStore(run.storage, DieAt(num_changes))))
    except PowerCutError:
        return True
    return False


def test_a_death_between_any_two_changes_of_a_removal_leaves_loadable_or_invisible(new_run: Callable[[], Run]) -> None:
    alive = True
    for num_changes in range(14):
        run = new_run()
        commit, folder = run.find(step=20), folder_of(run, 40)
        alive = stopped(run, lambda run, commit=commit: remove_checkpoint(run, commit), num_changes)  # type: ignore[misc]
        # The first change only announces the removal.
        assert steps(run) == ([30, 20, 10] if num_changes < 2 else [30, 10])
        for place in run.places():
            check(run, run.commit(place))
        for finding in examine(run):
            if finding.folder != folder:
                assert finding.code == "folder.removal_unfinished"
                remove(run, finding)
        assert [finding.folder for finding in examine(run)] == [folder]
        assert (commit.checkpoint in run.storage.list("checkpoints")) == (num_changes < 2)
        if not alive:
            break
    assert not alive


def test_a_death_between_any_two_changes_of_giving_up_leaves_nothing_visible(new_run: Callable[[], Run]) -> None:
    alive = True
    for num_changes in range(8):
        run = new_run()
        folder = folder_of(run, 40)
        alive = stopped(run, lambda run, folder=folder: abandon(run, folder), num_changes)  # type: ignore[misc]
        assert steps(run) == [30, 20, 10]
        for finding in examine(run):
            assert finding.code == ("folder.unfinished" if num_changes == 0 else "folder.removal_unfinished")
            remove(run, finding)
        assert examine(run) == []
        assert names(run, folder) == [records.SEAL_NAME]
        if not alive:
            break
    assert not alive


def test_what_was_sealed_meanwhile_is_not_given_up(new_run: Callable[[], Run]) -> None:
    run = new_run()
    folder = run.find(step=20).checkpoint
    before = names(run, folder)
    with pytest.raises(ConfigurationError, match="another process has completed it") as caught:
        abandon(run, folder)
    assert caught.value.code == "config.needed"
    assert names(run, folder) == before


def test_files_of_others_in_a_removed_folder_stay(new_run: Callable[[], Run]) -> None:
    run = new_run()
    commit = run.find(step=20)
    run.storage.create(records.checkpoint_key(commit.checkpoint, "notes.txt"), b"mine")
    remove_checkpoint(run, commit)
    assert names(run, commit.checkpoint) == ["notes.txt"]
    assert "unknown.name" in [finding.code for finding in examine(run)]
