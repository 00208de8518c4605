"""A long history: commands, loads and saves make no more requests to storage than in a short one."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from holdfast.errors import CorruptError, NotFoundError
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.format.tombstones import removed_key
from holdfast.run.committed_places import FIRST_NAMES
from holdfast.run.history import Run, resolve
from holdfast.run.loads import Load
from holdfast.run.paths import Selection
from holdfast.run.rollback import rollback
from holdfast.run.session import Session
from holdfast.store.base import Location
from holdfast.testing.memory_store import MemoryStore
from tests.run.test_history import new_run, open_epoch, save
from tests.support.checkpoints import save as save_whole
from tests.support.command_line import holdfast_command
from tests.support.published import put

LONG: Final = 1000


class Counting(MemoryStore):
    """A storage that counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        self.asked["read"] += 1
        return super().read(key, start=start, nbytes=nbytes, limit=limit)

    def nbytes(self, key: str) -> int | None:
        self.asked["look"] += 1
        return super().nbytes(key)

    def list(self, folder: str, *, limit: int | None = None) -> list[str]:
        self.asked["list"] += 1
        return super().list(folder, limit=limit)

    def create(self, key: str, data: bytes) -> bool:
        self.asked["create"] += 1
        return super().create(key, data)


def grown(num_checkpoints: int) -> Run:
    """A run of two epochs; the second one goes on from the end of the first."""
    run = new_run(Counting())
    open_epoch(run)
    half = num_checkpoints // 2
    for number in range(1, half + 1):
        save(run, Place(1, number), step=number)
    open_epoch(run, opened_from=Place(1, half))
    for number in range(half + 1, num_checkpoints + 1):
        save(run, Place(2, number - half), step=number)
    asked(run)
    return run


def asked(run: Run) -> Counter[str]:
    """The requests since the last call."""
    assert isinstance(run.storage, Counting)
    found, run.storage.asked = run.storage.asked, Counter()
    return found


def the_head(run: Run) -> None:
    assert run.head() is not None


def a_step(run: Run) -> None:
    assert run.find(step=3).place == Place(1, 3)
    assert resolve(Selection(Location(""), step=7), run.storage).sealed.seal.step == 7


def a_place(run: Run) -> None:
    assert run.find(place=Place(1, 2)).step == 2


def a_resume_and_its_saves(run: Run) -> None:
    session = Session()
    for number in range(3):
        located = resolve(Selection(Location("")), run.storage)
        assert located.sealed.commit is not None
        if number == 0:
            session.note_loaded(
                Load(run.storage.location.url, run.run_id, located.sealed.commit.place, located.epoch or 0)
            )
        place = session.begin(run, takeover=False, world_size=1, sources=session.sources(list))
        run.check_fence(place.epoch)
        save(run, place, step=10**6 + number)


def a_rollback(run: Run) -> None:
    save_whole(run, Place(2, 10**6), 10**6)
    asked(run)
    rollback(run, Place(2, 10**6))


@pytest.mark.parametrize("work", [the_head, a_step, a_place, a_resume_and_its_saves, a_rollback])
def test_what_is_asked_of_storage_does_not_depend_on_the_length_of_the_history(work) -> None:  # type: ignore[no-untyped-def]
    costs = []
    for run in (grown(3 * FIRST_NAMES), grown(LONG)):
        work(run)
        costs.append(asked(run))
    assert costs[0] == costs[1]
    assert costs[0].total() < 60


def test_a_step_is_the_newest_of_its_number_on_the_lineage_only() -> None:
    run = grown(40)
    again = save(run, Place(2, 100), step=5)
    assert run.find(step=5) == again
    open_epoch(run, opened_from=Place(1, 10), why="rollback")
    assert run.find(step=5).place == Place(1, 5)
    with pytest.raises(NotFoundError):
        run.find(step=15)


def test_a_step_that_is_not_there_costs_a_few_requests_and_names_what_is() -> None:
    run = grown(LONG)
    with pytest.raises(NotFoundError, match=r"steps: 1000, 999, .*, those of 984 older checkpoints") as caught:
        run.find(step=5000)
    assert caught.value.code == "not_found.commit"
    assert asked(run).total() < 60


def test_a_committed_step_whose_folder_is_lost_is_found_by_its_commit_and_is_damage() -> None:
    run = grown(LONG)
    commit = run.find(step=123)
    run.storage.delete(records.checkpoint_key(commit.checkpoint, "seal.json"))
    asked(run)
    assert run.find(step=123) == commit
    assert asked(run).total() < 60
    with pytest.raises(CorruptError, match=r"123.*is missing"):
        resolve(Selection(Location(""), step=123), run.storage)


def test_ls_of_thousands_of_checkpoints_takes_little_time(tmp_path: Path) -> None:
    storage = grown(4 * LONG).storage
    assert isinstance(storage, Counting)
    run = put(storage.objects, tmp_path / "run")
    begun_s = time.process_time()
    done = holdfast_command("ls", run)
    assert time.process_time() - begun_s < 2.0
    assert (done.status, len(done.lines)) == (0, 4 * LONG + 2)


@pytest.mark.parametrize("names", [0, 2, 3 * FIRST_NAMES])
def test_names_of_others_before_those_of_records_hide_no_head(names: int) -> None:
    run = grown(10)
    head = run.head()
    for number in range(names):
        for folder in ("epochs", "history"):
            run.storage.create(f"{folder}/ {number}", b"")  # sorts before digits
    assert run.head() == head


@pytest.mark.parametrize("removed", [1, FIRST_NAMES // 2 - 1, FIRST_NAMES // 2, FIRST_NAMES, FIRST_NAMES + 1])
def test_the_head_is_found_behind_any_number_of_removed_places(removed: int) -> None:
    run = grown(2 * FIRST_NAMES)
    places = run.places()
    for place in places[:removed]:
        run.storage.create(removed_key(place), b"")
    assert run.head_place() == places[removed]
    assert run.places() == list(run.history().places()) == places[removed:]
