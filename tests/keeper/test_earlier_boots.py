"""Snapshots on a disk that were copied before the node went down: only what agrees with its digests becomes durable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from holdfast.keeper.daemon import Keeper
from holdfast.keeper.persist import Sealing
from holdfast.node_memory import slots
from holdfast.node_memory.node_folder import NodeFolder, boot_id
from holdfast.node_memory.slots import SlotState
from holdfast.run.history import Run
from tests.keeper import test_keeper
from tests.keeper.test_keeper import states
from tests.keeper.test_keeper_promises import looked
from tests.keeper.test_persist import Saved, assert_loads
from tests.support.nursery import until

run, folder = test_keeper.run, test_keeper.folder

EARLIER = "the boot before"


@pytest.fixture
def keeper(folder: NodeFolder) -> Iterator[Keeper]:
    keeper = Keeper(folder)
    yield keeper
    keeper.close()


@pytest.fixture
def staged(run: Run, folder: NodeFolder) -> Iterator[Saved]:
    """A checkpoint of two ranks that was copied in the boot before, and not hashed there."""
    with ExitStack() as stack:
        yield Saved(run, [folder, folder], stack, boot=EARLIER)


@pytest.fixture
def sealed(staged: Saved) -> Saved:
    """A checkpoint of two ranks that was copied and hashed in the boot before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "boot_id", lambda: EARLIER)
        for slot in staged.slots:
            Sealing(staged.generation).seal(slot)
    return staged


def test_what_was_not_hashed_is_given_up(
    run: Run, staged: Saved, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    until(lambda: looked(keeper) and states(staged) == {SlotState.FREE})
    assert not list(run.places())
    assert "step 7 was not hashed before this node went down" in caplog.text


def test_what_was_hashed_and_is_whole_is_committed(run: Run, sealed: Saved, keeper: Keeper) -> None:
    until(lambda: looked(keeper) and states(sealed) == {SlotState.COMMITTED})
    assert_loads(run, sealed)


def test_what_was_hashed_and_did_not_reach_the_disk_is_given_up(
    run: Run, sealed: Saved, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    """The keeper wrote it to storage with the digests of what had been there, and committed it."""
    contents = sealed.slots[1].record.contents
    assert contents is not None
    sealed.slots[1].data[contents.data_start : contents.data_start + 4096] = 0
    until(lambda: looked(keeper) and sealed.slots[1].refresh().state == SlotState.FREE)
    until(lambda: looked(keeper) and sealed.slots[0].refresh().error == "")
    assert not list(run.places())
    assert "step 7 has changed in the memory of this node" in caplog.text


def test_what_was_copied_in_this_boot_is_not_hashed_twice(
    run: Run, folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sealing, "check", None)
    with ExitStack() as stack:
        saved = Saved(run, [folder, folder], stack, boot=boot_id())
        Sealing(saved.generation).seal(saved.slots[0])
        keeper = Keeper(folder)
        stack.callback(keeper.close)
        until(lambda: looked(keeper) and states(saved) == {SlotState.COMMITTED})
        assert_loads(run, saved)
