"""Garbage collection: what no checkpoint needs goes, with its reason; all else stays, whatever happens meanwhile."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.errors import StorageError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.hold_records import Pin, pin_key
from holdfast.format.records import SEAL_NAME, Place
from holdfast.policy.keep import KeepLast
from holdfast.run.complete import complete
from holdfast.run.diagnosis import examine
from holdfast.run.garbage import GRACE_S, CollectionOutcome, collect, plan_collection
from holdfast.run.history import Run
from holdfast.run.holds import CLOCKS_S, create_lease
from holdfast.run.references import needed_folders
from holdfast.run.removal import remove_checkpoint, remove_place
from holdfast.run.resumes import ResumeLimit
from holdfast.run.retention import Retention
from holdfast.store.posix import PosixStore
from holdfast.testing.memory_store import MemoryStore
from tests.run.test_cut_off_saves import between, check_late_writes, late_writes, watched
from tests.run.test_reference_races import HEAD as REFERRING
from tests.run.test_reference_races import HOLDER, saved_run
from tests.run.test_reference_races import write as write_with_references
from tests.support.checkpoints import begin, check, names, publish_manifest, save, write, write_data
from tests.support.faulty_storage import FaultyStore

HEAD = Place(1, 1)
#: Before the time of grace.
OLD = time.time() - 2 * GRACE_S


def new_run() -> Run:
    """A run with one checkpoint in epoch 1, and epoch 2 of the next job."""
    run = Run.create(MemoryStore())
    begin(run)
    save(run, HEAD, 10)
    begin(run, opened_from=HEAD)
    return run


def cut_off(run: Run, place: Place, *, created: float = OLD) -> str:
    """A save that was cut off after the first of its two files; returns its folder."""
    folder = publish_manifest(run, place, 20, created=created)
    write_data(run, folder, 0)
    return folder


def half_removed(run: Run, place: Place) -> str:
    """A checkpoint whose removal died right after it had hidden it; returns its folder."""
    commit = save(run, place, 30)

    def die(_: int, when: str, name: str, path: str) -> None:
        if (when, name) == ("before", "delete") and "/history/" in path:
            raise PowerCutError

    with pytest.raises(PowerCutError):
        remove_checkpoint(Run(FaultyStore(run.storage, die), run.marker), commit)
    return commit.checkpoint


class PowerCutError(Exception):
    """The process ends here."""


def collected(run: Run, *, grace_s: float = GRACE_S) -> CollectionOutcome:
    return collect(run, plan_collection(run, grace_s=grace_s))


def kinds(run: Run) -> tuple[dict[str, str], dict[str, str]]:
    """The garbage that a plan deletes, and the rest that it keeps: the kind of each by the last part of its path."""
    plan = plan_collection(run)
    garbage, kept = ({each.path.rpartition("/")[2]: each.kind for each in rows} for rows in (plan.garbage, plan.kept))
    return garbage, kept


def contents(run: Run) -> dict[str, bytes]:
    assert isinstance(run.storage, MemoryStore)
    return dict(run.storage.objects)


def test_parts_of_killed_saves_and_rests_of_deletions_go_and_their_bytes_are_told() -> None:
    run = new_run()
    begin(run, opened_from=HEAD)
    parts, rest = cut_off(run, Place(1, 2)), half_removed(run, Place(2, 1))
    before = contents(run)
    plan = plan_collection(run)
    assert {each.path.rpartition("/")[2]: each.kind for each in plan.garbage} == {
        parts: "parts",
        rest: "interrupted_deletion",
    }
    assert contents(run) == before
    done = collect(run, plan)
    assert done.deleted == list(plan.garbage)
    freed = {key: data for key, data in before.items() if key.startswith("checkpoints/") and key not in contents(run)}
    assert sum(each.nbytes for each in done.deleted) == sum(map(len, freed.values()))
    assert sum(each.num_files for each in done.deleted) == len(freed) == 2 + 4
    assert (names(run, parts), names(run, rest)) == ([SEAL_NAME], [])
    assert examine(run) == []
    assert plan_collection(run).garbage == ()
    check(run, run.find(place=HEAD))


def test_committed_checkpoints_stay_on_the_lineage_and_off_it() -> None:
    run = new_run()
    save(run, Place(1, 2), 20)
    save(run, Place(2, 1), 30)
    before = contents(run)
    assert collected(run) == CollectionOutcome()
    assert contents(run) == before


def test_what_stays_has_its_reason() -> None:
    run = new_run()
    stays = {
        cut_off(run, Place(2, 1)): "newest_epoch",
        write(run, Place(1, 2), 20): "complete",
        cut_off(run, Place(1, 3), created=time.time()): "young",
        cut_off(run, HEAD): "superseded",
        cut_off(run, Place(1, 4)): "held",
        cut_off(run, Place(1, 5)): "held",
    }
    create_lease(run.storage, Place(1, 4), lasting_s=60.0)
    run.storage.create(pin_key(Place(1, 5)), records.encode(Pin(place=Place(1, 5), created=records.now())))
    sealed = save(run, Place(1, 6), 60)
    run.storage.delete(records.commit_key(sealed.place))
    damaged = cut_off(run, Place(1, 7))
    key = records.checkpoint_key(damaged, fmt.NAME)
    run.storage.delete(key)
    run.storage.create(key, b"damaged")
    stays |= {sealed.checkpoint: "sealed", damaged: "unknown"}
    before = contents(run)
    assert kinds(run) == ({}, stays)
    assert collected(run).deleted == []
    assert contents(run) == before


def test_nothing_that_it_does_not_know_is_touched() -> None:
    run, other = new_run(), new_run()
    parts, foreign = cut_off(run, Place(1, 2)), cut_off(other, Place(1, 3))
    key = records.checkpoint_key(foreign, fmt.NAME)
    run.storage.create(key, other.storage.read(key))
    unknown = [
        "notes.txt",
        "mine/a",
        "checkpoints/README",
        "checkpoints/best/data-00000.safetensors",
        "history/old.txt",
        "pins/mine",
        "references/mine",
        f"checkpoints/{parts}/notes.txt",
        f"checkpoints/{parts}/mydata-00001.safetensors",
        f"checkpoints/{run.find(place=HEAD).checkpoint}/data-00009.safetensors",
    ]
    for name in unknown:
        run.storage.create(name, b"mine")
    collected(run)
    assert names(run, parts) == ["mydata-00001.safetensors", "notes.txt", SEAL_NAME]
    assert all(run.storage.read(name) == b"mine" for name in [*unknown])
    assert run.storage.nbytes(key) is not None
    assert {"notes.txt", "mine", "README", "best", "old.txt", foreign} <= kinds(run)[1].keys()


def test_records_that_have_ended_go() -> None:
    run = new_run()
    create_lease(run.storage, HEAD, lasting_s=-CLOCKS_S - 1)
    living = create_lease(run.storage, HEAD, lasting_s=60.0)
    ResumeLimit().begin(run, HEAD, 1)
    save(run, Place(2, 1), 20)
    assert kinds(run)[0] == {"pins": "records", "resumes": "records"}
    collected(run)
    assert run.storage.list("pins") == [living.rpartition("/")[2]]
    assert run.storage.list("resumes") == []


def test_temporary_files_go_once_nobody_has_written_to_them_for_the_time_of_grace(tmp_path: Path) -> None:
    run = Run.create(PosixStore(str(tmp_path / "run")))
    begin(run)
    commit = save(run, HEAD, 10)
    folder = tmp_path / "run" / "checkpoints" / commit.checkpoint
    files = [tmp_path / "run" / ".tmp-1", tmp_path / "run" / "history" / ".tmp-2", folder / ".tmp-3"]
    for file in files:
        file.write_bytes(b"half")
        os.utime(file, (OLD, OLD))
    writer = run.storage.writer(records.checkpoint_key(commit.checkpoint, "data-00007.safetensors"), nbytes=9)
    plan = plan_collection(run)
    assert [(each.path, each.kind, each.nbytes, each.num_files) for each in plan.garbage] == [
        (".", "temporary", 4, 1),
        ("history", "temporary", 4, 1),
        (f"checkpoints/{commit.checkpoint}", "temporary", 4, 1),
    ]
    collect(run, plan)
    assert not any(file.exists() for file in files)
    writer.publish(9)
    assert run.storage.nbytes(records.checkpoint_key(commit.checkpoint, "data-00007.safetensors")) == 9


def test_a_file_to_which_somebody_writes_again_since_the_plan_stays(tmp_path: Path) -> None:
    run = Run.create(PosixStore(str(tmp_path / "run")))
    begin(run)
    file = tmp_path / "run" / "history" / ".tmp-1"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"half")
    os.utime(file, (OLD, OLD))
    plan = plan_collection(run)
    file.write_bytes(b"more")
    with file.open("rb") as held:  # as its writer does
        fcntl.flock(held, fcntl.LOCK_SH)
        collect(run, plan)
    assert file.read_bytes() == b"more"


# Referenced files.


def with_references() -> Run:
    """A run whose first checkpoint holds a file for the second one, in an epoch that is over."""
    saved = saved_run()
    storage = MemoryStore()
    assert isinstance(saved.storage, MemoryStore)
    storage.objects.update(saved.storage.objects)
    run = Run(storage, saved.marker)
    for folder in run.storage.list("checkpoints"):  # without the save that is under way there
        if folder not in {run.commit(place).checkpoint for place in run.places()}:
            for name in names(run, folder):
                run.storage.delete(records.checkpoint_key(folder, name))
    return run


def test_referenced_files_of_a_removed_checkpoint_stay_until_nobody_needs_them() -> None:
    run = with_references()
    holder, referring = (run.commit(place) for place in (HOLDER, REFERRING))
    begin(run, opened_from=REFERRING)
    complete(run, write_with_references(run, Place(2, 5)), deep=False)
    assert not remove_checkpoint(run, holder)
    assert kinds(run) == ({}, {holder.checkpoint: "referenced"})
    collected(run)
    for place in run.places():
        assert verify_checkpoint(Checkpoint(run.locate(run.commit(place))), deep=True) == []
    # Once the others are gone, nobody needs them. (The head needs no other checkpoint.)
    begin(run, opened_from=REFERRING)
    head = save(run, Place(3, 1), 90)
    for commit in (referring, run.commit(Place(2, 5))):
        remove_checkpoint(run, commit)
    assert kinds(run)[0][holder.checkpoint] == "interrupted_deletion"
    collected(run)
    assert run.storage.list("checkpoints") == [head.checkpoint]
    assert run.storage.list("references") == []


def test_files_that_only_a_cut_off_save_needs_go_with_its_parts_in_one_call() -> None:
    run = with_references()
    holder, referring = (run.commit(place) for place in (HOLDER, REFERRING))
    parts = write_with_references(run, Place(1, 3))
    run.storage.delete(records.checkpoint_key(parts, "data-00000.safetensors"))
    begin(run, opened_from=REFERRING)
    head = save(run, Place(2, 1), 90)
    remove_checkpoint(run, referring)
    assert not remove_checkpoint(run, holder)
    assert kinds(run) == ({parts: "parts"}, {holder.checkpoint: "referenced"})
    done = collected(run)
    assert [each.kind for each in done.deleted] == ["parts", "interrupted_deletion"]
    assert run.storage.list("checkpoints") == sorted([head.checkpoint, parts])
    assert names(run, parts) == [SEAL_NAME]
    assert needed_folders(run) == frozenset()


# Processes that work on the run meanwhile.


def test_a_fenced_rank_that_finishes_its_save_meanwhile_commits_a_whole_checkpoint_or_is_told() -> None:
    def begun() -> tuple[Run, str, Callable[[Run], bool]]:
        run = new_run()
        folder = cut_off(run, Place(1, 2))
        plan = plan_collection(run)
        return run, folder, lambda watched: bool(collect(watched, plan).deleted)

    check_late_writes(late_writes(begun))


def test_two_collections_at_once_delete_the_same_and_nothing_else() -> None:
    for number in range(0, 1000, 3):
        run, ended = new_run(), list[CollectionOutcome]()
        begin(run, opened_from=HEAD)
        parts, rest = cut_off(run, Place(1, 2)), half_removed(run, Place(2, 1))

        def delete(run: Run = run, ended: list[CollectionOutcome] = ended) -> None:
            ended.append(collected(run))

        collected(watched(run, between(number, delete)))
        assert (names(run, parts), names(run, rest)) == ([SEAL_NAME], [])
        check(run, run.find(place=HEAD))
        if not ended:
            break
    assert number > 20


def test_a_reader_of_a_checkpoint_that_is_being_removed_keeps_its_files() -> None:
    run = new_run()
    begin(run, opened_from=HEAD)
    rest = half_removed(run, Place(2, 1))
    plan = plan_collection(run)
    lease = create_lease(run.storage, Place(2, 1), lasting_s=60.0)
    done = collect(run, plan)
    assert (done.deleted, [each.reason for each in done.left]) == ([], ["somebody has needed it since"])
    assert len(names(run, rest)) == 4
    assert kinds(run)[1] == {rest: "held"}
    run.storage.delete(lease)
    collected(run)
    assert names(run, rest) == []


def test_a_save_that_begins_at_any_moment_of_a_collection_is_committed_whole() -> None:
    for number in range(0, 1000, 3):
        run, begun = new_run(), list[str]()
        cut_off(run, Place(1, 2))

        def begin_save(run: Run = run, begun: list[str] = begun) -> None:
            begun.append(cut_off(run, Place(2, 1)))

        collected(watched(run, between(number, begin_save)))
        if not begun:
            break
        write_data(run, begun[0], 1)
        check(run, complete(run, begun[0]))


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_collection_that_dies_at_any_change_leaves_the_rest_to_the_next_one(when: str) -> None:
    num_deaths = 0
    for number in range(1000):
        run, changes = with_references(), [0]
        holder, referring = (run.commit(place) for place in (HOLDER, REFERRING))
        parts = write_with_references(run, Place(1, 3))
        run.storage.delete(records.checkpoint_key(parts, "data-00000.safetensors"))
        begin(run, opened_from=REFERRING)
        head = save(run, Place(2, 1), 90)
        remove_checkpoint(run, referring)
        remove_place(run, HOLDER, holder.checkpoint)

        def die(_: int, now: str, name: str, path: str, number: int = number, changes: list[int] = changes) -> None:
            if name in ("create", "delete") and now == when:
                changes[0] += 1
                if changes[0] > number:
                    raise PowerCutError

        try:
            collected(watched(run, die))
        except PowerCutError:
            num_deaths += 1
        check(run, run.find(place=Place(2, 1)))
        collected(run)
        assert run.storage.list("checkpoints") == sorted([head.checkpoint, parts])
        assert examine(run) == []
        if number >= num_deaths:
            break
    assert num_deaths > 8


EVENTS = st.tuples(
    st.sampled_from(["save", "cut_off", "restart", "rollback", "remove", "die_removing", "prune", "gc"]),
    st.integers(0, 9),
)


def happen(run: Run, seq: int, kind: str, where: int) -> None:
    """Let an event happen to `run`; `seq` is a number that no checkpoint has."""
    places = run.places()
    place, newest = places[where % len(places)], run.newest_epoch() or 0
    if kind == "save":
        save(run, Place(newest, seq), seq)
    elif kind == "cut_off":
        cut_off(run, Place(1 + where % newest, seq))
    elif kind in ("restart", "rollback"):
        begin(run, opened_from=place if kind == "rollback" else run.head_place())
    elif kind == "prune":
        retention = Retention(KeepLast(2))
        retention.apply(run, retention.survey(run))
    elif kind == "gc":
        collect_and_check(run)
    elif place != run.head_place():
        remove_until(run, place, where if kind == "die_removing" else 1000)


def remove_until(run: Run, place: Place, num_changes: int) -> None:
    """Remove a checkpoint, and die at the change of this number."""
    left = [num_changes]

    def die(_: int, when: str, name: str, path: str) -> None:
        if name in ("create", "delete") and when == "before":
            left[0] -= 1
            if left[0] < 0:
                raise PowerCutError

    with suppress(PowerCutError):
        remove_checkpoint(watched(run, die), run.commit(place))


def collect_and_check(run: Run) -> None:
    """Collect the garbage of `run`; it loses no checkpoint, and what is left is told."""
    before, head = run.places(), run.head_place()
    collected(run)
    after = plan_collection(run)
    assert (run.places(), run.head_place(), after.garbage) == (before, head, ())
    told = {each.path.rpartition("/")[2] for each in after.kept} | {run.commit(place).checkpoint for place in before}
    for folder in run.storage.list("checkpoints"):
        assert folder in told or names(run, folder) == [SEAL_NAME]


@settings(max_examples=25)
@given(st.lists(EVENTS, min_size=3, max_size=20))
def test_in_any_history_no_checkpoint_is_lost_and_all_garbage_goes(events: list[tuple[str, int]]) -> None:
    run = new_run()
    for seq, (kind, where) in enumerate(events, 2):
        happen(run, seq, kind, where)
    collect_and_check(run)
    for place in run.places():
        check(run, run.find(place=place))


def test_a_store_in_trouble_ends_the_collection_with_its_error() -> None:
    run = new_run()
    cut_off(run, Place(1, 2))
    plan = plan_collection(run)

    def fail(_: int, when: str, name: str, path: str) -> None:
        if (when, name) == ("before", "delete"):
            raise StorageError("cannot delete.", code="storage.denied", action="Ask for the right.", path=path)

    with pytest.raises(StorageError, match=r"storage\.denied"):
        collect(watched(run, fail), plan)
    collected(run)
    assert plan_collection(run).garbage == ()
