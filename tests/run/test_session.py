"""A process's memory of its runs: only the owner of the newest epoch saves, at rising places."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import ConfigurationError, FencedError, HoldfastError
from holdfast.format.records import Place, Why
from holdfast.run.history import Run
from holdfast.run.loads import Load
from holdfast.run.removal import remove_checkpoint
from holdfast.run.session import Session, Takeover
from holdfast.store.base import Location, Store
from holdfast.store.urls import open_store
from holdfast.testing.memory_store import MemoryStore
from tests.run.test_history import Interrupted, head_place, run_on_disk, save, steps


def begin(session: Session, run: Run, *, takeover: Takeover = False, step: int = 0) -> Place:
    """Begin a save of a state that consists of values."""
    return session.begin(run, takeover=takeover, world_size=4, sources=session.sources(list), step=step)


class Job:
    """One process's session on a run, and its saves."""

    def __init__(self, storage: Store) -> None:
        self.session = Session()
        self.storage = storage

    def begin(self, *, takeover: Takeover = False, step: int = 0) -> Place:
        return begin(self.session, Run.create(self.storage), takeover=takeover, step=step)

    def save(self, step: int, *, takeover: Takeover = False) -> Place:
        place = self.begin(takeover=takeover, step=step)
        save(Run.open(self.storage), place, step=step)
        return place

    def load(self, place: Place | None = None) -> None:
        run = Run.open(self.storage)
        place = place or head_place(run)
        assert place is not None
        self.session.note_loaded(Load(self.storage.location.url, run.run_id, place, run.newest_epoch() or 0))

    def why(self) -> tuple[Why, Place | None]:
        run = Run.open(self.storage)
        epoch = run.epoch(run.newest_epoch() or 0)
        return epoch.why, epoch.opened_from


def test_a_job_starts_an_empty_run_and_counts_on() -> None:
    job = Job(MemoryStore())
    assert [job.save(step) for step in (1, 2, 3)] == [Place(1, 1), Place(1, 2), Place(1, 3)]
    assert job.why() == ("start", None)
    assert Run.open(job.storage).epoch(1).world_size == 4


def test_the_place_of_an_aborted_save_is_never_used_again() -> None:
    job = Job(MemoryStore())
    assert job.save(1) == Place(1, 1)
    assert job.begin() == Place(1, 2)
    assert job.save(2) == Place(1, 3)


def test_a_restarted_job_resumes_in_a_new_epoch_from_the_head_it_loaded() -> None:
    storage = MemoryStore()
    Job(storage).save(1)
    job = Job(storage)
    job.load()
    assert job.save(2) == Place(2, 1)
    assert job.why() == ("resume", Place(1, 1))
    assert job.save(3) == Place(2, 2)


def test_loading_an_older_place_makes_the_next_epoch_a_rollback() -> None:
    storage = MemoryStore()
    first = Job(storage)
    first.save(1)
    first.save(2)
    first.load(Place(1, 1))
    assert first.save(3) == Place(2, 1)
    assert first.why() == ("rollback", Place(1, 1))
    assert steps(Run.open(storage)) == [3, 1]


def test_loading_what_was_just_saved_continues_the_epoch() -> None:
    job = Job(MemoryStore())
    job.save(1)
    job.load()
    assert job.save(2) == Place(1, 2)


def test_loading_past_a_save_that_may_still_be_committed_opens_an_epoch() -> None:
    job = Job(MemoryStore())
    job.save(1)
    under_way = job.begin()
    job.load()
    assert job.begin() == Place(2, 1)
    assert job.why() == ("resume", Place(1, 1))
    save(Run.open(job.storage), under_way, step=2)
    assert steps(Run.open(job.storage)) == [1]


def test_saving_into_a_history_that_was_not_loaded_is_refused_and_opens_nothing() -> None:
    storage = MemoryStore()
    Job(storage).save(7)
    with pytest.raises(ConfigurationError, match=r"step 7 at 1\.1.*takeover=True") as caught:
        Job(storage).begin()
    assert caught.value.code == "config.unloaded_history"
    assert caught.value.action.startswith("If this job goes on with that training, load the run first.")
    assert "only keeps results" in caught.value.action
    assert Run.open(storage).epochs() == [1]


def test_a_takeover_goes_on_from_the_head_once_and_then_counts_on() -> None:
    storage = MemoryStore()
    Job(storage).save(1)
    job = Job(storage)
    assert job.save(2, takeover=True) == Place(2, 1)
    assert job.why() == ("takeover", Place(1, 1))
    assert job.save(3, takeover=True) == Place(2, 2)
    assert steps(Run.open(storage)) == [3, 2, 1]


