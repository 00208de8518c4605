"""Runs with any history, copied by calls that end at any change of the copy: it is a valid run all the time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.copying.run_copy import CopyOutcome, RunCopy
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.run.history import Run
from holdfast.run.removal import remove_checkpoint
from holdfast.store.base import Store
from holdfast.testing.memory_store import MemoryStore
from tests.support.checkpoints import begin, save
from tests.support.faulty_storage import FaultyStore

#: The events of a run: a save, a restart, a rollback, a late commit, a deletion; and the place of each.
EVENTS = st.tuples(
    st.sampled_from(["save", "save", "save", "restart", "rollback", "late", "remove"]), st.integers(0, 9)
)


class PowerCutError(Exception):
    """The process that copies ends here."""


class DieAt:
    """The process dies instead of making change number `num_changes`, or right behind it. Changes of leases do not
    count: a thread of their own makes them."""

    def __init__(self, num_changes: int, *, when: str) -> None:
        self._num_left, self._when = num_changes, when

    def __call__(self, number: int, when: str, name: str, path: str) -> None:
        if when == self._when and name in ("create", "delete", "publish") and "/pins/" not in path:
            if self._num_left == 0:
                raise PowerCutError
            self._num_left -= 1


class History:
    """A run to copy, to which events happen. Its steps rise with each save."""

    def __init__(self) -> None:
        self.run = Run.create(MemoryStore("source"))
        self._seqs: dict[int, int] = {}
        self._step = 0
        #: All objects that the run ever had.
        self.ever: dict[str, bytes] = {}
        begin(self.run)

    def happen(self, kind: str, where: int) -> None:
        """Let the event happen, if it can."""
        newest, places = self.run.newest_epoch(), self.run.places()
        assert newest is not None
        if kind == "save" or not places:
            self._save(newest)
        elif kind == "late":
            self._save(1 + where % newest)
        elif kind == "restart" and (head := self.run.head_place()) is not None:
            begin(self.run, opened_from=head)
        elif kind == "rollback":
            begin(self.run, opened_from=places[where % len(places)])
        elif kind == "remove" and (place := places[where % len(places)]) != self.run.head_place():
            remove_checkpoint(self.run, self.run.commit(place))

    def _save(self, epoch: int) -> None:
        self._step += 1
        self._seqs[epoch] = self._seqs.get(epoch, 0) + 1
        save(self.run, Place(epoch, self._seqs[epoch]), self._step)
        self.ever.update(self.source.objects)

    @staticmethod
    def removed(storage: MemoryStore) -> frozenset[Place]:
        """The places that were removed in a run."""
        return Run.open(storage).history().removed()

    @property
    def source(self) -> MemoryStore:
        assert isinstance(self.run.storage, MemoryStore)
        return self.run.storage


def copied(source: Run, target: Store, only: Place | None = None, *, skip_damaged: bool = False) -> CopyOutcome:
    shown = lambda _, __: nullcontext(lambda _: None)  # noqa: E731
    return RunCopy(source, target, only=only, read_back=False, skip_damaged=skip_damaged, shown=shown).run()


def check_valid(target: MemoryStore, history: History) -> None:
    """The copy is a run, and each checkpoint that it shows is there, with the bytes that the source has or had."""
    if not target.list(""):
        return
    run = Run.open(target)
    for place in {*run.lineage_places(), *run.places()}:
        commit = run.commit(place)
        folder = records.checkpoint_key(commit.checkpoint, "")
        keys = [records.commit_key(place), *(key for key in history.ever if key.startswith(folder))]
        assert len(keys) == 5
        for key in keys:
            assert target.objects[key] == history.ever[key]


@settings(max_examples=12)
@given(
    st.lists(st.lists(EVENTS, max_size=12), min_size=1, max_size=3),
    st.lists(st.integers(0, 25), max_size=3),
    st.sampled_from(["before", "after"]),
)
def test_a_copy_is_valid_wherever_a_call_ends_and_the_last_call_completes_it(
    rounds: list[list[tuple[str, int]]], deaths: list[int], when: str
) -> None:
    history, target = History(), MemoryStore("target")
    history.happen("save", 0)
    for events in rounds:
        for event in events:
            history.happen(*event)
        for num_changes in deaths:
            with suppress(PowerCutError):
                copied(history.run, FaultyStore(target, DieAt(num_changes, when=when)))
            check_valid(target, history)
        if history.run.head_place() is None:
            continue
        copied(history.run, target)
        check_valid(target, history)
        run = Run.open(target)
        assert run.head() == history.run.head()
        assert set(run.places()) >= set(history.run.places())
        assert [place for place in run.lineage_places() if not history.run.is_removed(place)] == [
            *history.run.lineage_places()
        ]


@settings(max_examples=10)
@given(st.lists(EVENTS, max_size=15), st.lists(st.integers(0, 99), min_size=1, max_size=4))
def test_single_checkpoints_make_a_valid_run(events: list[tuple[str, int]], chosen: list[int]) -> None:
    history, target = History(), MemoryStore("target")
    history.happen("save", 0)
    for event in events:
        history.happen(*event)
    places = history.run.places()
    run = Run(target, history.run.marker)
    for number in chosen:
        place = places[number % len(places)]
        if not run.is_removed(place):
            copied(history.run, target, place)
            assert run.is_committed(place)
        check_valid(target, history)
    if history.run.head_place() not in (*History.removed(target), None):
        copied(history.run, target)
        check_valid(target, history)
        assert run.head_place() == history.run.head_place()


def test_the_head_of_a_copy_never_is_an_abandoned_checkpoint() -> None:
    history = History()
    for event in (("save", 0), ("save", 0), ("save", 0), ("rollback", 2), ("save", 0)):
        history.happen(*event)
    lineage = [*history.run.lineage_places()]
    assert lineage == [Place(2, 1), Place(1, 1)]
    for when in ("before", "after"):
        for num_changes in range(30):
            target = MemoryStore("target")
            with suppress(PowerCutError):
                copied(history.run, FaultyStore(target, DieAt(num_changes, when=when)))
            assert Run(target, history.run.marker).head_place() in (*lineage, None)


def test_a_second_copy_brings_only_what_is_new() -> None:
    history, target = History(), MemoryStore("target")
    for _ in range(20):
        history.happen("save", 0)
    copied(history.run, target)
    history.happen("save", 0)
    before = len(target.objects)
    history.source.num_requests = target.num_requests = 0
    outcome = copied(history.run, target)
    assert outcome.copied == [Place(1, 21)]
    assert len(outcome.present) == 20
    assert len(target.objects) == before + 5  # the manifest, two data files, the seal, the commit
    assert history.source.num_requests + target.num_requests < 60


def test_what_was_removed_from_the_copy_stays_removed() -> None:
    history, target = History(), MemoryStore("target")
    for _ in range(3):
        history.happen("save", 0)
    copied(history.run, target)
    run = Run.open(target)
    remove_checkpoint(run, run.commit(Place(1, 2)))
    history.happen("save", 0)
    assert copied(history.run, target).removed == [Place(1, 2)]
    assert run.places() == [Place(1, 4), Place(1, 3), Place(1, 1)]


def test_an_origin_that_a_single_copy_leaves_out_is_a_place_that_was_removed() -> None:
    history, target = History(), MemoryStore("target")
    for event in (("save", 0), ("restart", 0), ("save", 0), ("save", 0)):
        history.happen(*event)
    copied(history.run, target, Place(2, 2))
    run = Run.open(target)
    assert [*run.lineage_places()] == [Place(2, 2)]
    outcome = copied(history.run, target)
    assert outcome.removed == [Place(1, 1)]
    assert outcome.copied == [Place(2, 1)]
    assert [*run.lineage_places()] == [Place(2, 2), Place(2, 1)]


def test_several_copies_to_one_place_at_once_make_one_whole_copy() -> None:
    history, target = History(), MemoryStore("target")
    for event in (("save", 0), ("save", 0), ("rollback", 1), ("save", 0), ("restart", 0), ("save", 0), ("late", 0)):
        history.happen(*event)
    for _ in range(5):
        with ThreadPoolExecutor(3) as pool:
            for outcome in [pool.submit(copied, history.run, target) for _ in range(3)]:
                outcome.result()
        check_valid(target, history)
        run = Run.open(target)
        assert (run.head(), run.places()) == (history.run.head(), history.run.places())
        history.happen("save", 0)


@pytest.mark.parametrize("at", range(6))
def test_an_epoch_that_is_opened_between_the_listings_waits_for_the_next_copy(at: int) -> None:
    history, target = History(), MemoryStore("target")
    history.happen("save", 0)
    num_listed = 0

    def watch(_: int, when: str, name: str, path: str) -> None:
        nonlocal num_listed
        if (when, name) == ("after", "list"):
            num_listed += 1
            if num_listed == at + 1:
                history.happen("restart", 0)
                history.happen("save", 0)

    copied(Run(FaultyStore(history.source, watch), history.run.marker), target)
    check_valid(target, history)
    copied(history.run, target)
    assert Run.open(target).head() == history.run.head()
