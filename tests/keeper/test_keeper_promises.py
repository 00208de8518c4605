"""The keeper's promises besides making staged snapshots durable, each tested against a mutation that breaks it."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import StorageError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.records import FileSeal, Place
from holdfast.keeper import client, daemon, writing
from holdfast.keeper.client import ensure_keeper
from holdfast.keeper.daemon import Keeper
from holdfast.keeper.persist import Sealing, commit, persist, publish_manifest
from holdfast.node_memory import slots
from holdfast.node_memory.claims import Claim
from holdfast.node_memory.generations import (
    Generation,
    generation_ids,
    give_up_generation,
    given_up_ids,
    read_generation,
    remove_generation,
    write_generation,
)
from holdfast.node_memory.keeper_lock import is_kept
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot, SlotRecord, SlotState, slot_names
from holdfast.run.history import Run
from holdfast.store.posix import PosixStore
from holdfast.store.retry_budget import RetryBudget
from holdfast.store.timed import TimedStore
from tests.keeper import test_keeper
from tests.keeper.test_keeper import states
from tests.keeper.test_persist import Saved, persist_in
from tests.support.faulty_storage import FaultyStore
from tests.support.keepers import keeper_of
from tests.support.nursery import until

run, folder, saved, started = test_keeper.run, test_keeper.folder, test_keeper.saved, test_keeper.started


def looked(keeper: Keeper) -> bool:
    """Have it look; true, whatever there was to do."""
    keeper.look()
    return True


class Later:
    """A checkpoint like `saved`, staged at the next place."""

    generation: Generation
    slots: list[Slot]

    def __init__(self, saved: Saved | Later, folder: NodeFolder, stack: ExitStack) -> None:
        first = saved.generation
        manifest = fmt.decode(first.manifest, path="manifest")
        place, step = Place(first.place.epoch, first.place.seq + 1), first.step + 1
        checkpoint_id = f"ffeeddccbbaa{step:04}"
        body = msgspec.structs.replace(
            manifest.body, checkpoint_id=checkpoint_id, place=(place.epoch, place.seq), step=step
        )
        name = records.folder_name(step, checkpoint_id)
        data = manifest.with_body(body).encode()
        self.generation = Generation(first.run, name, checkpoint_id, place, step, data, disk=first.disk)
        self.slots = []
        for slot in saved.slots:
            contents = slot.record.contents
            assert contents is not None
            new = stack.enter_context(Slot.create(folder, rank=slot.rank, nbytes=slot.nbytes))
            new.data[:] = slot.data
            held = msgspec.structs.replace(contents, checkpoint_id=checkpoint_id, place=place, step=step)
            assert new.take()
            new.advance(SlotRecord(SlotState.WRITING, held))
            new.advance(SlotRecord(SlotState.STAGED, held))
            self.slots.append(new)
        write_generation(folder, self.generation)


@pytest.fixture
def later(saved: Saved, folder: NodeFolder) -> Iterator[Later]:
    with ExitStack() as stack:
        yield Later(saved, folder, stack)


def test_the_oldest_generation_is_made_durable_first(
    run: Run,
    saved: Saved,
    later: Later,
    folder: NodeFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written: list[str] = []

    def recorded(
        storage: TimedStore, sealing: Sealing, slot: Slot, *, await_seal: Callable[[], None]
    ) -> tuple[FileSeal, ...]:
        written.append(sealing.generation.checkpoint_id)
        return persist(storage, sealing, slot, await_seal=await_seal)

    monkeypatch.setattr(writing, "persist", recorded)
    keeper = Keeper(folder)
    until(lambda: not (keeper.look() or keeper.owes))
    keeper.close()
    first, second = saved.generation.checkpoint_id, later.generation.checkpoint_id
    assert written == [first, first, second, second]
    head = run.head()
    assert head is not None
    assert head.place == later.generation.place


def test_a_store_that_fails_is_left_alone_for_a_while_and_then_asked_again(
    run: Run,
    saved: Saved,
    folder: NodeFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []

    def failing(*_: object, **__: object) -> bool:
        asked.append(time.monotonic())
        raise StorageError("no. " * 400, code="storage.io", action="Wait.")

    monkeypatch.setattr(writing, "persist", failing)
    monkeypatch.setattr(daemon, "_RETRIES", RetryBudget(total_s=math.inf, first_s=0.2, longest_s=0.2))
    keeper = Keeper(folder)
    until(lambda: looked(keeper) and len(asked) >= 12 * len(saved.slots) and bool(saved.slots[0].refresh().error))
    # The text is cut to what a slot has room for; the slot is whole.
    assert 1000 < len(saved.slots[0].record.error) <= 1200
    assert asked[-1] - asked[0] > 0.3, "eleven pauses of 0.1 s on average"
    monkeypatch.undo()
    until(lambda: not (keeper.look() or keeper.owes))
    assert states(saved) == {SlotState.COMMITTED}
    assert saved.slots[0].record.error == ""
    keeper.close()


def test_a_generation_that_was_given_up_is_not_freed_while_it_is_read(
    run: Run,
    saved: Saved,
    folder: NodeFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[SlotState] = []
    keeper = Keeper(folder)

    def slowly(*_: object, **__: object) -> bool:
        give_up_generation(folder, saved.generation.checkpoint_id)
        time.sleep(0.2)
        found.extend(slot.refresh().state for slot in saved.slots)
        raise StorageError("no.", code="storage.io", action="Wait.")

    monkeypatch.setattr(writing, "persist", slowly)
    until(lambda: looked(keeper) and states(saved) == {SlotState.FREE})
    assert found
    assert SlotState.FREE not in found
    keeper.look()
    assert given_up_ids(folder) == set()
    keeper.close()


def test_memory_of_a_rank_that_a_living_process_has_claimed_stays(
    run: Run,
    saved: Saved,
    folder: NodeFolder,
) -> None:
    keeper = Keeper(folder)
    until(lambda: not (keeper.look() or keeper.owes))
    Claim(folder, 0).close()
    with Claim(folder, 1):
        keeper.give_back()
        assert slot_names(folder) == [saved.slots[1].name]
    keeper.give_back()
    assert slot_names(folder) == []
    keeper.close()


def test_of_ranks_that_are_no_more_only_what_is_older_and_not_owed_goes(
    run: Run,
    saved: Saved,
    later: Later,
    folder: NodeFolder,
) -> None:
    keeper = Keeper(folder)
    until(lambda: not (keeper.look() or keeper.owes))
    (old, tended), (newest, newest_tended) = saved.slots, later.slots
    contents = old.refresh().contents
    assert contents is not None
    with (
        Slot.create(folder, rank=8, nbytes=1) as owed,
        Slot.create(folder, rank=9, nbytes=1) as after,
        Claim(folder, tended.rank),
    ):
        for slot in (owed, after):
            assert slot.take()
        for state in (SlotState.WRITING, SlotState.STAGED, SlotState.SEALED, SlotState.COMMITTED):
            if state != SlotState.COMMITTED:
                owed.advance(SlotRecord(state, contents))
            after.advance(SlotRecord(state, msgspec.structs.replace(contents, place=Place(1, 3))))
        keeper._meet()
        keeper._remove_old()
        assert set(slot_names(folder)) == {slot.name for slot in (tended, newest, newest_tended, owed, after)}
        owed.advance(SlotRecord(SlotState.FREE))
    keeper.close()


def test_a_keeper_that_cannot_make_all_durable_ends_in_time_and_says_so(
    run: Run,
    saved: Saved,
    folder: NodeFolder,
    started: Callable[..., subprocess.Popen[bytes]],
) -> None:
    shutil.rmtree(run.storage.location.url)
    keeper = started("--grace-s", "0.5")
    until(lambda: states(saved) == {SlotState.SEALED})
    assert keeper_of(folder.path) == keeper.pid
    assert os.getpriority(os.PRIO_PROCESS, keeper.pid) == 19
    begun_s = time.monotonic()
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(30) == 1
    assert 0.4 < time.monotonic() - begun_s < 10
    assert "keeper.protocol" in folder.names(), "what is there is still to be understood by its version alone"
    assert states(saved) == {SlotState.SEALED}


def test_a_keeper_that_owes_nothing_leaves_no_protocol(
    run: Run,
    saved: Saved,
    folder: NodeFolder,
    started: Callable[..., subprocess.Popen[bytes]],
) -> None:
    keeper = started()
    until(lambda: states(saved) == {SlotState.COMMITTED})
    assert "keeper.protocol" in folder.names()
    with Claim(folder, 0):  # a trainer that lives keeps the folder
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(30) == 0
        assert folder.path.exists()
        assert "keeper.protocol" not in folder.names()


def test_a_keeper_that_owes_something_is_not_idle(
    run: Run,
    saved: Saved,
    folder: NodeFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(daemon, "_RETRY_S", 0.5)
    stored = Path(run.storage.location.url)
    stored.rename(stored.with_name("away"))
    keeper = Keeper(folder)
    until(lambda: bool(keeper.look() and saved.slots[0].refresh().error))
    looks: list[float] = []

    def is_over() -> bool:
        looks.append(time.monotonic())
        return looks[-1] - looks[0] > 1.0

    keeper.run(is_over=is_over, idle_s=0.05)
    assert looks[-1] - looks[0] > 1.0
    assert len(slot_names(folder)) == 2
    stored.with_name("away").rename(stored)
    assert keeper.finish(grace_s=30)
    assert states(saved) == {SlotState.COMMITTED}
    keeper.close()


def test_what_cannot_be_sealed_is_given_up_and_said(
    run: Run,
    saved: Saved,
    folder: NodeFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(Sealing, "seal", broken)
    keeper = Keeper(folder)
    until(lambda: looked(keeper) and states(saved) == {SlotState.FREE})
    assert "is given up: no such luck" in caplog.text
    keeper.close()
    assert run.head() is None


def test_a_keeper_that_is_killed_while_it_starts_is_started_again(
    folder: NodeFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    statuses = iter([-9, -9, 0])
    monkeypatch.setattr(client, "_started", lambda *_: next(statuses))
    ensure_keeper(folder, "run")
    assert list(statuses) == []
    assert not is_kept(folder)


def test_a_file_that_another_keeper_publishes_meanwhile_is_not_taken_for_ones_own(
    run: Run,
    saved: Saved,
) -> None:
    sealing, slot = Sealing(saved.generation), saved.slots[0]
    sealing.seal(slot)

    def race(number: int, when: str, name: str, path: str) -> None:
        if (name, when) == ("publish", "before"):
            Path(path).write_bytes(b"another keeper's")

    assert isinstance(run.storage, PosixStore)
    with TimedStore(FaultyStore(run.storage, race), timeout_s=60) as storage:
        publish_manifest(storage, sealing)
        assert not persist(storage, sealing, slot)
    with TimedStore(run.storage, timeout_s=60) as storage:
        assert not persist(storage, sealing, slot)  # it is there before


def test_a_store_that_fails_to_publish_is_an_error(
    run: Run,
    saved: Saved,
) -> None:
    sealing, slot = Sealing(saved.generation), saved.slots[0]
    sealing.seal(slot)

    def fail(number: int, when: str, name: str, path: str) -> None:
        if (name, when) == ("publish", "before"):
            raise StorageError("no.", code="storage.io", action="Wait.")

    assert isinstance(run.storage, PosixStore)
    with TimedStore(FaultyStore(run.storage, fail), timeout_s=60) as storage:
        publish_manifest(storage, sealing)
        with pytest.raises(StorageError, match=r"storage\.io"):
            persist(storage, sealing, slot)


def test_what_another_node_has_committed_is_not_fenced(run: Run, saved: Saved, folder: NodeFolder) -> None:
    sealing = Sealing(saved.generation)
    for slot in saved.slots:
        sealing.seal(slot)
        persist_in(run, sealing, slot)
    commit(run, sealing, [])
    run.open_epoch(after=1, opened_from=saved.generation.place, why="resume", world_size=2, incarnation="1" * 32)
    keeper = Keeper(folder)
    until(lambda: not (keeper.look() or keeper.owes))
    assert states(saved) == {SlotState.COMMITTED}
    keeper.close()


def test_nothing_is_written_into_a_run_that_was_begun_anew_at_the_same_path(
    run: Run,
    saved: Saved,
    folder: NodeFolder,
) -> None:
    shutil.rmtree(run.storage.location.url)
    assert isinstance(run.storage, PosixStore)
    other = Run.create(PosixStore(run.storage.location.url))
    keeper = Keeper(folder)
    until(lambda: not (keeper.look() or keeper.owes))
    keeper.close()
    assert states(saved) == {SlotState.FENCED}
    assert "another run was begun there" in saved.slots[0].record.error
    assert other.storage.list("checkpoints") == []


def test_a_generation_is_removed_with_the_note_that_it_was_given_up(
    saved: Saved,
    folder: NodeFolder,
) -> None:
    checkpoint_id = saved.generation.checkpoint_id
    before = (folder.path / f"generation-{checkpoint_id}").stat().st_ino
    write_generation(folder, saved.generation)  # it is there
    assert (folder.path / f"generation-{checkpoint_id}").stat().st_ino == before
    assert read_generation(folder, checkpoint_id) == saved.generation
    for _ in range(2):
        give_up_generation(folder, checkpoint_id)
    assert given_up_ids(folder) == {checkpoint_id}
    remove_generation(folder, checkpoint_id)
    assert given_up_ids(folder) == set()
    assert generation_ids(folder) == []


def test_a_file_in_memory_is_whole_when_it_has_its_name(folder: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    rename = NodeFolder.rename

    def looking(self: NodeFolder, name: str, new: str) -> None:
        found.append((self.path / name).stat().st_size)
        rename(self, name, new)

    monkeypatch.setattr(NodeFolder, "rename", looking)
    folder.write("file", bytes(100))
    folder.write("file", bytes(70))
    assert found == [100, 70]
    assert folder.names() == ["file"]


def test_all_memory_is_reserved_where_there_are_no_huge_pages(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "collapse_pages", lambda *_: None)
    with Slot.create(folder, rank=0, nbytes=3 << 20) as slot:
        assert not slot.is_reserved
        slot.reserve()
        assert slot.is_reserved