def test_a_takeover_after_a_load_goes_on_from_what_was_loaded() -> None:
    storage = MemoryStore()
    first = Job(storage)
    first.save(1)
    first.save(2)
    job = Job(storage)
    job.load(Place(1, 1))
    job.save(3, takeover=True)
    assert job.why() == ("rollback", Place(1, 1))


def test_jobs_take_turns_and_each_goes_on_from_the_head() -> None:
    storage = MemoryStore()
    first, second = Job(storage), Job(storage)
    for step, (job, place, why) in enumerate(
        [
            (first, Place(1, 1), ("start", None)),
            (first, Place(1, 2), ("start", None)),
            (second, Place(2, 1), ("takeover", Place(1, 2))),
            (first, Place(3, 1), ("takeover", Place(2, 1))),
            (first, Place(3, 2), ("takeover", Place(2, 1))),
            (second, Place(4, 1), ("takeover", Place(3, 2))),
        ]
    ):
        assert job.save(step, takeover="always") == place
        assert job.why() == why
    assert steps(Run.open(storage)) == [5, 4, 3, 2, 1, 0]


def test_a_job_that_restored_the_head_abandons_nothing_that_others_have_saved_since() -> None:
    storage = MemoryStore()
    Job(storage).save(1)
    job, other = Job(storage), Job(storage)
    job.load()
    assert other.save(2, takeover="always") == Place(2, 1)
    assert job.save(3, takeover="always") == Place(3, 1)
    assert job.why() == ("takeover", Place(2, 1))
    assert steps(Run.open(storage)) == [3, 2, 1]
    job.load()
    assert job.save(4, takeover="always") == Place(3, 2)


def test_a_job_that_restored_the_head_resumes_it_although_it_may_always_take_over() -> None:
    storage = MemoryStore()
    Job(storage).save(1)
    job = Job(storage)
    job.load()
    assert job.save(2, takeover="always") == Place(2, 1)
    assert job.why() == ("resume", Place(1, 1))


def test_a_job_takes_no_run_over_from_one_that_is_further() -> None:
    storage = MemoryStore()
    zombie, heir = Job(storage), Job(storage)
    zombie.save(5)
    assert heir.save(5, takeover="always") == Place(2, 1)  # the same step again: it was repeated
    heir.save(6, takeover="always")
    with pytest.raises(FencedError, match=r"step 5 is not saved: another job has saved step 6 .* at 2\.2") as caught:
        zombie.begin(takeover="always", step=5)
    assert (caught.value.code, caught.value.step) == ("fenced.behind", 5)
    assert Run.open(storage).epochs() == [2, 1]
    assert zombie.save(7, takeover="always") == Place(3, 1)


def test_a_job_that_died_before_its_first_commit_leaves_nothing_to_load() -> None:
    storage = MemoryStore()
    Job(storage).begin()
    job = Job(storage)
    assert job.save(1) == Place(2, 1)
    assert job.why() == ("start", None)


def test_a_job_whose_run_was_taken_over_is_fenced() -> None:
    storage = MemoryStore()
    zombie, heir = Job(storage), Job(storage)
    zombie.save(1)
    heir.load()
    heir.begin()
    for _ in range(2):
        with pytest.raises(FencedError, match=r"fenced\.newer_epoch"):
            zombie.begin()


def test_a_load_from_before_the_takeover_does_not_give_a_zombie_the_run_back() -> None:
    storage = MemoryStore()
    zombie, heir = Job(storage), Job(storage)
    zombie.save(1)
    zombie.save(2)
    zombie.load(Place(1, 1))
    heir.load()
    heir.save(3)
    with pytest.raises(FencedError):
        zombie.begin()
    zombie.load()
    assert zombie.save(4) == Place(3, 1)
    assert steps(Run.open(storage)) == [4, 3, 2, 1]


def test_a_job_that_loaded_before_another_opened_an_epoch_is_fenced_at_its_first_save() -> None:
    storage = MemoryStore()
    Job(storage).save(1)
    slow, fast = Job(storage), Job(storage)
    slow.load()
    fast.load()
    fast.save(2)
    with pytest.raises(FencedError, match="epoch 2 exists"):
        slow.begin()
    assert slow.save(3, takeover=True) == Place(3, 1)
    assert slow.why() == ("rollback", Place(1, 1))


