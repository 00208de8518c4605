"""The memory that all runs of this user have on this node: a list of it, and the release of unneeded slots.

An idle keeper releases the slots of ranks without a trainer whose contents are all durable. Other processes may release
such slots before that. They need no help of the keeper for it (see `holdfast.node_memory.slots`); it notices that the
files are gone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from holdfast.errors import ConfigurationError, CorruptError, StorageError
from holdfast.node_memory.claims import is_claimed, remove_claims
from holdfast.node_memory.generations import generation_ids, given_up_ids, is_protected, remove_generation
from holdfast.node_memory.keeper_lock import clear_protocol, is_kept, keeper_pid, remove_lock, try_lock
from holdfast.node_memory.keeper_starts import clear_starts
from holdfast.node_memory.node_folder import NodeFolder, node_folders
from holdfast.node_memory.noted_disks import forget_disks
from holdfast.node_memory.peering import forget_peers
from holdfast.node_memory.slots import (
    SPENT,
    Slot,
    SlotKind,
    SlotRecord,
    SlotState,
    copy_names,
    parity_names,
    rank_of,
    slot_names,
)
from holdfast.store.base import Location
from holdfast.store.urls import canonical, text_of

_log = logging.getLogger(__name__)
#: Time limit for a file system to say where a path leads.
_STORE_TIMEOUT_S: Final = 5.0
_RUN_NAME: Final = "keeper.run"
#: The log of the run's keepers on this node.
LOG_NAME: Final = "keeper.log"


class HeldSlot(NamedTuple):
    """A slot as it was found. `rank` is that of the snapshot, or of the copied one; of parity, it is its number.
    `state` is None where the slot is damaged or of another version of holdfast. `step` is that of its checkpoint, if it
    holds one, and `is_protected` whether that checkpoint survives the loss of nodes. `since` is the time at which it
    came into this state, in seconds since 1970. `has_trainer` says whether a living trainer has a claim to its rank's
    slots, `is_durable` whether storage has all that the slot holds, and `is_freeable` whether the slot may be removed:
    it is durable, or was given up."""

    name: str
    kind: SlotKind
    rank: int
    is_protected: bool
    state: SlotState | None
    step: int | None
    nbytes: int
    since: float
    has_trainer: bool
    is_durable: bool
    is_freeable: bool


class RunMemory(NamedTuple):
    """The memory of one run on this node. `run` is None where no keeper has recorded the run's name. `keeper_pid` is
    the keeper's PID in its own PID namespace, None where there is no keeper."""

    run: str | None
    path: Path
    is_kept: bool
    keeper_pid: int | None
    slots: tuple[HeldSlot, ...]


def node_memory(node_dir: Path) -> Iterator[RunMemory]:
    """The memory of all runs of this user on this node. Changes nothing."""
    for folder in node_folders(node_dir):
        try:
            kept = is_kept(folder)
        except ConfigurationError:  # something else lies in the place of the lock, so no keeper can start
            kept = False
        slots = tuple(_held_in(folder))
        yield RunMemory(run_of(folder), folder.path, kept, keeper_pid(folder) if kept else None, slots)


class FreedMemory(NamedTuple):
    """The memory that was freed of one run on this node. `run` and `path` are as in `RunMemory`."""

    run: str | None
    path: Path
    nbytes: int


def give_way(node_dir: Path, nbytes: int | None = None, *, run: str | None = None) -> list[FreedMemory]:
    """Remove slots of ranks without a living trainer whose contents are durable or given up: those that changed longest
    ago first, until the removed ones had `nbytes` of memory (None: all); of this `run` (None: of all runs of this
    user). Also removes folders that have no slots and no keeper. Returns the memory that the removed slots had, by
    their runs; it is free once the keepers have noticed the removal."""
    found = [
        (held.since, folder.path, held.name)
        for folder in node_folders(node_dir)
        if run in (None, run_of(folder))
        for held in _held_in(folder)
        if held.is_freeable and not held.has_trainer
    ]
    given: dict[Path, FreedMemory] = {}
    for _, path, name in sorted(found):
        if nbytes is not None and sum(each.nbytes for each in given.values()) >= nbytes:
            break
        with suppress(FileNotFoundError, CorruptError), NodeFolder.at(path) as folder, Slot(folder, name) as slot:
            slot_nbytes = slot.held_nbytes
            slot.free_if_abandoned()
            if not is_claimed(folder, slot.rank) and slot.remove_if(_is_spent):
                before = given.get(path) or FreedMemory(run_of(folder), path, 0)
                given[path] = before._replace(nbytes=before.nbytes + slot_nbytes)
    for folder in node_folders(node_dir):
        if run in (None, run_of(folder)):
            _remove_unkept(folder)
    return [each for each in given.values() if each.nbytes]


