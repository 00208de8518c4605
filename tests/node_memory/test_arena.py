"""The arena of a rank: prepared in the background, reused, never overwriting what is needed."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigurationError
from holdfast.format.records import Place
from holdfast.node_memory import arena as arena_module
from holdfast.node_memory import file_locks
from holdfast.node_memory.arena import Arena
from holdfast.node_memory.claims import is_claimed
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot, SlotRecord, SlotState, slot_names
from tests.node_memory.test_slots import filled
from tests.store.test_posix_storage import mounted

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _little_is_left_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_SPARE_NBYTES", 8 * MIB)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "shm", "tmpfs", "size=256m") as memory:
        yield memory


@pytest.fixture
def folder(memory: Path) -> Iterator[NodeFolder]:
    with NodeFolder("run", node_dir=memory) as folder:
        yield folder


def ready(folder: NodeFolder, nbytes: int, *, rank: int = 3, num_slots: int = 2) -> Arena:
    arena = Arena(folder, rank=rank, num_slots=num_slots)
    arena.prepare(nbytes)
    assert arena.wait(60)
    return arena


def some(slot: Slot | None) -> Slot:
    assert slot is not None
    return slot


def test_slots_are_there_with_their_memory_when_it_is_ready(folder: NodeFolder) -> None:
    arena = ready(folder, 10 * MIB)
    assert arena.is_ready
    assert arena.seconds > 0
    sizes = [(folder.path / name).stat().st_blocks * 512 for name in slot_names(folder, rank=3)]
    assert len(sizes) == 2
    assert all(10 * MIB <= size <= 10 * MIB + 8192 for size in sizes)
    arena.close()


def test_memory_survives_the_process_and_is_used_again(folder: NodeFolder, memory: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from holdfast.node_memory.node_folder import NodeFolder;"
        "from holdfast.node_memory import arena; arena._SPARE_NBYTES = 0;"
        "arena = arena.Arena(NodeFolder('run', node_dir=Path(sys.argv[1])), rank=3, num_slots=2);"
        "arena.prepare(10 << 20); arena.wait(); [slot.data.fill(7) for slot in arena._slots]"
    )
    subprocess.run([sys.executable, "-c", script, str(memory)], check=True)
    names = slot_names(folder)
    arena = ready(folder, 9 * MIB)
    assert slot_names(folder) == names
    assert (some(arena.take(None)).data == 7).all()
    arena.close()


def test_of_two_generations_the_older_is_filled_again_when_all_ranks_hold_the_newer(folder: NodeFolder) -> None:
    arena = ready(folder, MIB)
    first = filled(some(arena.take(None)), SlotState.COMMITTED, seq=1)
    second = filled(some(arena.take(None)), SlotState.SEALED, seq=2)
    assert arena.newest_sealed() == Place(1, 2)
    assert arena.take(Place(1, 1)) is None  # another rank holds no more than the first
    assert arena.take(None) is first  # another rank holds nothing, so no checkpoint is whole in memory
    assert arena.take(Place(1, 2)) is first
    filled(first, SlotState.STAGED, seq=3)
    assert arena.take(Place(1, 2)) is None  # nothing is free: the second is the newest that is whole
    assert arena.newest_sealed() == Place(1, 2)
    assert second.state == SlotState.SEALED
    arena.close()


def test_a_held_snapshot_is_filled_again_when_all_ranks_hold_a_newer_one(folder: NodeFolder) -> None:
    arena = ready(folder, MIB)
    first = filled(some(arena.take(None)), SlotState.HELD, seq=1)
    filled(some(arena.take(None)), SlotState.HELD, seq=2)
    assert arena.newest_sealed() == Place(1, 2)
    assert arena.take(Place(1, 1)) is None  # another rank holds no more than the first
    assert arena.take(Place(1, 2)) is first
    arena.close()


def test_a_part_of_a_checkpoint_that_was_given_up_protects_nothing(folder: NodeFolder) -> None:
    """Another rank had no part of it, and no keeper had freed it yet: the last whole checkpoint was filled again."""
    arena = ready(folder, MIB)
    filled(some(arena.take(None)), SlotState.HELD, seq=1)
    filled(some(arena.take(None)), SlotState.HELD, seq=2)
    arena.is_given_up = lambda contents: contents.place == Place(1, 2)
    assert arena.newest_sealed() == Place(1, 1)
    arena.close()


def test_a_save_that_failed_here_while_its_keeper_committed_it_takes_no_slot_for_good(folder: NodeFolder) -> None:
    """Neither slot could be filled any more: the newest one that counted was in the one, a newer one in the other."""
    arena = ready(folder, MIB)
    filled(some(arena.take(None)), SlotState.COMMITTED, seq=1)
    second = filled(some(arena.take(None)), SlotState.COMMITTED, seq=2)
    assert arena.take(Place(1, 1)) is None
    arena.is_given_up = lambda contents: contents.place == Place(1, 2)
    assert arena.oldest() == (True, Place(1, 1))
    assert arena.take(Place(1, 1)) is second
    arena.close()


def test_what_is_not_committed_yet_is_never_filled_again(folder: NodeFolder) -> None:
    arena = ready(folder, MIB)
    filled(some(arena.take(None)), SlotState.SEALED, seq=1)
    filled(some(arena.take(None)), SlotState.SEALED, seq=2)
    assert arena.take(Place(1, 2)) is None
    arena.close()


def test_before_a_first_save_there_is_room_only_where_a_slot_is_free_or_yet_to_be_made(folder: NodeFolder) -> None:
    # A restarted job took a slot for granted, and found one committed and one that was not durable yet.
    arena = ready(folder, MIB)
    filled(some(arena.take(None)), SlotState.COMMITTED, seq=1)
    filled(some(arena.take(None)), SlotState.SEALED, seq=2)
    arena.close()
    assert Arena(folder, rank=3, num_slots=2).oldest() == (False, Place(1, 1))
    again = ready(folder, MIB, num_slots=2)
    assert again.oldest() == (False, Place(1, 1))
    again.close()
    assert Arena(folder, rank=3, num_slots=3).oldest() == (True, Place(1, 1))


def test_the_first_slot_can_be_filled_while_others_are_being_made(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    reserve = Slot.reserve

    def slowly(slot: Slot, **options: Any) -> None:
        if len(slot_names(folder)) > 1:
            go_on.wait()
        reserve(slot, **options)

    monkeypatch.setattr(Slot, "reserve", slowly)
    arena = Arena(folder, rank=3, num_slots=2)
    arena.prepare(MIB)
    assert arena.wait_for_one(60)
    assert not arena.is_ready
    assert arena.oldest() == (True, None)
    filled(some(arena.take(None)), SlotState.COMMITTED, seq=1)
    assert arena.oldest() == (False, Place(1, 1))  # the other one is not there yet
    go_on.set()
    assert arena.wait(60)
    assert arena.oldest() == (True, Place(1, 1))
    arena.close()


def test_slots_that_somebody_removed_are_made_anew(folder: NodeFolder) -> None:
    arena = ready(folder, MIB)
    found = [arena.is_short]
    for name in slot_names(folder):
        folder.remove(name)
    found.append(arena.is_short)
    arena.prepare(MIB)
    assert arena.wait(60)
    assert [*found, arena.is_short] == [False, True, False]
    assert len(slot_names(folder)) == 2
    arena.close()


def test_a_slot_that_a_dead_process_was_filling_is_free(folder: NodeFolder) -> None:
    arena = ready(folder, MIB)
    for _ in range(2):
        filled(some(arena.take(None)), SlotState.WRITING)
    assert arena.take(None) is None
    arena.close()  # as the kernel does when the process ends: the locks are gone
    again = ready(folder, MIB)
    assert some(again.take(None)).record == SlotRecord(SlotState.FREE)
    again.close()


def test_a_slot_that_a_living_process_is_filling_is_left_alone(folder: NodeFolder) -> None:
    arena = ready(folder, MIB)
    theirs = filled(some(arena.take(None)), SlotState.WRITING)
    again = ready(folder, MIB)  # of another process, for all that the locks know
    mine = [filled(some(again.take(None)), SlotState.WRITING, seq=seq) for seq in (2, 3)]
    assert again.take(None) is None
    assert not again.is_short
    assert theirs.name not in {slot.name for slot in mine}
    assert theirs.refresh().state == SlotState.WRITING
    again.close()
    arena.close()


def test_the_slot_of_a_process_that_stands_still_is_replaced_and_goes_when_that_process_is_dead(
    folder: NodeFolder,
) -> None:
    theirs = ready(folder, MIB)
    mine = ready(folder, MIB)
    stuck = filled(some(theirs.take(None)), SlotState.WRITING)
    was_short = mine.is_short
    mine.prepare(MIB)
    assert mine.wait(60)
    assert (was_short, mine.is_short) == (True, False)
    assert len(slot_names(folder)) == 3
    theirs.close()  # as the kernel does when the process ends
    with Slot(folder, stuck.name) as slot:
        assert slot.free_if_abandoned()  # as the keeper does
    mine.remove_retired(None)
    assert stuck.name not in slot_names(folder)
    assert len(slot_names(folder)) == 2
    mine.close()


def test_a_larger_state_gets_larger_slots_and_what_the_old_ones_hold_stays_until_it_is_not_needed(
    folder: NodeFolder,
) -> None:
    arena = ready(folder, MIB)
    held = filled(some(arena.take(None)), SlotState.COMMITTED, seq=1)
    arena.prepare(5 * MIB)
    assert arena.wait(60)
    assert arena.is_ready
    assert sorted((folder.path / name).stat().st_size for name in slot_names(folder)) == [4 * MIB, 8 * MIB, 8 * MIB]
    assert arena.newest_sealed() == Place(1, 1)
    new = filled(some(arena.take(Place(1, 1))), SlotState.COMMITTED, seq=2)
    assert new.nbytes == 6 * MIB
    arena.remove_retired(Place(1, 1))
    assert held.name in slot_names(folder)
    arena.remove_retired(Place(1, 2))
    assert held.name not in slot_names(folder)
    arena.close()


def test_slots_that_are_too_many_go_when_they_are_free(folder: NodeFolder) -> None:
    ready(folder, MIB, num_slots=3).close()
    ready(folder, MIB, num_slots=1).close()
    assert len(slot_names(folder)) == 1


def test_what_does_not_fit_is_an_error_before_memory_runs_out_and_leaves_room_for_others(folder: NodeFolder) -> None:
    arena = ready(folder, 150 * MIB)
    assert not arena.is_ready
    assert isinstance(arena.error, ConfigurationError)
    assert arena.error.code == "config.memory"
    assert f"the size of the file system at '{folder.path}'" in str(arena.error)
    assert not slot_names(folder)
    arena.close()


def test_ranks_that_reserve_at_the_same_time_leave_room_for_others(folder: NodeFolder) -> None:
    arenas = [Arena(folder, rank=rank, num_slots=1) for rank in range(2)]
    for arena in arenas:
        arena.prepare(200 * MIB)
    for arena in arenas:
        assert arena.wait(60)
        arena.close()
    assert any(arena.error for arena in arenas)


def test_closing_ends_the_preparation(folder: NodeFolder) -> None:
    arena = Arena(folder, rank=0, num_slots=2)
    arena.prepare(110 * MIB)
    arena.close()
    assert not arena.is_ready
    assert arena.error is None


def test_a_damaged_slot_is_passed_over(folder: NodeFolder) -> None:
    ready(folder, MIB).close()
    (folder.path / slot_names(folder)[0]).write_bytes(bytes(4 * MIB))
    arena = ready(folder, MIB)
    assert arena.is_ready
    assert len(slot_names(folder)) == 3
    arena.close()


def test_memory_is_given_back_also_where_the_folder_takes_no_changes(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", name)

    arena = ready(folder, MIB)
    names = slot_names(folder)
    with monkeypatch.context() as patch:
        patch.setattr(folder, "remove", refused)  # as after os.setuid
        assert arena.give_back()
        arena.close()
    assert slot_names(folder) == names
    again = ready(folder, MIB)
    assert slot_names(folder) == names  # nobody holds their locks
    assert again.give_back()
    assert slot_names(folder) == []
    again.close()


@pytest.mark.parametrize("where", [(Slot, "free_if_abandoned"), (file_locks, "try_lock")])
def test_an_interrupt_while_memory_is_opened_leaves_no_claim_and_no_descriptor(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    ready(folder, MIB).close()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(*where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            Arena(folder, rank=3, num_slots=2)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert not is_claimed(folder, 3)
