"""A policy applied to a run: what it deletes, what stays in any case, and what a killed deletion leaves to the next."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import CorruptError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.policy.keep import KeepBest, KeepEvery, KeepLast, KeepPolicy
from holdfast.run import holds
from holdfast.run.diagnosis import examine
from holdfast.run.history import Run
from holdfast.run.holds import Holds, create_lease
from holdfast.run.pins import pin_checkpoint
from holdfast.run.retention import Retention, RetentionOutcome
from holdfast.run.rollback import rollback
from holdfast.testing.memory_store import MemoryStore
from tests.support.checkpoints import begin, check, names, publish_manifest, save, write
from tests.support.faulty_storage import FaultyStore


def new_run(*steps: int) -> Run:
    """A run with these steps in its first epoch."""
    run = Run.create(MemoryStore())
    begin(run)
    for seq, step in enumerate(steps, 1):
        save(run, Place(1, seq), step)
    return run


def steps(run: Run) -> list[int]:
    """The steps of the lineage, oldest first; each checkpoint is whole."""
    found = [*run.lineage()][::-1]
    for commit in found:
        check(run, commit)
    return [commit.step for commit in found]


def prune(run: Run, policy: KeepPolicy) -> RetentionOutcome:
    retention = Retention(policy)
    return retention.apply(run, retention.survey(run))


def test_what_no_part_of_a_policy_wants_is_deleted_the_oldest_first() -> None:
    run = new_run(*range(10, 101, 10))
    done = prune(run, KeepLast(2) | KeepEvery(40))
    assert [facts.step for facts in done.deleted] == [10, 20, 30, 50, 60, 70]
    assert steps(run) == [40, 80, 90, 100]
    assert len(run.storage.list("checkpoints")) == 4
    assert examine(run) == []
    assert prune(run, KeepLast(2) | KeepEvery(40)).deleted == []


def test_a_retention_that_is_used_again_reads_only_new_commits() -> None:
    run = new_run(*range(10, 101, 10))
    reads: list[str] = []

    def watch(number: int, when: str, name: str, path: str) -> None:
        if (when, name) == ("before", "read") and "/history/" in path:
            reads.append(path)

    watched = Run(FaultyStore(run.storage, watch), run.marker)
    retention = Retention(KeepEvery(1))
    retention.survey(watched)
    assert len(reads) == 10
    save(run, Place(1, 11), 110)
    reads.clear()
    assert len(retention.survey(watched).decision.kept) == 11
    assert len(reads) == 1


def test_nothing_goes_behind_a_head_that_lacks_a_file() -> None:
    run = new_run(10, 20, 30, 40)
    head = run.find(step=40)
    run.storage.delete(records.checkpoint_key(head.checkpoint, fmt.file_name(1)))
    done = prune(run, KeepLast(1))
    assert [facts.step for facts in done.deleted] == [10, 20]
    assert [commit.step for commit in run.lineage()] == [40, 30]
    for commit in run.lineage():
        if commit.step != 40:
            check(run, commit)


def test_a_file_of_another_size_counts_as_missing() -> None:
    run = new_run(10, 20)
    key = records.checkpoint_key(run.find(step=20).checkpoint, fmt.file_name(0))
    data = run.storage.read(key)
    run.storage.delete(key)
    run.storage.create(key, data[:-1])
    assert prune(run, KeepLast(1)).deleted == []


def test_a_damaged_history_deletes_nothing() -> None:
    run = new_run(10, 20, 30)
    key = records.commit_key(Place(1, 2))
    run.storage.delete(key)
    run.storage.create(key, b"damaged")
    before = names(run, run.find(place=Place(1, 1)).checkpoint)
    with pytest.raises(CorruptError):
        prune(run, KeepLast(1))
    assert names(run, run.find(place=Place(1, 1)).checkpoint) == before


def test_pins_and_readers_keep_checkpoints_and_the_reasons_are_told() -> None:
    run = new_run(10, 20, 30, 40)
    pin_checkpoint(run, run.find(step=10))
    create_lease(run.storage, Place(1, 2), lasting_s=60.0)
    survey = Retention(KeepLast(1)).survey(run)
    reasons = {kept.facts.step: kept.reasons for kept in survey.decision.kept}
    assert reasons[10] == ("it is pinned",)
    assert reasons[20][0].startswith("a reader uses it, until ")
    prune(run, KeepLast(1))
    assert steps(run) == [10, 20, 40]


def test_a_reader_whose_clock_is_before_1970_has_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    """The record was refused, and the thread that makes leases ended with a traceback."""
    run = new_run(10, 20)
    monkeypatch.setattr(time, "time", lambda: -2e9)
    create_lease(run.storage, Place(1, 1), lasting_s=60.0)
    assert [lease.place for lease in Holds.of(run.storage).leases] == [Place(1, 1)]


def test_a_pin_that_comes_after_the_decision_counts_too() -> None:
    run = new_run(10, 20, 30)
    retention = Retention(KeepLast(1))
    survey = retention.survey(run)
    pin_checkpoint(run, run.find(step=10))
    done = retention.apply(run, survey)
    assert [(facts.step, error.code) for facts, error in done.held] == [(10, "config.pinned")]
    assert [facts.step for facts in done.deleted] == [20]
    assert steps(run) == [10, 30]


def test_a_deletion_ends_when_another_job_opens_an_epoch() -> None:
    run = new_run(10, 20, 30)
    retention = Retention(KeepLast(1))
    survey = retention.survey(run)
    rollback(run, 10)
    done = retention.apply(run, survey)
    assert done.is_overtaken
    assert done.deleted == []
    assert steps(run) == [10]


def test_restarts_do_not_collect_checkpoints() -> None:
    run = new_run(1)
    retention = Retention(KeepLast(2))
    for epoch in range(2, 40):
        begin(run, opened_from=run.head_place())
        save(run, Place(epoch, 1), epoch)
        retention.apply(run, retention.survey(run))
        assert len(run.storage.list("checkpoints")) <= 2
    assert steps(run) == [38, 39]
    assert examine(run) == []


def test_what_an_epoch_without_checkpoints_was_opened_from_stays() -> None:
    run = new_run(10, 20, 30)
    for _ in range(3):
        begin(run, opened_from=run.head_place())
    assert prune(run, KeepLast(1)).deleted != []
    assert steps(run) == [30]


def test_abandoned_checkpoints_are_left_alone() -> None:
    run = new_run(10, 20, 30)
    rollback(run, 20)
    save(run, Place(2, 1), 21)
    survey = Retention(KeepLast(1)).survey(run)
    assert survey.num_abandoned == 1
    prune(run, KeepLast(1))
    assert steps(run) == [21]
    check(run, run.find(place=Place(1, 3)))


def test_a_metric_that_no_checkpoint_has_deletes_nothing() -> None:
    run = new_run(10, 20, 30)
    survey = Retention(KeepBest("los")).survey(run)
    assert survey.decision.deleted == ()
    assert [problem.blocks for problem in survey.decision.problems] == [True]
    assert "they have 'loss'" in survey.decision.problems[0].message


def test_a_save_in_progress_is_not_touched() -> None:
    run = new_run(10, 20, 30)
    folder, other = write(run, Place(1, 4), 40), publish_manifest(run, Place(1, 5), 50)
    before = names(run, folder), names(run, other)
    prune(run, KeepLast(1))
    assert (names(run, folder), names(run, other)) == before


class KilledError(BaseException):
    """The process was killed."""


def killed_at(run: Run, policy: KeepPolicy, num_changes: int) -> bool:
    """Prune until the change number `num_changes`, which is not made. Returns whether it came so far."""
    left = [num_changes]

    def watch(number: int, when: str, name: str, path: str) -> None:
        if when == "before" and name in ("create", "delete"):
            if left[0] <= 0:
                raise KilledError
            left[0] -= 1

    try:
        prune(Run(FaultyStore(run.storage, watch), run.marker), policy)
    except KilledError:
        return True
    return False


def test_a_death_at_any_change_leaves_whole_checkpoints_and_the_next_deletion_goes_on() -> None:
    num_changes = 0
    while True:
        run = new_run(10, 20, 30)
        if not killed_at(run, KeepLast(1), num_changes):
            break
        assert steps(run)[-1] == 30
        prune(run, KeepLast(1))
        assert steps(run) == [30]
        assert len(run.storage.list("checkpoints")) == 1
        assert examine(run) == []
        num_changes += 1
    assert num_changes > 15


def test_a_folder_that_a_reader_kept_is_deleted_when_he_has_ended() -> None:
    run = new_run(10, 20)
    commit = run.find(step=10)
    assert killed_at(run, KeepLast(1), 3), "the tombstone is there, and nothing else is changed"
    key = create_lease(run.storage, Place(1, 1), lasting_s=60.0)
    retention = Retention(KeepLast(1))
    assert retention.remains(run, retention.survey(run)).half_removed == [commit.checkpoint]
    assert retention.apply(run, retention.survey(run)).finished == []
    assert len(names(run, commit.checkpoint)) == 4
    run.storage.delete(key)
    assert retention.apply(run, retention.survey(run)).finished == [commit.checkpoint]
    assert names(run, commit.checkpoint) == []


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All removals that end halfway are dead here: nobody waits half a minute for each."""
    monkeypatch.setattr(holds, "PATIENCE_S", 0.0)


