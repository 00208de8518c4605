"""All that lies in the memory of this node, of all runs of this user: who has it, and giving it back.

What a keeper would give back when it is idle, others may take before: slots that hold nothing that is not durable, of
ranks that have no trainer any more. Nobody needs the keeper for that, see `holdfast.node_memory.slots`; it notices that
files are gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.errors import CorruptError
from holdfast.node_memory.claims import is_claimed, remove_claims
from holdfast.node_memory.generations import generation_ids, given_up_ids, remove_generation
from holdfast.node_memory.keeper_lock import clear_protocol, is_kept, keeper_pid, remove_lock, try_lock
from holdfast.node_memory.node_folder import NodeFolder, node_folders
from holdfast.node_memory.slots import REUSABLE, Slot, SlotState, rank_of, slot_names

_RUN_NAME: Final = "keeper.run"
#: What keepers say.
LOG_NAME: Final = "keeper.log"


class HeldSlot(NamedTuple):
    """A slot, as it was found: its `state` (None where it is damaged, or of another version of holdfast); `step`, of
    what it holds, if it holds anything; `since` is when it came into this state, in seconds since 1970; `has_trainer`
    says whether a living trainer has the slots of its rank; `is_durable`, whether nothing would be lost with it."""

    name: str
    rank: int
    state: SlotState | None
    step: int | None
    nbytes: int
    since: float
    has_trainer: bool
    is_durable: bool


class RunMemory(NamedTuple):
    """What one run has in the memory of this node. `run` is None where no keeper has said which one it is; `keeper_pid`
    is the process that keeps it, by the number that it has in its own PID namespace, None where none does."""

    run: str | None
    path: Path
    is_kept: bool
    keeper_pid: int | None
    slots: tuple[HeldSlot, ...]


def node_memory(node_dir: Path) -> Iterator[RunMemory]:
    """What all runs of this user have in the memory of this node. Changes nothing."""
    for folder in node_folders(node_dir):
        kept = is_kept(folder)
        slots = tuple(_held_in(folder))
        yield RunMemory(run_of(folder), folder.path, kept, keeper_pid(folder) if kept else None, slots)


def give_way(node_dir: Path, nbytes: int | None = None, *, run: str | None = None) -> int:
    """Remove slots that hold nothing that is not durable, and of whose ranks no trainer lives: those that were changed
    longest ago first, until they had `nbytes` of memory (None: all); of this `run` (None: of all of this user). Folders
    in which nothing is left are removed, where no keeper is at work. Returns how much memory they had; it is free when
    keepers have seen that they are gone."""
    found = [
        (held.since, folder.path, held.name)
        for folder in node_folders(node_dir)
        if run in (None, run_of(folder))
        for held in _held_in(folder)
        if held.is_durable and not held.has_trainer
    ]
    given = 0
    for _, path, name in sorted(found):
        if nbytes is not None and given >= nbytes:
            break
        with suppress(FileNotFoundError, CorruptError), NodeFolder.at(path) as folder, Slot(folder, name) as slot:
            slot_nbytes = slot.held_nbytes
            slot.free_if_abandoned()
            if not is_claimed(folder, slot.rank) and slot.remove_if(lambda _: True):
                given += slot_nbytes
    for folder in node_folders(node_dir):
        if run in (None, run_of(folder)):
            _remove_unkept(folder)
    return given


def write_run(folder: NodeFolder, run: str) -> None:
    """Say in `folder` which run it is of. For its keeper."""
    folder.write(_RUN_NAME, run.encode())


def run_of(folder: NodeFolder) -> str | None:
    """Which run `folder` is of; None where that was not said."""
    try:
        with os.fdopen(folder.open(_RUN_NAME), "rb") as file:
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return None


def remove_ended(folder: NodeFolder) -> bool:
    """Remove the folder of a run that has no slots and no trainers here any more. Only for who has its keeper's lock,
    and has closed all of it. Whether it was removed.

    Nobody is left with half a folder: claims are taken away first, so a trainer that comes from then on makes the
    folder anew; and so does a keeper that finds that the lock it got has no name any more (`try_lock`). What either of
    them makes before the folder itself is gone keeps it.
    """
    if slot_names(folder) or not remove_claims(folder):
        return False
    for checkpoint_id in {*generation_ids(folder), *given_up_ids(folder)}:
        remove_generation(folder, checkpoint_id)
    folder.remove_unnamed()
    for name in (_RUN_NAME, LOG_NAME):
        folder.remove(name)
    clear_protocol(folder)
    remove_lock(folder)
    try:
        folder.path.rmdir()
    except OSError:  # somebody has made something in it: it is theirs
        return False
    return True


def _remove_unkept(folder: NodeFolder) -> None:
    """Remove a folder in which nothing is left, and that no keeper has."""
    if not slot_names(folder) and (lock := try_lock(folder)) is not None:
        try:
            remove_ended(folder)
        finally:
            os.close(lock)


def _held_in(folder: NodeFolder) -> Iterator[HeldSlot]:
    """The slots in a folder."""
    for name in slot_names(folder):
        with suppress(FileNotFoundError):
            try:
                with Slot(folder, name) as slot:
                    yield _held(folder, slot)
            except CorruptError:  # damaged, of another version, or no file of ours
                yield _unreadable(folder, name)


def _held(folder: NodeFolder, slot: Slot) -> HeldSlot:
    contents = slot.record.contents
    is_durable = slot.state in REUSABLE or (slot.state == SlotState.WRITING and not slot.is_taken)
    has_trainer = is_claimed(folder, slot.rank)
    step = contents.step if contents else None
    return HeldSlot(slot.name, slot.rank, slot.state, step, slot.held_nbytes, slot.since, has_trainer, is_durable)


def _unreadable(folder: NodeFolder, name: str) -> HeldSlot:
    rank, status = rank_of(name), os.stat(name, dir_fd=folder.fileno(), follow_symlinks=False)
    return HeldSlot(name, rank, None, None, status.st_blocks * 512, status.st_mtime, is_claimed(folder, rank), False)
