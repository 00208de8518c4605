"""The remains of a killed job's save: parts that can never become a checkpoint go, and all else stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from holdfast.errors import FencedError, NotFoundError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.records import SEAL_NAME, Place
from holdfast.policy.keep import KeepBest, KeepEvery
from holdfast.run.complete import complete, read_manifest
from holdfast.run.complete import finish as finish_late
from holdfast.run.diagnosis import examine, finish
from holdfast.run.history import Run
from holdfast.run.retention import Retention, RetentionOutcome
from holdfast.testing.memory_store import MemoryStore
from tests.support.checkpoints import begin, check, data_file, names, publish_manifest, save, write, write_data
from tests.support.faulty_storage import FaultyStore, Watch

HEAD = Place(1, 1)


def new_run() -> Run:
    """A run with one checkpoint in epoch 1, and epoch 2 of the next job."""
    run = Run.create(MemoryStore())
    begin(run)
    save(run, HEAD, 10)
    begin(run, opened_from=HEAD)
    return run


def cut_off(run: Run, place: Place) -> str:
    """A save that was cut off after the first of its two files; returns its folder."""
    folder = publish_manifest(run, place, 20)
    write_data(run, folder, 0)
    return folder


def prune(run: Run) -> RetentionOutcome:
    retention = Retention(KeepEvery(1))
    return retention.apply(run, retention.survey(run))


def test_the_parts_of_a_save_of_an_older_epoch_go() -> None:
    run = new_run()
    folder = cut_off(run, Place(1, 2))
    assert prune(run).cut_off == [folder]
    assert names(run, folder) == [SEAL_NAME]
    assert examine(run) == []
    assert prune(run).cut_off == []
    check(run, run.find(place=HEAD))


def test_they_go_although_a_metric_is_missing_that_decides_on_checkpoints() -> None:
    run = new_run()
    folder = cut_off(run, Place(1, 2))
    retention = Retention(KeepBest("los"))
    assert retention.apply(run, retention.survey(run)).cut_off == [folder]


def test_what_the_newest_epoch_has_under_way_stays() -> None:
    run = new_run()
    folder = cut_off(run, Place(2, 1))
    assert prune(run).cut_off == []
    write_data(run, folder)
    check(run, complete(run, folder))


def test_a_retention_finds_what_an_epoch_left_that_was_newest_at_its_last_look() -> None:
    run = new_run()
    folder = cut_off(run, Place(2, 1))
    retention = Retention(KeepEvery(1))
    assert retention.apply(run, retention.survey(run)).cut_off == []
    begin(run, opened_from=HEAD)
    assert retention.apply(run, retention.survey(run)).cut_off == [folder]


def test_a_save_of_an_older_epoch_that_lacks_only_its_commit_stays_and_the_doctor_commits_it() -> None:
    run = new_run()
    folders = [write(run, Place(1, 2), 20), write(run, Place(1, 3), 30)]
    complete(run, folders[1])
    run.storage.delete(records.commit_key(Place(1, 3)))
    assert prune(run) == RetentionOutcome()
    for finding in examine(run):
        check(run, finish(run, finding))
    assert run.places() == [Place(1, 3), Place(1, 2), HEAD]
    assert run.head_place() == HEAD


def test_a_sealed_checkpoint_that_lacks_a_file_stays_for_the_doctor() -> None:
    run = new_run()
    commit = save(run, Place(1, 2), 20)
    run.storage.delete(records.commit_key(commit.place))
    run.storage.delete(records.checkpoint_key(commit.checkpoint, fmt.file_name(1)))
    assert prune(run) == RetentionOutcome()


def test_a_committed_checkpoint_that_lacks_its_seal_and_a_file_stays() -> None:
    run = new_run()
    commit = save(run, Place(1, 2), 20)
    for name in (SEAL_NAME, fmt.file_name(1)):
        run.storage.delete(records.checkpoint_key(commit.checkpoint, name))
    assert prune(run) == RetentionOutcome()


def test_a_folder_of_another_run_stays() -> None:
    run, other = new_run(), new_run()
    folder = cut_off(other, Place(1, 2))
    key = records.checkpoint_key(folder, fmt.NAME)
    run.storage.create(key, other.storage.read(key))
    assert prune(run) == RetentionOutcome()


def watched(run: Run, watch: Watch) -> Run:
    return Run(FaultyStore(run.storage, watch), run.marker)


def between(number: int, work: Callable[[], object]) -> Watch:
    """Do `work` before request `number`."""

    def watch(at: int, when: str, name: str, path: str) -> None:
        if (at, when) == (number, "before"):
            work()

    return watch


def late_writes(begun: Callable[[], tuple[Run, str, Callable[[Run], bool]]]) -> set[tuple[str, bool]]:
    """Have a fenced rank write its file, and complete its save, between each two requests of a deletion: what became of
    it, and whether the parts were deleted. `begun` returns a run, the folder of a save that was cut off at place 1.2,
    and the deletion, which says whether it took the parts."""
    outcomes = set()
    for number in range(1000):
        run, folder, delete = begun()
        told = list[str]()

        def write_late(run: Run = run, folder: str = folder, told: list[str] = told) -> None:
            try:
                write_data(run, folder, 1)
                complete(run, folder)
                told.append("committed")
            except (FencedError, NotFoundError) as error:
                told.append(error.code)

        is_deleted = delete(watched(run, between(number, write_late)))
        if not told:
            break
        outcomes.add((told[0], is_deleted))
        if run.is_committed(Place(1, 2)):
            check(run, run.find(place=Place(1, 2)))
        assert run.head_place() == HEAD
    return outcomes


def check_late_writes(outcomes: set[tuple[str, bool]]) -> None:
    assert {("committed", False), ("fenced.given_up", True)} <= outcomes
    assert ("committed", True) not in outcomes


def test_a_fenced_rank_that_writes_its_file_meanwhile_commits_a_whole_checkpoint_or_is_told() -> None:
    def begun() -> tuple[Run, str, Callable[[Run], bool]]:
        run = new_run()
        return run, cut_off(run, Place(1, 2)), lambda watched: bool(prune(watched).cut_off)

    check_late_writes(late_writes(begun))


def test_a_deletion_between_two_requests_of_a_fenced_rank_leaves_no_half_checkpoint() -> None:
    outcomes = set()
    for number in range(1000):
        run = new_run()
        folder, done = cut_off(run, Place(1, 2)), list[RetentionOutcome]()
        stored, data = read_manifest(run, folder), data_file(run, folder, 1)  # a rank has both in its memory

        def delete(run: Run = run, done: list[RetentionOutcome] = done) -> None:
            done.append(prune(run))

        late = watched(run, between(number, delete))
        try:
            late.storage.create(stored.key(fmt.file_name(1)), data)
            finish_late(late, stored, deep=False)
        except (FencedError, NotFoundError) as error:
            outcomes.add(error.code)
        if not done:
            break
        if run.is_committed(Place(1, 2)):
            check(run, run.find(place=Place(1, 2)))
            outcomes.add("committed")
            continue
        prune(run)  # this deletes what the late rank has written since
        assert names(run, folder) == [SEAL_NAME]
    assert outcomes == {"committed", "not_found.file"}


class Killed(BaseException):
    """Stands for the death of the process that deletes."""


@pytest.mark.parametrize("when", ["before", "after"])
def test_whatever_a_killed_deletion_of_parts_leaves_the_next_one_deletes(when: str) -> None:
    num_changes = 0
    for number in range(1000):
        run = new_run()
        folder, changes = cut_off(run, Place(1, 2)), [0]

        def watch(_: int, now: str, name: str, path: str, number: int = number, changes: list[int] = changes) -> None:
            if name in ("create", "delete") and now == when:
                changes[0] += 1
                if changes[0] > number:
                    raise Killed

        try:
            prune(watched(run, watch))
        except Killed:
            num_changes += 1
        else:
            break
        check(run, run.find(place=HEAD))
        prune(run)
        assert names(run, folder) == [SEAL_NAME]
        assert examine(run) == []
    assert num_changes >= 4