#: The events of a run.
EVENTS = st.lists(st.sampled_from(["save", "restart", "back", "prune", "pin", "die"]), max_size=25)


@settings(deadline=None, max_examples=60)
@given(EVENTS, st.integers(1, 3), st.integers(0, 20))
def test_whatever_happens_the_head_is_what_it_would_be_without_deletions(
    words: list[str], number: int, num_changes: int
) -> None:
    run, twin = new_run(1), new_run(1)
    place, step, pinned = Place(1, 1), 1, set[Place]()
    for word in words:
        if word == "save":
            place, step = Place(place.epoch, place.seq + 1), step + 1
            for each in (run, twin):
                save(each, place, step)
        elif word == "restart":
            for each in (run, twin):
                begin(each, opened_from=each.head_place())
            place = Place(place.epoch + 1, 0)
        elif word == "back" and (older := [*run.lineage_places()][1:]):
            for each in (run, twin):
                rollback(each, older[0])
            place = Place(place.epoch + 1, 0)
        elif word == "pin":
            commit = run.head()
            assert commit is not None
            pin_checkpoint(run, commit)
            pinned.add(commit.place)
        elif word == "prune":
            prune(run, KeepLast(number))
        elif word == "die":
            killed_at(run, KeepLast(number), num_changes)
        assert run.head_place() == twin.head_place()
    prune(run, KeepLast(number))
    left = [*run.lineage_places()]
    assert set(left) <= set(twin.lineage_places())
    assert left == sorted(left, reverse=True)
    assert len(set(left) - pinned) <= number
    assert pinned & set(twin.lineage_places()) <= set(left)
    for each_place in left:
        check(run, run.find(place=each_place))
    assert examine(run) == []
