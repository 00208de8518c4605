"""The watcher: it tells saves whether the keeper has made their snapshots durable."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, Thread
from typing import Final, NamedTuple

from holdfast.checkpointer.given_up import GivenUp
from holdfast.checkpointer.rank_memory import RankMemory
from holdfast.checkpointer.save_errors import incomplete, removed, replaced_unprotected, superseded, unwatched
from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.errors import FencedError, HoldfastError
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.format.tombstones import removed_key
from holdfast.keeper.client import ensure_keeper
from holdfast.latch import Latch
from holdfast.node_disk.disk_folder import DiskPart
from holdfast.node_memory.generations import is_protected
from holdfast.node_memory.node_folder import unusable_memory
from holdfast.node_memory.peering import peer_trouble, trouble_elsewhere
from holdfast.node_memory.slots import Slot, SlotState
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store, text_of

#: Interval of looks at slots; and of looks at the keeper and storage.
_LOOK_S: Final = 0.025
_LOOK_FURTHER_S: Final = 0.2
#: Limit of the second interval, which doubles each time that no keeper could be started or storage did not answer.
_LOOK_FURTHER_AT_MOST_S: Final = 10.0
#: Interval of looks in storage for what the keeper or another look should have told: the disk of a keeper may take no
#: note of a commit, and a `keep` policy may remove a commit soon after it came.
_LOOK_BACK_S: Final = 5.0
#: Limit for storage to answer the watcher; `close` waits for that.
_STORE_TIMEOUT_S: Final = 5.0

_log = logging.getLogger(__name__)


class _Pending(NamedTuple):
    """A save that has not ended yet; `slot` is None on a rank that has no data file. `part` is this node's part of the
    checkpoint on a disk, from where it goes to the run (None: it goes there at once), with the data files numbered
    `files` of this rank."""

    machine: SaveMachine
    checkpoint_id: str
    slot: Slot | None
    part: DiskPart | None
    files: tuple[int, ...]

    @property
    def needed_slot(self) -> Slot | None:
        """The slot, unless a disk has its contents, or the save has ended."""
        is_needed = self.slot is not None and self.slot.state != SlotState.ON_DISK and not self.machine.is_over
        return self.slot if is_needed else None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to tell of the save."""
        return self.machine.is_over and self.machine.is_protection_over

    @property
    def is_on_disk(self) -> bool:
        """Whether a disk of the node has what was in the slot, as far as the last look at it tells."""
        return self.is_on_disk_alone or (self.slot is not None and self.slot.state == SlotState.ON_DISK)

    @property
    def is_on_disk_alone(self) -> bool:
        """Whether the slot holds something else by now."""
        contents = None if self.slot is None else self.slot.record.contents
        return self.part is not None and (contents is None or contents.checkpoint_id != self.checkpoint_id)


