"""Mishaps of the disk of a node and of what lies on it: none deletes what the run lacks, or holds up other
checkpoints."""

from __future__ import annotations

import errno
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import StorageError
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.keeper.disk_tier import DiskTier
from holdfast.node_disk.disk_folder import part_of, use_disk
from holdfast.node_memory.generations import Generation
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import SlotState
from holdfast.run.history import Run
from holdfast.run.removal import remove_place
from holdfast.store.base import Bytes
from holdfast.store.posix import PosixReader
from tests.keeper import test_disk_tier
from tests.keeper.test_disk_tier import Away, committed, free, keeper_of, parts, parts_file, until_in
from tests.keeper.test_keeper_promises import Later, looked
from tests.keeper.test_persist import Saved, assert_loads
from tests.support.nursery import until

run, folder, disk = test_disk_tier.run, test_disk_tier.folder, test_disk_tier.disk
stack, saved = test_disk_tier.stack, test_disk_tier.saved


def owed(run: Run, saved: Saved | Later, folder: NodeFolder) -> None:
    """Have a keeper write a checkpoint to the disk while the run is away, and end. Memory has it no more then."""
    away = Away(run)
    with ExitStack() as stack:
        until_in(keeper_of(folder, stack), saved, SlotState.ON_DISK)
        free(saved)
    away.comes_back()


def at_epoch(saved: Saved, number: int) -> Generation:
    """The generation of a checkpoint in another epoch."""
    id_ = f"{number:016x}"
    folder = records.folder_name(7, id_)
    return msgspec.structs.replace(saved.generation, place=Place(number, 1), checkpoint_id=id_, folder=folder)


def files_of(run: Run) -> list[str]:
    return sorted(path.name for path in Path(run.storage.location.url).rglob("checkpoints/*/*"))


@pytest.mark.slow
def test_a_lost_manifest_on_the_disk_does_not_delete_the_data_beside_it(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack
) -> None:
    owed(run, saved, folder)
    (part,) = parts(disk, run).values()
    part.store.delete(part.key("manifest.hfm"))
    keeper = keeper_of(folder, stack)
    until(lambda: looked(keeper) and not keeper.owes)
    assert_loads(run, saved)


@pytest.mark.parametrize("seal", [b"", b"{}", b"torn"])
def test_a_seal_on_the_disk_that_is_none_does_not_keep_the_checkpoint_from_the_run(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack, seal: bytes
) -> None:
    owed(run, saved, folder)
    (part,) = parts(disk, run).values()
    part.store.create(part.key("seal.json"), seal)
    keeper = keeper_of(folder, stack)
    until(lambda: looked(keeper) and bool(committed(run)) and not keeper.owes)
    assert_loads(run, saved)
    assert parts(disk, run)[7].is_drained


