"""While a checkpoint is removed, another process pins it, reads it, or opens an epoch from it: in every order of their
requests, either the checkpoint stays, or the other process learns that it is gone.

Each test runs two threads whose requests take turns in one given order, for each order in which the requests of the one
can lie between those of the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import combinations_with_replacement, islice
from threading import Condition, Thread

import pytest

from holdfast.errors import ConfigurationError, NotFoundError
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.run import holds
from holdfast.run.history import Run
from holdfast.run.holds import create_lease
from holdfast.run.pins import pin_checkpoint
from holdfast.run.removal import remove_checkpoint
from holdfast.run.rollback import rollback
from holdfast.testing.memory_store import MemoryStore
from tests.support.checkpoints import begin, check, names, save
from tests.support.faulty_storage import FaultyStore

PLACE = Place(1, 2)


class Turns:
    """Two threads make requests in turns: the other one makes its request number `i` when the remover has made
    ``before[i]`` of its own."""

    def __init__(self, before: Sequence[int]) -> None:
        self._before = list(before)
        self._num_made = 0
        self._ended: set[str] = set()
        self._changed = Condition()

    def remover(self, number: int, when: str, name: str, path: str) -> None:
        with self._changed:
            if when == "after":
                self._num_made += 1
                self._changed.notify_all()
            else:
                self._changed.wait_for(lambda: not self._before or self._before[0] > self._num_made or self._is_over)

    def other(self, number: int, when: str, name: str, path: str) -> None:
        with self._changed:
            if when == "after":
                if self._before:
                    self._before.pop(0)
                self._changed.notify_all()
            else:
                self._changed.wait_for(
                    lambda: not self._before or self._before[0] <= self._num_made or "remover" in self._ended
                )

    def end(self, who: str) -> None:
        with self._changed:
            self._ended.add(who)
            self._changed.notify_all()

    @property
    def _is_over(self) -> bool:
        return "other" in self._ended


@cache
def saved_run() -> Run:
    run = Run.create(MemoryStore())
    begin(run)
    for seq in (1, 2, 3):
        save(run, Place(1, seq), seq * 10)
    return run


def new_run() -> Run:
    """A run with the steps 10, 20, 30."""
    saved = saved_run()
    storage = MemoryStore()
    assert isinstance(saved.storage, MemoryStore)
    storage.objects = dict(saved.storage.objects)
    return Run(storage, saved.marker)


def counted(work: Callable[[Run], object], run: Run) -> int:
    """The number of requests that `work` makes alone."""
    numbers = [0]
    work(Run(FaultyStore(run.storage, lambda number, *_: numbers.append(number)), run.marker))
    return max(numbers) + 1


def raced(
    run: Run, work: Callable[[Run], object], before: Sequence[int], removal: Callable[[Run], object] | None = None
) -> tuple[BaseException | None, BaseException | None]:
    """The errors of the remover and of `work`, whose requests took turns. The remover does `removal`, by default that
    of the checkpoint at `PLACE`."""
    turns = Turns(before)
    found: dict[str, BaseException | None] = {"remover": None, "other": None}

    def go(who: str, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - the test judges it
            found[who] = error
        finally:
            turns.end(who)

    theirs = Run(FaultyStore(run.storage, turns.remover), run.marker)
    ours = Run(FaultyStore(run.storage, turns.other), run.marker)
    remove = removal or partial(remove_checkpoint, commit=run.find(place=PLACE))
    threads = [
        Thread(target=go, args=("remover", lambda: remove(theirs))),
        Thread(target=go, args=("other", lambda: work(ours))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found["remover"], found["other"]


def num_requests_of_a_removal() -> int:
    commit = new_run().find(place=PLACE)
    return counted(lambda run: remove_checkpoint(run, commit), new_run())


def orders(work: Callable[[Run], object]) -> Iterator[tuple[int, ...]]:
    """All orders of the requests of `work` among those of a removal."""
    num_ours, num_theirs = counted(work, new_run()), num_requests_of_a_removal()
    yield from combinations_with_replacement(range(num_theirs + 1), num_ours)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for notices follow each other quickly."""
    monkeypatch.setattr(holds, "_LOOK_S", 0.0005)