class Watcher:
    """Tells saves whose slots were handed to the keeper how they end, and makes sure that a keeper is alive.

    Its own thread looks, from `begin` until `close`. The saving thread calls all methods except `add`, which the
    background thread of a save calls.
    """

    def __init__(self, run: Location, node_dir: Path, *, rank: int) -> None:
        self.memory = RankMemory(run, node_dir, rank=rank, watched=self._needed_slots)
        self.given_up = GivenUp(self.memory)
        self._run = run
        #: The lock of the list below. A thread that holds it calls nothing else.
        self._lock = Lock()
        self._pending: list[_Pending] = []
        self._look_back_at = 0.0
        self._closed = Latch()
        self._thread: Thread | None = None

    def begin(self) -> None:
        """Make sure that the thread runs."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._watch, name="holdfast-watch", daemon=True)
            self._thread.start()

    def add(self, machine: SaveMachine, checkpoint_id: str, slot: Slot | None, *, part: DiskPart | None = None) -> None:
        """Watch a save that was handed to the keeper, until it ends."""
        contents = None if part is None or slot is None else slot.record.contents
        files = () if contents is None else tuple(each.file for each in contents.files)
        for pending in self._pending_now():
            if pending.slot is None and pending.machine.is_over:  # nothing here shows when a newer save replaces it
                pending.machine.leave_unprotected(replaced_unprotected(pending.machine.step, ""))
        with self._lock:
            self._pending.append(_Pending(machine, checkpoint_id, slot, part, files))

    def steps_on_disk(self) -> set[int]:
        """The steps of watched saves that have not ended, and whose part of this rank is on a disk of the node."""
        return {each.machine.step for each in self._pending_now() if each.is_on_disk and not each.machine.is_over}

    @property
    def trouble(self) -> str:
        """Why the last try to make a snapshot durable failed; "" if none failed."""
        return next((each.machine.trouble for each in self._pending_now() if each.machine.trouble), "")

    def look_at(self, slot: Slot) -> None:
        """Look at the save in `slot` at once, because the slot is about to be filled again."""
        for pending in self._pending_now():
            if pending.slot is slot:
                self._look(pending)

    def end_given_up(self, checkpoint_ids: Collection[str]) -> None:
        """End the saves of `checkpoint_ids`, because all ranks gave them up."""
        for pending in self._pending_now():
            if pending.checkpoint_id in checkpoint_ids:
                pending.machine.fail(incomplete(pending.machine.step))

    def ids_beyond(self, reached: Place | None) -> list[str]:
        """The ids of the watched checkpoints at places after `reached` (None: at any place)."""
        return [
            pending.checkpoint_id
            for pending in self._pending_now()
            if pending.machine.place is not None and (reached is None or pending.machine.place > reached)
        ]

    def close(self) -> None:
        """End the watching. Staged snapshots stay, and the keeper makes them durable; saves that are not durable yet
        end here with the error `unwatched`. Call it only when no save is copying."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        for pending in self._pending_now():
            self._look(pending)
            pending.machine.leave(unwatched(pending.machine.step))
            pending.machine.leave_unprotected(unwatched(pending.machine.step))

    def _needed_slots(self) -> list[Slot | None]:
        return [each.needed_slot for each in self._pending_now() if not each.machine.is_over]

    def _pending_now(self) -> list[_Pending]:
        with self._lock:
            return list(self._pending)

    def _watch(self) -> None:
        pause_s, look_further_at = _LOOK_FURTHER_S, 0.0
        while not self._closed.wait(_LOOK_S):
            if (self._pending_now() or not self.given_up.is_told) and time.monotonic() > look_further_at:
                self.given_up.tell_keeper()
                is_sound = self._look_further(self._pending_now())
                pause_s = _LOOK_FURTHER_S if is_sound else min(2 * pause_s, _LOOK_FURTHER_AT_MOST_S)
                look_further_at = time.monotonic() + pause_s
            self._look_at_all()
            self.memory.give_back()

    def _look_at_all(self) -> None:
        """Look at all saves. Apart from `_watch`, whose variables would keep the last save and its listeners alive."""
        for pending in self._pending_now():
            self._look(pending)

    def _look(self, pending: _Pending) -> None:
        machine, slot = pending.machine, pending.slot
        if slot is not None and not machine.is_over:
            self._look_at_slot(pending, slot)
        if not machine.is_protection_over:
            self._look_at_copies(pending)
        if pending.is_over:
            with self._lock:
                if pending in self._pending:
                    self._pending.remove(pending)

    def _look_at_copies(self, pending: _Pending) -> None:
        """Look whether other nodes have copies of all files of a save."""
        memory, machine, slot = self.memory.current, pending.machine, pending.slot
        if memory is None:
            return
        with suppress(OSError):  # another thread is giving the memory back
            if is_protected(memory.folder, pending.checkpoint_id):
                machine.protect()
                return
            trouble = trouble_elsewhere(memory.folder) or peer_trouble(memory.folder)
            if slot is not None and not _holds(slot, pending.checkpoint_id):
                machine.leave_unprotected(replaced_unprotected(machine.step, trouble))
            elif trouble:
                machine.delay_protection(trouble)

    def _look_at_slot(self, pending: _Pending, slot: Slot) -> None:
        machine, checkpoint_id = pending.machine, pending.checkpoint_id
        record = slot.refresh()
        contents = record.contents
        if slot.is_damaged:
            self.given_up.fail(checkpoint_id)
            machine.fail(removed(machine.step))
        elif contents is None or contents.checkpoint_id != checkpoint_id:
            self._look_at_disk(pending)
        elif record.state == SlotState.COMMITTED:
            referenced_nbytes = record.referenced_nbytes
            machine.commit(contents.files_nbytes - referenced_nbytes, referenced_nbytes=referenced_nbytes)
        elif record.state == SlotState.ON_DISK:
            machine.seal()
            if record.error:
                machine.delay(record.error)
            self._look_at_disk(pending)
        elif record.state == SlotState.HELD:
            machine.hold(contents.files_nbytes)
        elif record.state == SlotState.FENCED:
            machine.fail(superseded(machine.step, record.error))
        elif slot.is_removed and not self.memory.used.has_keeper:
            # No process can open the slot any more, and the keeper that had it mapped is dead.
            self.given_up.fail(checkpoint_id)
            machine.fail(removed(machine.step))
        else:
            if record.state == SlotState.SEALED:
                machine.seal()
            if record.error:
                machine.delay(record.error)

    def _look_at_disk(self, pending: _Pending) -> None:
        """Look at a save whose slot was free to be filled again: what a disk of the node has of it, if anything. (The
        files of other ranks of the node may be there too.)"""
        part, machine = pending.part, pending.machine
        try:
            if part is not None and part.is_drained:
                nbytes, referenced_nbytes = part.stored_nbytes(pending.files)
                machine.commit(nbytes, referenced_nbytes=referenced_nbytes)
            elif part is None or not part.has(pending.files):
                self._end_lost(machine, pending.checkpoint_id)
        except HoldfastError as error:  # of the disk
            machine.delay(str(error))

    def _end_lost(self, machine: SaveMachine, checkpoint_id: str) -> None:
        """End a save whose slot holds something else now. It may have been committed and freed before this watcher
        looked; its keeper may have lost it, so that the other ranks must give it up too; or another job may have taken
        over the run, and this memory with it. Storage tells."""
        assert machine.place is not None
        error: HoldfastError = incomplete(machine.step)
        try:
            with TimedStore(open_store(self._run), timeout_s=_STORE_TIMEOUT_S) as storage:
                if _was_committed(storage, machine.place):
                    machine.commit()
                    return
                Run.open(storage).check_fence(machine.place.epoch)
        except FencedError as fenced:
            error = superseded(machine.step, fenced.message)
        except HoldfastError as unknown:
            _log.warning("step %d: nobody can look now why it left memory: %s", machine.step, unknown)
        self.given_up.fail(checkpoint_id)
        machine.fail(error)

    def _look_further(self, waiting: Sequence[_Pending]) -> bool:
        """Make sure that a keeper is at work. For saves without a slot on this rank, look in storage whether they are
        committed; now and then for those that only the disk has, too. Returns False if either failed; the saves then
        hear of the delay."""
        memory = self.memory.current
        try:
            # If memory was removed, only the keeper that has it mapped can make it durable; a new one could not.
            if memory is not None and not memory.is_removed:
                with unusable_memory(memory.folder.path):
                    ensure_keeper(memory.folder, text_of(self._run))
            with TimedStore(open_store(self._run), timeout_s=_STORE_TIMEOUT_S) as storage:
                for machine in [pending.machine for pending in waiting if pending.slot is None]:
                    if machine.is_over:
                        continue
                    assert machine.place is not None
                    if storage.nbytes(records.commit_key(machine.place)) is not None:
                        machine.commit()
                if time.monotonic() > self._look_back_at:
                    self._look_back(storage, [each for each in waiting if each.slot is None or each.is_on_disk_alone])
        except Exception as error:  # noqa: BLE001
            # Whatever the error is, the thread must go on, or saves would never hear of their ends.
            if not isinstance(error, HoldfastError):
                _log.exception("cannot see whether the keeper makes snapshots durable; trying again")
            for pending in waiting:
                pending.machine.delay(str(error))
            return False
        return True

    def _look_back(self, storage: TimedStore, waiting: Sequence[_Pending]) -> None:
        for machine in [pending.machine for pending in waiting if not pending.machine.is_over]:
            assert machine.place is not None
            if _was_committed(storage, machine.place):
                machine.commit()
        self._look_back_at = time.monotonic() + _LOOK_BACK_S


def _holds(slot: Slot, checkpoint_id: str) -> bool:
    """Whether a slot is there, and still holds a part of that checkpoint."""
    contents = slot.refresh().contents
    is_there = not (slot.is_closed or slot.is_removed)
    return is_there and contents is not None and contents.checkpoint_id == checkpoint_id


def _was_committed(storage: TimedStore, place: Place) -> bool:
    """Whether the run has the commit at `place`, or had it: it may have been removed since. Two requests at most."""
    return any(storage.nbytes(key) is not None for key in (records.commit_key(place), removed_key(place)))