def test_a_file_that_the_disk_cannot_read_does_not_hold_up_newer_checkpoints(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Away(run)
    with ExitStack() as first:
        until_in(keeper_of(folder, first), saved, SlotState.ON_DISK)
    later = Later(saved, folder, stack)
    free(saved)
    away.comes_back()
    bad, read_at = str(parts_file(parts(disk, run)[7])), PosixReader.read_at

    def failing(self: PosixReader, offset: int, out: Bytes) -> None:
        if self._path == bad and bad:
            raise StorageError(f"cannot read {bad}: {os.strerror(errno.EIO)}.", code="storage.io", action="", path=bad)
        read_at(self, offset, out)

    monkeypatch.setattr(PosixReader, "read_at", failing)
    keeper = keeper_of(folder, stack)
    until_in(keeper, later, SlotState.COMMITTED)
    assert sorted(parts(disk, run)) == [7, 8]
    assert keeper.owes
    bad = ""  # the device works again
    keeper._retries.clear()
    until(lambda: looked(keeper) and not keeper.owes)
    assert sorted(committed(run)) == [7, 8]


def test_a_file_that_the_store_has_damaged_does_not_hold_up_newer_checkpoints(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack
) -> None:
    away = Away(run)
    with ExitStack() as first:
        until_in(keeper_of(folder, first), saved, SlotState.ON_DISK)
    later = Later(saved, folder, stack)
    free(saved)
    away.comes_back()
    run.storage.create(f"checkpoints/{saved.generation.folder}/data-00001.safetensors", b"what is this?")
    until_in(keeper_of(folder, stack), later, SlotState.COMMITTED)
    assert committed(run) == [8]
    assert sorted(parts(disk, run)) == [7, 8]


def test_a_commit_whose_files_came_from_memory_alone_is_not_written_again_and_again(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack
) -> None:
    # A keeper was killed before it wrote the first data file, and for the next one the disk is full.
    part_of(disk, run.run_id, saved.generation).begin()
    keeper = keeper_of(folder, stack)
    keeper._disks.meet()
    keeper._disks._refused = {slot.name: saved.generation.checkpoint_id for slot in saved.slots}
    until_in(keeper, saved, SlotState.COMMITTED)
    until(lambda: looked(keeper) and not keeper.owes)
    assert parts(disk, run)[7].is_drained


def test_the_run_gets_no_file_of_an_abandoned_future(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack
) -> None:
    owed(run, saved, folder)
    run.open_epoch(after=1, opened_from=None, why="takeover", world_size=1)
    keeper = keeper_of(folder, stack)
    until(lambda: looked(keeper) and not keeper.owes)
    assert files_of(run) == []


def test_the_run_gets_no_file_of_a_checkpoint_that_was_removed_from_it(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack
) -> None:
    with ExitStack() as first:
        keeper = keeper_of(folder, first)
        until_in(keeper, saved, SlotState.COMMITTED)
        until_in(keeper, Later(saved, folder, stack), SlotState.COMMITTED)
    part = parts(disk, run)[7]
    part.store.delete(part.key("seal.json"))  # as if the node had gone down just before it was written
    remove_place(run, part.place, saved.generation.folder)
    before = files_of(run)
    keeper = keeper_of(folder, stack)
    until(lambda: looked(keeper) and not keeper.owes)
    assert files_of(run) == before


def test_files_of_a_keeper_that_was_killed_before_the_generation_was_there_do_not_stay_forever(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack
) -> None:
    part = part_of(disk, run.run_id, saved.generation)
    part.begin()
    part.store.delete(f"generations/{part.checkpoint_id}")
    left = [
        disk / run.run_id / "generations" / ".tmp-0123456789abcdef",
        Path(part.store.path(part.key("manifest.hfm"))),
    ]
    left[0].touch()
    for path in (*left, left[1].parent):
        os.utime(path, (1e9, 1e9))
    shutil.rmtree(folder.path)
    with NodeFolder(str(run.storage.location), node_dir=folder.node_dir) as again:
        use_disk(again, disk, run.storage.location)
        keeper_of(again, stack).look()
    assert [path for path in disk.rglob("*") if path.is_file()] == []
    assert list(disk.glob("*/checkpoints/*")) == []


def test_parts_of_a_run_that_was_there_before_do_not_take_the_place_of_those_of_this_run(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack
) -> None:
    tier = DiskTier(folder)
    stack.callback(tier.close)
    old = [part_of(disk, "f" * 32, at_epoch(saved, number)) for number in (8, 9)]
    new = [part_of(disk, run.run_id, at_epoch(saved, number)) for number in (1, 2)]
    for part in (*old, *new):
        part.begin()
    tier._parts = {part.checkpoint_id: part for part in (*old, *new)}
    tier._drained = {part.checkpoint_id for part in old}
    for part in new:
        tier.note(part.checkpoint_id, SlotState.COMMITTED, b"{}")
    assert sorted(path.name for path in disk.glob("*/generations/*")) == [part.checkpoint_id for part in new]
