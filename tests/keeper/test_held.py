"""Snapshots of saves to memory alone, as keepers treat them: held while trainers live, then made durable."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import msgspec
import pytest

from holdfast.keeper import daemon
from holdfast.keeper.daemon import Keeper
from holdfast.node_memory.claims import Claim
from holdfast.node_memory.generations import generation_ids, give_up_generation
from holdfast.node_memory.inventory import give_way, node_memory
from holdfast.node_memory.keeper_lock import is_kept
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import SlotRecord, SlotState
from holdfast.run.history import Run
from tests.keeper import test_keeper
from tests.keeper.test_keeper import states
from tests.keeper.test_keeper_promises import Later, looked
from tests.keeper.test_persist import Saved, assert_loads
from tests.support.nursery import until

run, folder, started = test_keeper.run, test_keeper.folder, test_keeper.started


@pytest.fixture
def held(run: Run, folder: NodeFolder) -> Iterator[Saved]:
    """A checkpoint of two ranks of this node, staged, which is to stay in memory."""
    with ExitStack() as stack:
        yield Saved(run, [folder, folder], stack, memory_only=True)


@pytest.fixture
def keeper(folder: NodeFolder) -> Iterator[Keeper]:
    keeper = Keeper(folder)
    yield keeper
    keeper.close()


def test_it_is_held_as_long_as_a_trainer_lives_and_then_committed(
    run: Run, held: Saved, folder: NodeFolder, keeper: Keeper
) -> None:
    with Claim(folder, 0):
        until(lambda: looked(keeper) and states(held) == {SlotState.HELD})
        for _ in range(5):
            keeper.look()
            time.sleep(0.05)
        assert states(held) == {SlotState.HELD}
        assert not keeper.owes
        assert not list(run.places())
    until(lambda: looked(keeper) and states(held) == {SlotState.COMMITTED})
    assert_loads(run, held)


def test_a_keeper_that_is_told_to_end_makes_it_durable_first_if_no_trainer_lives(
    run: Run, held: Saved, folder: NodeFolder, started: Callable[..., subprocess.Popen[bytes]]
) -> None:
    """On another node the trainers may live, and will not make their part durable: no save could fill its slot any
    more."""
    with Claim(folder, 0):
        keeper = started()
        until(lambda: states(held) == {SlotState.HELD})
        keeper.send_signal(signal.SIGTERM)
        assert keeper.wait(30) == 0
        assert states(held) == {SlotState.HELD}
        keeper = started()
        until(lambda: is_kept(folder))
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(30) == 0
    assert states(held) == {SlotState.COMMITTED}
    assert_loads(run, held)


def test_a_process_that_only_looks_at_memory_does_not_put_it_off(
    held: Saved, folder: NodeFolder, keeper: Keeper
) -> None:
    with Claim(folder):
        until(lambda: looked(keeper) and states(held) == {SlotState.COMMITTED})
        assert states(held) == {SlotState.COMMITTED}


def test_a_part_of_one_that_is_older_than_a_durable_one_is_freed(
    held: Saved, folder: NodeFolder, keeper: Keeper
) -> None:
    """Another node had freed its part: this one stayed for a day, and no save could fill its slot."""
    with ExitStack() as stack:
        with Claim(folder, 0):
            until(lambda: looked(keeper) and states(held) == {SlotState.HELD})
        later = Later(held, folder, stack)
        held.slots[0].promote(held.generation.checkpoint_id)
        assert held.slots[1].take()
        held.slots[1].advance(SlotRecord(SlotState.FREE))
        until(lambda: looked(keeper) and {slot.refresh().state for slot in later.slots} == {SlotState.COMMITTED})
        until(lambda: looked(keeper) and states(held) == {SlotState.FREE})


def test_where_a_part_of_the_newest_is_missing_the_one_before_it_becomes_durable(
    run: Run, held: Saved, folder: NodeFolder, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon, "PATIENCE_S", 0.5)
    with ExitStack() as stack:
        with Claim(folder, 0):
            later = Later(held, folder, stack)
            for slot in later.slots:
                assert slot.record.contents is not None
                assert slot.record.contents.memory_only
            later.slots[1].advance(SlotRecord(SlotState.FREE))  # that rank died while it copied
            until(lambda: looked(keeper) and later.slots[0].refresh().state == SlotState.HELD)
        until(lambda: looked(keeper) and states(held) == {SlotState.COMMITTED})
        assert later.slots[0].refresh().state == SlotState.SEALED
        assert not keeper._waits_long(held.generation.checkpoint_id)
    assert_loads(run, held)


def test_one_whose_bytes_have_changed_since_is_not_made_durable_but_the_one_before_it(
    run: Run, held: Saved, folder: NodeFolder, keeper: Keeper
) -> None:
    """The keeper committed it as the head, and no restore could read it."""
    with ExitStack() as stack:
        with Claim(folder, 0):
            later = Later(held, folder, stack)
            until(lambda: looked(keeper) and {slot.refresh().state for slot in later.slots} == {SlotState.HELD})
        for slot in later.slots:
            slot.data[5000] ^= 1
        until(lambda: looked(keeper) and states(held) == {SlotState.COMMITTED})
        assert {slot.refresh().state for slot in later.slots} == {SlotState.FREE}
    assert_loads(run, held)


def test_an_older_one_goes_when_the_newest_is_durable(
    run: Run, held: Saved, folder: NodeFolder, keeper: Keeper
) -> None:
    with ExitStack() as stack:
        with Claim(folder, 0):
            later = Later(held, folder, stack)
            until(lambda: looked(keeper) and states(held) == {SlotState.HELD})
        until(lambda: looked(keeper) and states(held) == {SlotState.FREE})
        assert {slot.refresh().state for slot in later.slots} == {SlotState.COMMITTED}
        assert [run.commit(place).step for place in run.places()] == [8]


def test_one_that_can_never_be_whole_is_freed_while_trainers_live(
    held: Saved, folder: NodeFolder, keeper: Keeper
) -> None:
    with Claim(folder, 0):
        until(lambda: looked(keeper) and states(held) == {SlotState.HELD})
        give_up_generation(folder, held.generation.checkpoint_id)
        until(lambda: looked(keeper) and states(held) == {SlotState.FREE})
        until(lambda: looked(keeper) and not generation_ids(folder))


def test_it_gives_way_to_nobody(held: Saved, folder: NodeFolder, keeper: Keeper) -> None:
    with Claim(folder, 0):
        until(lambda: looked(keeper) and states(held) == {SlotState.HELD})
    assert give_way(folder.node_dir) == []  # the trainer is dead, and no keeper has looked yet
    (found,) = node_memory(folder.node_dir)
    assert [(slot.is_durable, slot.is_freeable) for slot in found.slots] == [(False, False)] * 2


def test_a_slot_that_another_process_is_taking_is_not_promoted(held: Saved, folder: NodeFolder, keeper: Keeper) -> None:
    with Claim(folder, 0):
        until(lambda: looked(keeper) and states(held) == {SlotState.HELD})
    slot = held.slots[0]
    assert slot.take()
    contents = slot.record.contents
    slot.advance(msgspec.structs.replace(slot.record, state=SlotState.WRITING))
    until(lambda: looked(keeper) and held.slots[1].refresh().state == SlotState.SEALED)
    assert slot.refresh() == SlotRecord(SlotState.WRITING, contents, slot.record.digest)