def name_of(run: Location) -> str:
    """The name by which this node's memory knows `run`: its location without links, and with the options of a URL.
    Where its file system does not answer, the location as it is."""
    try:
        return text_of(canonical(run, timeout_s=_STORE_TIMEOUT_S))
    except StorageError as error:
        _log.warning("%s", error)
        return text_of(run)


def write_run(folder: NodeFolder, run: str) -> None:
    """Record in `folder` the run that it belongs to. For its keeper. Where the record cannot be written, a list of the
    node's memory lacks the run's name, and nothing else does."""
    try:
        folder.write(_RUN_NAME, run.encode())
    except OSError as error:
        _log.warning("'%s' cannot be written: %s", folder.path / _RUN_NAME, error)


def run_of(folder: NodeFolder) -> str | None:
    """The run that `folder` belongs to; None where no keeper has recorded it, or something else lies in the place of
    the record."""
    try:
        with os.fdopen(folder.open(_RUN_NAME), "rb") as file:
            return file.read().decode(errors="replace")
    except (FileNotFoundError, ConfigurationError):
        return None


def remove_ended(folder: NodeFolder) -> bool:
    """Remove the folder of a run that has no slots and no trainers on this node any more. Only for the holder of its
    keeper's lock, which has closed all slots. Returns whether the folder was removed.

    No process is left with half a folder. The file of the claims goes first, so a trainer that comes later creates the
    folder again. So does a keeper that finds that the lock file it has locked was removed (`try_lock`). A file that
    either of them creates before the folder itself is removed keeps the folder.
    """
    if list(_all_names(folder)) or not remove_claims(folder):
        return False
    for checkpoint_id in {*generation_ids(folder), *given_up_ids(folder)}:
        remove_generation(folder, checkpoint_id)
    folder.remove_unnamed()
    forget_disks(folder)
    forget_peers(folder)
    for name in (_RUN_NAME, LOG_NAME):
        folder.discard(name)
    clear_starts(folder)
    clear_protocol(folder)
    remove_lock(folder)
    try:
        folder.path.rmdir()
    except OSError:  # another process has created a file in it, and has the folder now
        return False
    return True


def _remove_unkept(folder: NodeFolder) -> None:
    """Remove a folder that has no slots and no keeper, and no file in the place of its lock that is none."""
    with suppress(ConfigurationError, StorageError):
        if not slot_names(folder) and (lock := try_lock(folder)) is not None:
            try:
                remove_ended(folder)
            finally:
                os.close(lock)


def _is_spent(record: SlotRecord) -> bool:
    return record.state in SPENT


def _all_names(folder: NodeFolder) -> Iterator[str]:
    """The names of the slots in a folder, and of the copies and parity that its keeper holds for other nodes."""
    yield from slot_names(folder)
    yield from copy_names(folder)
    yield from parity_names(folder)


def _held_in(folder: NodeFolder) -> Iterator[HeldSlot]:
    for name in _all_names(folder):
        with suppress(FileNotFoundError):
            try:
                with Slot(folder, name) as slot:
                    yield _held(folder, slot)
            except CorruptError:  # damaged, of another version, or not a file of this user alone
                yield _unreadable(folder, name)


def _held(folder: NodeFolder, slot: Slot) -> HeldSlot:
    contents = slot.record.contents
    is_freeable = slot.state in SPENT or (slot.state == SlotState.WRITING and not slot.is_taken)
    is_durable = is_freeable and slot.state != SlotState.FENCED
    has_trainer = is_claimed(folder, slot.rank if slot.kind is SlotKind.SNAPSHOT else None)
    return HeldSlot(
        name=slot.name,
        kind=slot.kind,
        rank=slot.rank,
        is_protected=contents is not None and is_protected(folder, contents.checkpoint_id),
        state=slot.state,
        step=contents.step if contents else None,
        nbytes=slot.held_nbytes,
        since=slot.since,
        has_trainer=has_trainer,
        is_durable=is_durable,
        is_freeable=is_freeable,
    )


def _unreadable(folder: NodeFolder, name: str) -> HeldSlot:
    rank, status = rank_of(name), os.stat(name, dir_fd=folder.fileno(), follow_symlinks=False)
    return HeldSlot(
        name=name,
        kind=SlotKind(name.partition("-")[0]),
        rank=rank,
        is_protected=False,
        state=None,
        step=None,
        nbytes=status.st_blocks * 512,
        since=status.st_mtime,
        has_trainer=is_claimed(folder, rank),
        is_durable=False,
        is_freeable=False,
    )
