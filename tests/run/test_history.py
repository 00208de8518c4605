"""The history of a run: place alone orders checkpoints."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from threading import Barrier, Thread

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigurationError, CorruptError, FencedError, NotFoundError
from holdfast.format import records
from holdfast.format.records import Commit, Diverged, Epoch, FileSeal, Place, Seal, SealDigest, Why
from holdfast.run.history import Located, Run, resolve
from holdfast.run.paths import parse
from holdfast.run.removal import remove_checkpoint
from holdfast.store.base import Location, Store
from holdfast.store.urls import open_store
from holdfast.testing.memory_store import MemoryStore


def new_run(storage: Store | None = None) -> Run:
    return Run.create(storage or MemoryStore())


def open_epoch(run: Run, *, opened_from: Place | None = None, why: Why | None = None) -> int:
    why = why or ("start" if opened_from is None else "resume")
    return run.open_epoch(after=run.newest_epoch() or 0, opened_from=opened_from, why=why, world_size=1).epoch


def save(run: Run, place: Place, *, step: int) -> Commit:
    """Seal and commit a checkpoint without data."""
    checkpoint_id = secrets.token_hex(8)
    folder = records.folder_name(step, checkpoint_id)
    seal = records.encode(
        Seal(
            checkpoint_id=checkpoint_id,
            place=place,
            step=step,
            manifest=FileSeal("manifest.bin", 0, "0" * 32),
            files=(),
        )
    )
    run.storage.create(records.checkpoint_key(folder, "seal.json"), seal)
    commit = Commit(
        place=place,
        step=step,
        checkpoint=folder,
        checkpoint_id=checkpoint_id,
        seal=SealDigest(len(seal), records.digest(seal)),
        nbytes=0,
        created=float(step),
        metrics={},
        diverged=Diverged.of(()),
    )
    run.publish(commit)
    return commit


def head_place(run: Run) -> Place | None:
    head = run.head()
    return head.place if head else None


def steps(run: Run) -> list[int]:
    return [commit.step for commit in run.lineage()]


class Interrupted(MemoryStore):
    """A storage on which something else happens right before the next creation."""

    meanwhile: Callable[[], object] | None = None

    def create(self, key: str, data: bytes) -> bool:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().create(key, data)


class LosesAnswers(MemoryStore):
    """A storage whose client retries a creation of which it lost the answer: the second try says "exists"."""

    def create(self, key: str, data: bytes) -> bool:
        super().create(key, data)
        return False


# ---- which folder is a run


def test_a_created_run_is_found_again_with_its_identity() -> None:
    storage = MemoryStore()
    run = Run.create(storage)
    assert Run.open(storage).marker == run.marker == Run.create(storage).marker


def test_of_two_that_create_a_run_the_loser_adopts_the_winners() -> None:
    storage = Interrupted()
    winners: list[Run] = []
    storage.meanwhile = lambda: winners.append(Run.create(storage))
    loser = Run.create(storage)
    assert [loser.run_id] == [winner.run_id for winner in winners]


def test_a_folder_that_holds_something_else_is_not_made_a_run(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigurationError, match=r"thesis\.tex") as caught:
        Run.create(open_store(Location(str(tmp_path))))
    assert caught.value.code == "config.not_a_run"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_missing_and_an_empty_folder_become_runs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "missing"):
        Run.create(open_store(Location(str(tmp_path / name))))
        assert Run.open(open_store(Location(str(tmp_path / name)))).head() is None


def test_a_missing_run_is_told_with_the_runs_that_are_close(tmp_path: Path) -> None:
    for name in ("llama-7b", "llama-8b", "notes"):
        Run.create(open_store(Location(str(tmp_path / name))))
    (tmp_path / "lama-7b.events").mkdir()
    (tmp_path / "lama-7").mkdir()
    with pytest.raises(NotFoundError, match=r"no such folder.*Did you mean 'llama-.b', 'llama-.b', in the") as caught:
        Run.open(open_store(Location(str(tmp_path / "lama-7b"))))
    assert "notes" not in str(caught.value)
    assert "lama-7'" not in str(caught.value), "no run"


def test_a_missing_run_in_a_missing_folder_is_told_with_the_run_in_the_folder_that_is_close(tmp_path: Path) -> None:
    for name in ("runs/gpt", "run-logs"):
        Run.create(open_store(Location(str(tmp_path / name))))
    with pytest.raises(NotFoundError) as caught:
        Run.open(open_store(Location(str(tmp_path / "run" / "gpt"))))
    assert caught.value.action == f"Did you mean '{tmp_path}/runs/gpt'?"
    for far in ("run/bert", "logs/gpt"):
        with pytest.raises(NotFoundError, match="Check the path"):
            Run.open(open_store(Location(str(tmp_path / far))))


def test_a_folder_that_is_not_a_run_is_told_with_the_runs_in_it(tmp_path: Path) -> None:
    Run.create(open_store(Location(str(tmp_path / "a"))))
    (tmp_path / "b").mkdir()
    with pytest.raises(NotFoundError, match=r"exists but is not a holdfast run \(it holds a, b\).*runs in it: 'a'\."):
        Run.open(open_store(Location(str(tmp_path))))
    with pytest.raises(NotFoundError, match=r"exists but is not a holdfast run \(it is empty\)"):
        Run.open(open_store(Location(str(tmp_path / "b"))))


def test_the_checkpoints_of_a_run_lead_to_the_run(tmp_path: Path) -> None:
    Run.create(open_store(Location(str(tmp_path / "run"))))
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(NotFoundError, match=r"Name the run that it is a part of: '.*/run'"):
        Run.open(open_store(Location(str(tmp_path / "run" / "checkpoints"))))


def test_steps_that_exist_are_listed_in_order_where_one_was_saved_again() -> None:
    run = new_run()
    open_epoch(run)
    for seq, step in enumerate((0, 1, 2, 1), 1):
        save(run, Place(1, seq), step=step)
    with pytest.raises(NotFoundError, match=r"Choose one of its steps: 2, 1, 0\."):
        run.find(step=7)


def test_what_was_meant_as_a_selector_is_explained(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"RUN@step=700"):
        resolve(parse(tmp_path / "run@latest"))


# ---- the head


def test_the_head_is_the_greatest_place_of_the_newest_epoch_whatever_order_commits_arrive_in() -> None:
    run = new_run()
    open_epoch(run)
    for seq in (2, 3, 1):
        save(run, Place(1, seq), step=seq * 10)
    assert head_place(run) == Place(1, 3)
    assert steps(run) == [30, 20, 10]


def test_a_run_without_commits_has_no_head() -> None:
    run = new_run()
    assert run.head() is None
    open_epoch(run)
    open_epoch(run)
    assert run.head() is None
    assert steps(run) == []


def test_an_epoch_without_commits_has_the_head_it_was_opened_from() -> None:
    run = new_run()
    open_epoch(run)
    save(run, Place(1, 1), step=10)
    for epoch in (2, 3, 4):
        assert open_epoch(run, opened_from=Place(1, 1)) == epoch
        assert head_place(run) == Place(1, 1)


def test_a_late_commit_in_an_old_epoch_never_becomes_the_head() -> None:
    run = new_run()
    open_epoch(run)
    save(run, Place(1, 1), step=10)
    open_epoch(run, opened_from=Place(1, 1))
    save(run, Place(1, 2), step=20)
    assert head_place(run) == Place(1, 1)
    save(run, Place(2, 1), step=15)
    save(run, Place(1, 3), step=30)
    assert head_place(run) == Place(2, 1)
    assert steps(run) == [15, 10]


def test_a_rollback_abandons_the_future_but_keeps_it_in_the_history() -> None:
    run = new_run()
    open_epoch(run)
    for seq in (1, 2, 3):
        save(run, Place(1, seq), step=seq * 10)
    open_epoch(run, opened_from=Place(1, 1), why="rollback")
    assert head_place(run) == Place(1, 1)
    save(run, Place(2, 1), step=20)
    assert steps(run) == [20, 10]
    assert run.find(step=20).place == Place(2, 1)
    assert run.find(place=Place(1, 3)).step == 30
    assert run.commits(1) == [Place(1, 3), Place(1, 2), Place(1, 1)]
    with pytest.raises(NotFoundError, match=r"step 30 .*steps: 20, 10\."):
        run.find(step=30)


def test_a_step_that_was_abandoned_is_named_with_its_place() -> None:
    run = new_run()
    open_epoch(run)
    for seq in (1, 2, 3):
        save(run, Place(1, seq), step=min(seq, 2) * 10)
    open_epoch(run, opened_from=Place(1, 1), why="rollback")
    with pytest.raises(NotFoundError) as caught:
        run.find(step=20)
    assert caught.value.message.endswith("an abandoned part of its history has that step, at 1.3 and 1.2.")
    for way in ("RUN@1.3", "--to 1.3", "at='1.3'"):
        assert way in caught.value.action
    assert caught.value.action.endswith("or choose one of the head's steps: 10.")
    remove_checkpoint(run, run.commit(Place(1, 3)))
    with pytest.raises(NotFoundError, match=r"has that step, at 1\.2\."):
        run.find(step=20)
    with pytest.raises(NotFoundError) as never:
        run.find(step=30)
    assert "abandoned" not in never.value.message
    assert never.value.action == "Choose one of its steps: 10."


def test_an_epoch_opened_from_nothing_begins_a_new_lineage() -> None:
    run = new_run()
    open_epoch(run)
    open_epoch(run)
    save(run, Place(1, 1), step=10)
    assert run.head() is None
    save(run, Place(2, 1), step=5)
    assert steps(run) == [5]


def test_a_step_means_its_newest_commit_on_the_lineage() -> None:
    run = new_run()
    open_epoch(run)
    save(run, Place(1, 1), step=10)
    save(run, Place(1, 2), step=10)
    assert run.find(step=10).place == Place(1, 2)


def test_finding_the_head_takes_a_constant_number_of_requests() -> None:
    storage = MemoryStore()
    run = new_run(storage)
    for epoch in range(1, 30):
        open_epoch(run, opened_from=Place(epoch - 1, 9) if epoch > 1 else None)
        for seq in range(1, 10):
            save(run, Place(epoch, seq), step=seq)
    before = storage.num_requests
    assert head_place(run) == Place(29, 9)
    assert storage.num_requests - before == 3
    open_epoch(run, opened_from=Place(29, 9))
    before = storage.num_requests
    assert head_place(run) == Place(29, 9)
    assert storage.num_requests - before == 4


class Model:
    """The rule of the architecture, word for word, over plain values."""

    def __init__(self) -> None:
        self.origins: dict[int, Place | None] = {}
        self.committed: set[Place] = set()

    def head(self) -> Place | None:
        epoch = max(self.origins, default=None)
        if epoch is None:
            return None
        return max((place for place in self.committed if place.epoch == epoch), default=self.origins[epoch])

    def lineage(self) -> list[Place]:
        places, place = [], self.head()
        while place is not None:
            places.append(place)
            earlier = [p for p in self.committed if p.epoch == place.epoch and p < place]
            place = max(earlier, default=self.origins[place.epoch])
        return places


@given(st.data())
def test_head_and_lineage_follow_the_rule_for_every_order_of_epochs_and_commits(data: st.DataObject) -> None:
    run, model = new_run(), Model()
    for step in range(data.draw(st.integers(1, 12))):
        free = [Place(e, s) for e in model.origins for s in range(1, 5) if Place(e, s) not in model.committed]
        if not free or data.draw(st.booleans(), label="open an epoch"):
            origin = data.draw(st.sampled_from([None, *sorted(model.committed)]))
            model.origins[open_epoch(run, opened_from=origin)] = origin
        else:
            place = data.draw(st.sampled_from(free))
            save(run, place, step=step)
            model.committed.add(place)
        assert head_place(run) == model.head()
        assert [commit.place for commit in run.lineage()] == model.lineage()


# ---- races, and the same answer twice


def test_an_epoch_decided_on_an_old_view_of_the_run_is_not_opened() -> None:
    run = new_run()
    open_epoch(run)
    with pytest.raises(FencedError, match=r"fenced\.lost_race"):
        run.open_epoch(after=0, opened_from=None, why="start", world_size=1)
    assert run.epochs() == [1]


def test_an_epoch_is_not_opened_from_a_place_of_an_epoch_that_was_not_known() -> None:
    run = new_run()
    open_epoch(run)
    save(run, Place(1, 1), step=10)
    with pytest.raises(FencedError, match=r"fenced\.lost_race.*opened epoch 1 first"):
        run.open_epoch(after=0, opened_from=Place(1, 1), why="takeover", world_size=1)
    assert run.epochs() == [1]


def test_of_many_that_open_an_epoch_at_once_one_wins_and_the_others_are_fenced() -> None:
    run = new_run()
    barrier = Barrier(8)
    results: list[Epoch | FencedError] = []

    def race() -> None:
        barrier.wait()
        try:
            results.append(run.open_epoch(after=0, opened_from=None, why="start", world_size=1))
        except FencedError as error:
            results.append(error)

    threads = [Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [result for result in results if isinstance(result, Epoch)]
    assert len(results) == 8
    assert winners == [run.epoch(1)]


def test_a_lost_answer_to_a_creation_is_settled_by_reading_back() -> None:
    run = new_run(LosesAnswers())
    assert open_epoch(run) == 1
    save(run, Place(1, 1), step=10)
    assert head_place(run) == Place(1, 1)


def test_an_epoch_is_not_opened_from_a_place_without_commit() -> None:
    run = new_run()
    open_epoch(run)
    with pytest.raises(NotFoundError, match=r"no commit at 1\.7"):
        open_epoch(run, opened_from=Place(1, 7))
    assert run.newest_epoch() == 1


def test_publishing_the_same_commit_twice_succeeds_and_another_one_is_fenced() -> None:
    run = new_run()
    open_epoch(run)
    commit = save(run, Place(1, 1), step=10)
    run.publish(commit)
    with pytest.raises(FencedError, match=r"fenced\.place_taken"):
        run.publish(msgspec.structs.replace(commit, nbytes=1))
    assert run.head() == commit


def test_the_fence_stops_an_epoch_that_is_not_the_newest_any_more() -> None:
    run = new_run()
    with pytest.raises(FencedError, match=r"fenced\.epoch_lost"):
        run.check_fence(1)
    open_epoch(run)
    run.check_fence(1)
    open_epoch(run)
    with pytest.raises(FencedError, match=r"fenced\.newer_epoch.*epoch 2 exists \(opened .* UTC by 1 rank, "):
        run.check_fence(1)


# ---- damage


def damaged(run: Run, key: str, data: bytes) -> None:
    assert isinstance(run.storage, MemoryStore)
    assert key in run.storage.objects
    run.storage.objects[key] = data


def test_a_bad_commit_or_epoch_record_raises_and_is_never_skipped() -> None:
    for key in (records.commit_key(Place(1, 2)), records.epoch_key(1), "holdfast.json"):
        run = new_run()
        open_epoch(run)
        save(run, Place(1, 1), step=10)
        save(run, Place(1, 2), step=20)
        damaged(run, key, b"")
        with pytest.raises(CorruptError, match=key):
            list(Run.open(run.storage).lineage())


def test_a_record_under_another_ones_name_is_corruption() -> None:
    run = new_run()
    open_epoch(run)
    first = save(run, Place(1, 1), step=10)
    open_epoch(run, opened_from=Place(1, 1))
    run.storage.create(records.commit_key(Place(2, 1)), records.encode(first))
    with pytest.raises(CorruptError, match=r"place 1\.1"):
        run.head()
    run.storage.create(records.epoch_key(3), records.encode(run.epoch(2)))
    with pytest.raises(CorruptError, match="epoch 2"):
        run.epoch(3)


def test_a_commit_that_the_lineage_needs_and_that_is_gone_is_corruption() -> None:
    run = new_run()
    open_epoch(run)
    save(run, Place(1, 1), step=10)
    open_epoch(run, opened_from=Place(1, 1))
    assert isinstance(run.storage, MemoryStore)
    del run.storage.objects[records.commit_key(Place(1, 1))]
    with pytest.raises(CorruptError, match=r"corrupt\.history"):
        run.head()


def test_names_that_cannot_be_records_are_ignored() -> None:
    run = new_run()
    open_epoch(run)
    save(run, Place(1, 1), step=10)
    for key in ("epochs/0000000000.json.swp", "epochs/9999999999.json", "history/notes.txt", "history/a/b.json"):
        run.storage.create(key, b"whatever")
    assert run.epochs() == [1]
    assert head_place(run) == Place(1, 1)


# ---- from a path to a checkpoint


def run_on_disk(root: Path) -> tuple[Run, Commit, Commit]:
    run = new_run(open_store(Location(str(root))))
    open_epoch(run)
    return run, save(run, Place(1, 1), step=10), save(run, Place(1, 2), step=20)


def test_a_run_resolves_to_its_head_and_a_selector_to_its_commit(tmp_path: Path) -> None:
    run, older, newer = run_on_disk(tmp_path / "run")
    for suffix, commit in (("", newer), ("/", newer), ("@step=10", older), ("@1.1", older), ("@1.2", newer)):
        located = resolve(parse(f"{tmp_path}/run{suffix}"))
        sealed = located.sealed
        assert located.run is not None
        assert located.run.run_id == sealed.run_id == run.run_id
        assert sealed.commit == commit
        assert sealed.prefix == f"checkpoints/{commit.checkpoint}/"
        assert sealed.seal.place == commit.place
        assert sealed.storage.nbytes(sealed.key("seal.json")) == commit.seal.nbytes


def test_a_checkpoint_folder_stands_for_itself_outside_any_history(tmp_path: Path) -> None:
    _, older, _ = run_on_disk(tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / older.checkpoint
    inside = resolve(parse(folder))
    folder.rename(tmp_path / "copy")
    moved = resolve(parse(tmp_path / "copy"))
    for located in (inside, moved):
        assert isinstance(located, Located)
        assert (located.run, located.sealed.commit, located.sealed.prefix) == (None, None, "")
        assert located.sealed.seal.step == 10
    with pytest.raises(ConfigurationError, match="one checkpoint, not a run"):
        resolve(parse(f"{tmp_path}/copy@step=10"))


def test_a_run_without_commits_resolves_to_nothing(tmp_path: Path) -> None:
    new_run(open_store(Location(str(tmp_path))))
    for suffix, code in (("", "not_found.head"), ("@step=1", "not_found.commit"), ("@1.1", "not_found.commit")):
        with pytest.raises(NotFoundError) as caught:
            resolve(parse(f"{tmp_path}{suffix}"))
        assert caught.value.code == code


def test_a_seal_that_is_not_the_committed_one_is_corruption() -> None:
    run = new_run()
    open_epoch(run)
    first, second = save(run, Place(1, 1), step=10), save(run, Place(1, 2), step=20)
    assert isinstance(run.storage, MemoryStore)
    keys = [records.checkpoint_key(commit.checkpoint, "seal.json") for commit in (first, second)]
    run.storage.objects[keys[0]] = run.storage.objects[keys[1]]
    del run.storage.objects[keys[1]]
    with pytest.raises(CorruptError, match="not the seal that its commit names"):
        run.locate(first)
    with pytest.raises(CorruptError, match="is missing"):
        run.locate(second)
