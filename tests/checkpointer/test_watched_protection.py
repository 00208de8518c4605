"""A watched save learns whether other nodes protect it, when it has ended otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.checkpointer.events import SaveBegun, SaveUnprotected
from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.save_errors import replaced_unprotected
from holdfast.checkpointer.save_log import SaveLog
from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.checkpointer.watcher import Watcher
from holdfast.errors import DeadlineError, StorageError
from holdfast.node_memory.generations import mark_protected
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.peering import note_peer_trouble, note_trouble_elsewhere
from holdfast.run.history import Run
from holdfast.store.posix import PosixStore
from tests.keeper.test_persist import CHECKPOINT, Saved
from tests.support.keepers import end_keepers
from tests.support.nursery import until


class Watched:
    """A committed save of rank 0 that is to be protected, and its watcher."""

    def __init__(self, path: Path, stack: ExitStack, *, has_slot: bool = True) -> None:
        run = Run.create(PosixStore(str(path / "run")))
        self.folder = stack.enter_context(NodeFolder(run.storage.location.url, node_dir=path))
        self.saved = Saved(run, [self.folder, self.folder], stack)
        self.watcher = Watcher(run.storage.location, path, rank=0)
        stack.callback(self.watcher.close)
        self.watcher.memory.opened(num_slots=2)
        self.handle = self.add(7, has_slot=has_slot)

    def add(self, step: int, *, has_slot: bool) -> Handle:
        handle = Handle(step)
        machine = SaveMachine(step, handle.hear)
        machine.put(self.saved.generation.place)
        machine.stage(8)
        machine.commit()
        self.watcher.add(machine, CHECKPOINT, self.saved.slots[0] if has_slot else None)
        return handle


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[ExitStack]:
    with ExitStack() as stack:
        stack.callback(end_keepers, tmp_path)
        yield stack


def test_a_save_that_is_durable_is_told_later_that_it_is_protected(tmp_path: Path, stack: ExitStack) -> None:
    watched = Watched(tmp_path, stack)
    watched.watcher.begin()
    assert not watched.handle.protected.is_over
    mark_protected(watched.folder, CHECKPOINT)
    watched.handle.protected.wait(10)


def test_the_wait_for_protection_does_not_keep_memory_and_ends_with_the_slot(tmp_path: Path, stack: ExitStack) -> None:
    watched = Watched(tmp_path, stack)
    watched.watcher.memory.retire()
    watched.watcher.memory.opened(num_slots=2)  # raised, because the save was still watched
    watched.saved.slots[0].close()
    watched.watcher.begin()
    with pytest.raises(StorageError, match="replaced in memory") as caught:
        watched.handle.protected.wait(10)
    assert caught.value.code == "storage.unprotected"


def test_a_wait_for_protection_in_vain_says_why_the_last_try_failed(tmp_path: Path, stack: ExitStack) -> None:
    """It said: read the log of the keeper."""
    watched = Watched(tmp_path, stack)
    note_peer_trouble(watched.folder, "[storage.peer] the keeper at 10.0.3.17:41735 did not answer")
    watched.watcher.begin()
    until(lambda: bool(watched.handle.protected.trouble))
    with pytest.raises(DeadlineError, match=r"to protect a snapshot failed: .* 10\.0\.3\.17:41735 did not"):
        watched.handle.protected.wait(0.001)
    mark_protected(watched.folder, CHECKPOINT)
    watched.handle.protected.wait(30)


def test_a_wait_for_protection_in_vain_says_why_another_node_cannot_be_protected(
    tmp_path: Path, stack: ExitStack
) -> None:
    """Ranks of nodes whose own copies were kept were told to read the log of the keeper."""
    watched = Watched(tmp_path, stack)
    note_trouble_elsewhere(watched.folder, "the keeper at 10.0.3.18:40001 says: there is no room")
    watched.watcher.begin()
    until(lambda: bool(watched.handle.protected.trouble))
    with pytest.raises(DeadlineError, match=r"10\.0\.3\.18:40001 says: there is no room"):
        watched.handle.protected.wait(0.001)


def test_the_first_rank_logs_a_save_that_was_not_protected(caplog: pytest.LogCaptureFixture) -> None:
    for is_first_rank in (True, False):
        log = SaveLog(Handle(7))
        log.hear(SaveBegun(7, "node memory", is_first_rank, memory_only=False))
        log.hear(SaveUnprotected(7, replaced_unprotected(7, "node 3 is away")))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "node 3 is away" in caplog.text


def test_a_rank_without_a_part_waits_for_the_protection_of_its_last_save_alone(
    tmp_path: Path, stack: ExitStack
) -> None:
    watched = Watched(tmp_path, stack, has_slot=False)
    newer = watched.add(8, has_slot=False)
    assert watched.handle.protected.error is not None
    assert not newer.protected.is_over
