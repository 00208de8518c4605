"""Slots: their contents are known whichever process died, and their memory is reserved before any write."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import ConfigurationError, CorruptError
from holdfast.format.records import Place
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import DATA_START, Contents, Slot, SlotRecord, SlotState, slot_names
from tests.store.test_posix_storage import mounted

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[NodeFolder]:
    with NodeFolder("run", node_dir=tmp_path) as folder:
        yield folder


@pytest.fixture
def slot(folder: NodeFolder) -> Iterator[Slot]:
    with Slot.create(folder, rank=3, nbytes=3 * MIB) as slot:
        yield slot


def contents(seq: int = 1) -> Contents:
    return Contents("0123456789abcdef", "00112233445566aa", Place(1, seq), 10 * seq, 0, 4096, 2 * MIB)


def record(state: SlotState, seq: int = 1) -> SlotRecord:
    return SlotRecord(state, contents(seq) if state >= SlotState.WRITING else None)


def filled(slot: Slot, state: SlotState, seq: int = 1) -> Slot:
    """`slot` taken through all states up to `state`."""
    assert slot.take()
    path = [SlotState.WRITING, SlotState.STAGED, SlotState.SEALED, SlotState.COMMITTED]
    if state == SlotState.HELD:
        path[2:] = [SlotState.HELD]
    for each in path[: path.index(state) + 1]:
        slot.advance(record(each, seq))
    return slot


def test_a_new_slot_is_free_and_has_room_from_a_huge_page_on(slot: Slot) -> None:
    assert slot.record == SlotRecord(SlotState.FREE)
    assert slot.nbytes == len(slot.data) == 4 * MIB
    assert slot.data.ctypes.data % DATA_START == 0


def test_slots_of_a_rank_are_found_by_it(folder: NodeFolder, slot: Slot) -> None:
    with Slot.create(folder, rank=31, nbytes=1) as other:
        assert slot_names(folder) == sorted([slot.name, other.name])
        assert slot_names(folder, rank=3) == [slot.name]
        other.remove()
    assert slot_names(folder) == [slot.name]


def test_what_one_process_writes_others_see_and_so_does_who_comes_after_it(folder: NodeFolder, slot: Slot) -> None:
    with Slot(folder, slot.name) as seen:
        slot.data[:5] = list(b"bytes")
        assert slot.take()
        slot.advance(record(SlotState.WRITING))
        assert seen.state == SlotState.FREE
        assert seen.refresh() == record(SlotState.WRITING)
        assert seen.data[:5].tobytes() == b"bytes"
    slot.advance(record(SlotState.STAGED))
    with Slot(folder, slot.name) as later:
        assert later.record == record(SlotState.STAGED)


def test_a_state_that_does_not_follow_is_a_defect_of_ours(slot: Slot) -> None:
    assert slot.take()
    with pytest.raises(AssertionError, match="FREE does not become SEALED"):
        slot.advance(record(SlotState.SEALED))


def test_a_sealed_slot_is_not_filled_again_before_it_was_committed_or_superseded(slot: Slot) -> None:
    filled(slot, SlotState.SEALED)
    assert slot.take()
    with pytest.raises(AssertionError):
        slot.advance(record(SlotState.WRITING, 2))
    slot.let_go()
    slot.advance(record(SlotState.FENCED))
    assert slot.take()
    slot.advance(record(SlotState.WRITING, 2))


@given(st.integers(0, 5), st.data())
def test_a_record_that_was_half_written_is_none_and_the_one_before_holds(before: int, data: st.DataObject) -> None:
    # Drawing may end an example, and a temporary folder of pytest lasts for all of them.
    # Of two cells with different times other bytes differ, each time this runs.
    with (
        TemporaryDirectory() as node_dir,
        NodeFolder("run", node_dir=Path(node_dir)) as folder,
        patch.object(time, "time", return_value=1.0),
    ):
        slot = Slot.create(folder, rank=0, nbytes=1)
        for seq in range(before):
            filled(slot, SlotState.WRITING, seq + 1)
            slot.advance(SlotRecord(SlotState.FREE))
        old, page = slot.record, slot._memory[:4096].copy()
        filled(slot, SlotState.WRITING, 9)
        changed = np.flatnonzero(slot._memory[:4096] != page)
        # Any of the bytes that were written may be missing.
        missing = data.draw(st.lists(st.sampled_from(changed.tolist()), min_size=1))
        slot._memory[missing] = page[missing]
        with Slot(folder, slot.name) as found:
            assert found.record == old
        slot.close()


@pytest.mark.parametrize("page", [bytes(4096), b"\xff" * 4096, b"HFSLOT01" * 512])
def test_a_file_that_is_no_slot_is_an_error_that_names_it(folder: NodeFolder, slot: Slot, page: bytes) -> None:
    slot._memory[:4096] = list(page)
    with pytest.raises(CorruptError, match=f"{slot.name}.*is not a valid slot") as caught:
        Slot(folder, slot.name)
    assert caught.value.code == "corrupt.slot"


def test_an_empty_file_is_no_slot(folder: NodeFolder) -> None:
    os.close(folder.create("slot-0-00"))
    with pytest.raises(CorruptError, match="it has 0 bytes"):
        Slot(folder, "slot-0-00")


def test_a_slot_that_could_not_be_made_leaves_nothing(folder: NodeFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="no space"):
        Slot.create(folder, rank=0, nbytes=1)
    assert folder.names() == []


def test_reserved_memory_is_there_before_it_is_written_to(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "shm", "tmpfs", "size=200m") as memory,
        NodeFolder("run", node_dir=memory) as folder,
        Slot.create(folder, rank=0, nbytes=130 * MIB) as slot,
    ):
        assert slot.path.stat().st_blocks * 512 <= 4096
        left: list[int] = []
        slot.reserve(before=left.append)
        assert 130 * MIB <= slot.path.stat().st_blocks * 512 <= 130 * MIB + 8192
        assert left == [130 * MIB, 66 * MIB, 2 * MIB]
        assert not slot.data.any()
        assert slot.record == SlotRecord(SlotState.FREE)


def test_what_is_in_a_slot_stays_when_it_is_reserved_again(slot: Slot) -> None:
    slot.data[:] = 7
    slot.reserve()
    assert (slot.data == 7).all()


def test_memory_that_is_not_there_is_an_error_and_no_sigbus(tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "shm", "tmpfs", "size=64m") as memory,
        NodeFolder("run", node_dir=memory) as folder,
        Slot.create(folder, rank=0, nbytes=100 * MIB) as slot,
    ):
        with pytest.raises(ConfigurationError, match=r"no room for 104857600 bytes.*remount,size=") as caught:
            slot.reserve()
        assert caught.value.code == "config.memory"
        slot.remove()
        status = os.statvfs(memory)
        assert status.f_bavail * status.f_frsize >= 63 * MIB


def test_reserving_ends_where_who_looks_on_says_so(slot: Slot) -> None:
    def enough(left: int) -> None:
        raise InterruptedError(left)

    with pytest.raises(InterruptedError):
        slot.reserve(before=enough)
    assert slot.path.stat().st_blocks * 512 <= 4096


def test_a_child_that_was_just_forked_keeps_no_slot_from_being_taken(folder: NodeFolder) -> None:
    """It had the file in which the slot was made, with its lock, until it ran: no save could fill the slot."""
    created = folder.create_unnamed

    def create_and_fork() -> tuple[str, int]:
        name, fd = created()
        os.dup(fd)  # as a child has it
        return name, fd

    with patch.object(folder, "create_unnamed", create_and_fork), Slot.create(folder, rank=3, nbytes=MIB) as slot:
        assert slot.take()


def test_training_state_is_in_no_core_dump_and_in_no_child(slot: Slot) -> None:
    text = Path("/proc/self/smaps").read_text()
    (mapping,) = (part for part in text.split("VmFlags:") if slot.name in part)
    flags = text[text.index(slot.name) :].split("VmFlags:")[1].splitlines()[0].split()
    assert mapping
    assert {"dd", "dc"} <= set(flags)


def test_mappings_end_with_the_slot(folder: NodeFolder) -> None:
    slot = Slot.create(folder, rank=0, nbytes=1)
    name = slot.name
    assert name in Path("/proc/self/maps").read_text()
    slot.remove()
    del slot
    assert name not in Path("/proc/self/maps").read_text()


CHILD = """
import os, signal, sys
from pathlib import Path
from holdfast.format.records import Place
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Contents, Slot, SlotRecord, SlotState

slot = Slot.create(NodeFolder("run", node_dir=Path(sys.argv[1])), rank=0, nbytes=1 << 20)
for seq in range(1, 1 << 30):
    held = Contents("0123456789abcdef", "00112233445566aa", Place(1, seq), seq, 0, 4096, 1 << 20)
    assert slot.take()
    slot.advance(SlotRecord(SlotState.WRITING, held))
    slot.advance(SlotRecord(SlotState.STAGED, held))
    slot.advance(SlotRecord(SlotState.FREE))
"""


def test_a_process_that_is_killed_while_it_changes_a_slot_leaves_a_slot(folder: NodeFolder, tmp_path: Path) -> None:
    for attempt in range(3):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)])
        while not slot_names(folder):
            time.sleep(0.01)
        time.sleep(0.05 + 0.01 * attempt)
        child.send_signal(signal.SIGKILL)
        child.wait()
        with Slot(folder, slot_names(folder)[0]) as slot:
            assert not slot.is_taken
            was_filled = slot.state == SlotState.WRITING
            assert slot.free_if_abandoned() == was_filled
            slot.remove()
