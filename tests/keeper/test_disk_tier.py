"""Data files that go to a disk of the node first, and from there to the run, whatever becomes of memory and keeper."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event

import pytest

from holdfast.keeper import disk_tier
from holdfast.keeper.daemon import Keeper
from holdfast.node_disk.disk_folder import DiskPart, found_parts, use_disk
from holdfast.node_memory.generations import give_up_generation
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.noted_disks import NotedDisk
from holdfast.node_memory.slots import SlotRecord, SlotState
from holdfast.run.history import Run
from holdfast.store.base import Location
from tests.keeper import test_keeper
from tests.keeper.test_keeper_promises import Later, looked
from tests.keeper.test_persist import Saved, assert_loads
from tests.store.test_posix_storage import mounted
from tests.support.nursery import until

run, folder = test_keeper.run, test_keeper.folder


@pytest.fixture
def disk(tmp_path: Path, run: Run, folder: NodeFolder) -> Path:
    """A folder on the disk of the node, as a trainer has noted it."""
    root = tmp_path / "disk"
    use_disk(folder, root, run.storage.location)
    return root


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def saved(run: Run, folder: NodeFolder, disk: Path, stack: ExitStack) -> Saved:
    """A checkpoint of two ranks of this node, staged, which goes to the disk first."""
    return Saved(run, [folder, folder], stack, disk=str(disk))


class Away:
    """The run's folder, which is renamed while its store does not answer."""

    def __init__(self, run: Run) -> None:
        self.path = Path(run.storage.location.url)
        self._elsewhere = self.path.with_name("elsewhere")
        self.path.rename(self._elsewhere)

    def comes_back(self) -> None:
        self._elsewhere.rename(self.path)


def keeper_of(folder: NodeFolder, stack: ExitStack) -> Keeper:
    keeper = Keeper(folder)
    stack.callback(keeper.close)
    return keeper


def until_in(keeper: Keeper, saved: Saved | Later, state: SlotState) -> None:
    until(lambda: looked(keeper) and {slot.refresh().state for slot in saved.slots} == {state})


def free(saved: Saved | Later) -> None:
    """Fill the slots anew, as the next save does, and then give them up, so that memory has the checkpoint no more."""
    for slot in saved.slots:
        assert slot.take()
        slot.advance(SlotRecord(SlotState.WRITING))
        slot.data[:] = 0xCD
        slot.advance(SlotRecord(SlotState.FREE))


def parts(disk: Path, run: Run) -> dict[int, DiskPart]:
    """By step, the parts on the disk."""
    return {part.generation.step: part for part in found_parts(NotedDisk(str(disk), run.storage.location.url))}


def file_bytes(root: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in root.rglob("*.safetensors")}


def committed(run: Run) -> list[int]:
    return [run.commit(place).step for place in run.places()]


def test_while_the_run_is_away_slots_become_free_for_the_next_save_and_then_all_is_drained(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack
) -> None:
    away = Away(run)
    keeper = keeper_of(folder, stack)
    until_in(keeper, saved, SlotState.ON_DISK)
    assert keeper.owes
    until(lambda: looked(keeper) and all("no holdfast run" in slot.refresh().error for slot in saved.slots))
    free(saved)
    away.comes_back()
    until(lambda: looked(keeper) and not keeper.owes)
    assert_loads(run, saved)
    assert file_bytes(disk) == file_bytes(Path(run.storage.location.url))
    assert parts(disk, run)[7].is_drained


def test_a_slot_that_still_holds_what_the_run_got_from_the_disk_is_committed(
    run: Run, saved: Saved, folder: NodeFolder, stack: ExitStack
) -> None:
    until_in(keeper_of(folder, stack), saved, SlotState.COMMITTED)
    assert_loads(run, saved)


def test_checkpoints_are_drained_in_order_by_a_keeper_that_finds_nothing_but_the_disk(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack, tmp_path: Path
) -> None:
    away = Away(run)
    first = Keeper(folder)
    laters = [Later(saved, folder, stack)]
    laters.append(Later(laters[0], folder, stack))
    checkpoints: list[Saved | Later] = [saved, *laters]
    for each in checkpoints:
        until_in(first, each, SlotState.ON_DISK)
    first.close()
    shutil.rmtree(folder.path)  # the node went down
    away.comes_back()
    (tmp_path / "later").mkdir()
    with NodeFolder(str(tmp_path / "run"), node_dir=tmp_path / "later") as again:
        use_disk(again, disk, run.storage.location)
        keeper = keeper_of(again, stack)
        seen: list[int] = []

        def all_is_drained() -> bool:
            keeper.look()
            seen.extend(sorted(set(committed(run)) - set(seen)))
            return not keeper.owes

        until(all_is_drained)
        keeper.close()
    assert seen == [7, 8, 9]
    assert sorted(parts(disk, run)) == [8, 9]  # the newest two stay


def test_a_file_that_the_disk_has_damaged_goes_to_the_run_from_memory(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack
) -> None:
    away = Away(run)
    keeper = keeper_of(folder, stack)
    until_in(keeper, saved, SlotState.ON_DISK)
    flip(next(iter(disk.rglob("*.safetensors"))))
    away.comes_back()
    until_in(keeper, saved, SlotState.COMMITTED)
    assert_loads(run, saved)