def test_a_job_goes_on_from_a_state_whose_checkpoint_was_removed_meanwhile() -> None:
    storage = MemoryStore()
    first = Job(storage)
    places = [first.save(step) for step in (1, 2, 3)]
    job = Job(storage)
    job.load(places[1])
    run = Run.open(storage)
    remove_checkpoint(run, run.find(place=places[1]))
    assert job.begin() == Place(2, 1)
    assert (job.why(), steps(run)) == (("rollback", places[1]), [1])
    assert job.save(4) == Place(2, 2)
    assert steps(run) == [4, 1]


def test_a_fenced_job_may_take_the_run_back() -> None:
    storage = MemoryStore()
    zombie, heir = Job(storage), Job(storage)
    zombie.save(1)
    heir.load()
    heir.save(2)
    assert zombie.save(3, takeover=True) == Place(3, 1)
    assert zombie.why() == ("takeover", Place(2, 1))


def test_of_two_jobs_that_found_an_empty_run_the_first_to_save_is_not_fenced() -> None:
    """The other one opened an epoch of its own, while the first checkpoint was written: both were durable, and the head
    had nothing of the first."""
    storage = MemoryStore()
    dead, first, other = (Job(storage) for _ in range(3))
    dead.begin()
    for job in (first, other):
        job.session.note_empty(storage.resolved(), 1)
    assert first.begin() == Place(2, 1)
    with pytest.raises(FencedError, match=r"fenced\.lost_race.*opened epoch 2 first"):
        other.begin()
    assert first.save(1) == Place(2, 2)
    with pytest.raises(ConfigurationError, match="unloaded_history"):
        other.begin()


def test_a_job_that_found_a_run_empty_may_begin_one_that_was_made_anew_meanwhile() -> None:
    job = Job(MemoryStore())
    job.session.note_empty(job.storage.resolved(), 3)
    assert job.save(1) == Place(1, 1)


def test_of_two_jobs_that_begin_at_once_one_is_fenced() -> None:
    storage = Interrupted()
    Job(storage).save(1)
    slow, fast = Job(storage), Job(storage)
    slow.load()
    fast.load()
    storage.meanwhile = fast.begin
    with pytest.raises(FencedError, match=r"fenced\.lost_race"):
        slow.begin()
    assert fast.begin() == Place(2, 2)


def test_a_run_that_was_deleted_and_made_anew_is_another_run(tmp_path: Path) -> None:
    storage = MemoryStore()
    job = Job(storage)
    job.save(1)
    job.save(2)
    storage.objects.clear()
    assert job.save(3) == Place(1, 1)
    assert job.save(4) == Place(1, 2)


def test_a_session_knows_a_run_by_any_of_its_paths(tmp_path: Path) -> None:
    _, older, _ = run_on_disk(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    run = Run.open(open_store(Location(str(tmp_path / "link"))))
    session = Session()
    session.note_loaded(Load(f"{tmp_path}/run", run.run_id, older.place, seen=1))
    assert begin(session, run) == Place(2, 1)


def test_a_load_from_another_run_gives_no_right_to_this_one() -> None:
    here, there = MemoryStore("here"), MemoryStore("there")
    Job(there).save(1)
    Job(here).save(1)
    job = Job(here)
    run = Run.open(there)
    job.session.note_loaded(Load(there.location.url, run.run_id, Place(1, 1), seen=1))
    with pytest.raises(HoldfastError, match=r"config\.unloaded_history"):
        job.begin()


def unseen(job: Job) -> Place | None:
    """The place of a save that cannot reach the store."""
    session = job.session
    found = session.begin_unseen(job.storage.location, session.sources(list))
    return None if found is None else found.place


def test_a_save_that_cannot_reach_the_store_takes_the_next_place_of_its_own_epoch() -> None:
    job = Job(MemoryStore())
    assert unseen(job) is None, "it has no epoch yet"
    job.save(1)
    assert [unseen(job), unseen(job), job.save(4)] == [Place(1, 2), Place(1, 3), Place(1, 4)]


def test_only_the_store_can_tell_what_a_save_after_a_load_goes_on_from() -> None:
    job = Job(MemoryStore())
    job.save(1)
    job.load(job.save(2))
    assert unseen(job) is None
    job.save(3)
    assert unseen(job) is not None


def test_what_a_fenced_job_saved_without_a_look_at_the_store_is_refused_at_its_commit() -> None:
    old, new = Job(storage := MemoryStore()), Job(storage)
    old.save(1)
    new.load()
    new.save(2)
    place = unseen(old)
    assert place == Place(1, 2)
    with pytest.raises(FencedError):
        Run.open(storage).check_fence(place.epoch)
    with pytest.raises(FencedError):
        old.begin()