def code(error: BaseException | None) -> str:
    if error is None:
        return ""
    assert isinstance(error, ConfigurationError | NotFoundError), error
    return error.code


def open_from(run: Run) -> None:
    """Open an epoch from `PLACE` as a job does, and raise if the place turns out to be removed."""
    run.storage.create(records.epoch_key(2), epoch_2(run))
    holds.await_removals(run.storage, PLACE)
    if run.is_removed(PLACE):
        raise NotFoundError("it is gone", code="not_found.removed", action="")


def epoch_2(run: Run) -> bytes:
    return records.encode(
        records.Epoch(
            epoch=2,
            opened_from=PLACE,
            why="rollback",
            created=1.0,
            world_size=1,
            incarnation="0" * 32,
        )
    )


def read(run: Run) -> None:
    """Read the checkpoint under a lease, if it is not removed; return the lease."""
    create_lease(run.storage, PLACE, lasting_s=60.0)
    if run.is_removed(PLACE):
        raise NotFoundError("it is gone", code="not_found.removed", action="")


@pytest.mark.slow
def test_a_pin_either_holds_or_fails() -> None:
    outcomes = set()
    commit = new_run().find(place=PLACE)
    for before in orders(lambda run: pin_checkpoint(run, commit)):
        run = new_run()
        removed, pinned = raced(run, lambda run: pin_checkpoint(run, commit), before)
        outcomes.add((code(removed), code(pinned)))
        if pinned is None:
            assert run.is_committed(PLACE)
            check(run, commit)
        else:
            assert not run.is_committed(PLACE)
            assert run.storage.list("pins") == []
    assert outcomes == {("config.pinned", ""), ("", "not_found.removed")}


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])  # of well over a thousand orders
def test_an_epoch_is_opened_from_a_checkpoint_that_stays_or_its_opener_learns_that_it_is_gone(stride: int) -> None:
    outcomes = set()
    for before in islice(orders(open_from), None, None, stride):
        run = new_run()
        removed, opened = raced(run, open_from, before)
        outcomes.add((code(removed), code(opened)))
        assert run.epoch(2).opened_from == PLACE
        if opened is None:
            assert run.head_place() == PLACE
            check(run, run.find(place=PLACE))
        else:
            assert run.head_place() == Place(1, 1)
    assert outcomes == {("config.needed", ""), ("", "not_found.removed")}


def test_a_reader_with_a_lease_finds_all_files_until_it_ends() -> None:
    outcomes = set()
    for before in orders(read):
        run = new_run()
        commit = run.find(place=PLACE)
        files = names(run, commit.checkpoint)
        removed, opened = raced(run, read, before)
        outcomes.add((code(removed), code(opened)))
        if opened is None:
            assert names(run, commit.checkpoint) == files
    # When both fail, the tombstone is there and the files are too: the next removal deletes them.
    assert {("config.in_use", ""), ("", "not_found.removed")} <= outcomes
    assert ("", "") not in outcomes


def test_a_rollback_to_a_checkpoint_that_is_being_removed_says_so() -> None:
    outcomes = set()
    num_theirs = num_requests_of_a_removal()
    num_ours = counted(lambda run: rollback(run, PLACE), new_run())
    for at in range(num_theirs + 1):
        for num_later in range(num_ours + 1):
            run = new_run()
            before = [0] * (num_ours - num_later) + [at] * num_later
            removed, rolled = raced(run, lambda run: rollback(run, PLACE), before)
            outcomes.add((code(removed), code(rolled)))
            if rolled is None:
                assert run.head_place() == PLACE
                check(run, run.find(place=PLACE))
    assert ("config.needed", "") in outcomes
    assert ("", "") not in outcomes