def test_a_file_that_is_damaged_and_has_no_other_copy_is_never_brought_to_the_run(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    away = Away(run)
    keeper = keeper_of(folder, stack)
    until_in(keeper, saved, SlotState.ON_DISK)
    later = Later(saved, folder, stack)
    until_in(keeper, later, SlotState.ON_DISK)
    free(saved)
    flip(parts_file(parts(disk, run)[7]))
    away.comes_back()
    until_in(keeper, later, SlotState.COMMITTED)
    assert committed(run) == [8]
    assert "has changed on the disk of this node" in caplog.text
    assert sorted(parts(disk, run)) == [8]  # the run has a newer one, so the damaged one is of no use


def parts_file(part: DiskPart) -> Path:
    return next(iter(Path(part.store.path(part.key("x"))).parent.glob("*.safetensors")))


def flip(path: Path) -> None:
    """Flip a bit of the last byte of a file."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def test_what_another_job_has_fenced_is_not_committed_and_stays_until_the_run_has_something_newer(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack
) -> None:
    away = Away(run)
    keeper = keeper_of(folder, stack)
    until_in(keeper, saved, SlotState.ON_DISK)
    away.comes_back()
    run.open_epoch(after=1, opened_from=None, why="takeover", world_size=1)
    until_in(keeper, saved, SlotState.FENCED)
    assert committed(run) == []
    assert not keeper.owes
    assert sorted(parts(disk, run)) == [7]


def test_a_checkpoint_that_the_ranks_gave_up_leaves_the_disk(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack
) -> None:
    Away(run)
    keeper = keeper_of(folder, stack)
    until_in(keeper, saved, SlotState.ON_DISK)
    give_up_generation(folder, saved.generation.checkpoint_id)
    until_in(keeper, saved, SlotState.FREE)
    until(lambda: looked(keeper) and not keeper.owes)
    assert parts(disk, run) == {}
    assert list(disk.rglob("*.safetensors")) == []


def test_a_full_disk_gives_up_what_the_run_has_and_never_what_it_lacks(
    run: Run, folder: NodeFolder, stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_tier, "NUM_KEPT", 9)
    root = stack.enter_context(mounted(tmp_path / "small", "tmpfs", "size=2800k"))  # two checkpoints of 1.2 MB
    use_disk(folder, root, run.storage.location)
    keeper = keeper_of(folder, stack)
    checkpoints: list[Saved | Later] = [Saved(run, [folder, folder], stack, disk=str(root))]
    until_in(keeper, checkpoints[0], SlotState.COMMITTED)
    checkpoints.append(Later(checkpoints[0], folder, stack))
    until_in(keeper, checkpoints[1], SlotState.COMMITTED)
    away = Away(run)
    checkpoints.append(Later(checkpoints[1], folder, stack))
    until_in(keeper, checkpoints[2], SlotState.ON_DISK)
    assert sorted(parts(root, run)) == [8, 9]  # the oldest made room
    checkpoints.append(Later(checkpoints[2], folder, stack))
    until_in(keeper, checkpoints[3], SlotState.ON_DISK)
    assert sorted(parts(root, run)) == [9, 10]
    checkpoints.append(Later(checkpoints[3], folder, stack))
    # Both files are tried at the run at once, which is away.
    until(lambda: looked(keeper) and all("no holdfast run" in slot.refresh().error for slot in checkpoints[4].slots))
    assert sorted(parts(root, run)) == [9, 10]
    away.comes_back()
    until_in(keeper, checkpoints[4], SlotState.COMMITTED)  # from memory
    until(lambda: looked(keeper) and not keeper.owes)
    assert sorted(committed(run)) == [7, 8, 9, 10, 11]


def test_the_remains_of_an_interrupted_removal_are_removed_by_the_next_keeper(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack
) -> None:
    keeper = Keeper(folder)
    until_in(keeper, saved, SlotState.COMMITTED)
    keeper.close()
    (part,) = parts(disk, run).values()
    for name in ("data-00000.safetensors", "data-00001.safetensors", "manifest.hfm"):
        part.store.delete(part.key(name))
    keeper_of(folder, stack).look()
    assert [path for path in disk.rglob("*") if path.is_file()] == []


def test_another_users_folder_is_not_used_and_the_files_go_to_the_run_at_once(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = disk / run.run_id
    theirs.mkdir(mode=0o700)
    os.chown(theirs, 4242, 4242)
    until_in(keeper_of(folder, stack), saved, SlotState.COMMITTED)
    assert_loads(run, saved)
    assert "it belongs to user 4242" in caplog.text
    assert list(theirs.iterdir()) == []


def test_the_parts_of_another_run_in_the_same_folder_are_left_alone(
    run: Run, saved: Saved, folder: NodeFolder, disk: Path, stack: ExitStack, tmp_path: Path
) -> None:
    away = Away(run)
    keeper = Keeper(folder)
    until_in(keeper, saved, SlotState.ON_DISK)
    keeper.close()
    (tmp_path / "others").mkdir()
    with NodeFolder("other", node_dir=tmp_path / "others") as others:
        use_disk(others, disk, Location(str(tmp_path / "other")))
        keeper = keeper_of(others, stack)
        keeper.look()
        assert not keeper.owes
    assert sorted(parts(disk, run)) == [7]
    away.comes_back()


def test_a_slow_store_does_not_hold_up_the_writing_to_the_disk(
    run: Run, saved: Saved, folder: NodeFolder, stack: ExitStack
) -> None:
    """Uploads and writes to the disk have threads of their own."""
    keeper = keeper_of(folder, stack)
    answers = Event()
    uploads = [keeper._writers.submit(answers.wait) for _ in range(4)]
    until_in(keeper, saved, SlotState.ON_DISK)
    assert not any(upload.done() for upload in uploads)
    answers.set()
    until_in(keeper, saved, SlotState.COMMITTED)
    assert_loads(run, saved)
