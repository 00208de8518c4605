"""What becomes of the snapshots that a rank has handed to the keeper."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from threading import Lock, Thread
from typing import Final, NamedTuple

from holdfast.checkpointer.given_up import GivenUp
from holdfast.checkpointer.rank_memory import RankMemory
from holdfast.checkpointer.save_errors import incomplete, removed, superseded, unwatched
from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.errors import HoldfastError
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.keeper.client import ensure_keeper
from holdfast.latch import Latch
from holdfast.node_memory.node_folder import unusable_memory
from holdfast.node_memory.slots import Slot, SlotState
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

#: How often it is looked at what became of a snapshot, and at the keeper and storage.
_LOOK_S: Final = 0.025
_LOOK_FURTHER_S: Final = 0.2
#: While no keeper can be had, that is tried again after twice as long each time, up to this.
_LOOK_FURTHER_AT_MOST_S: Final = 10.0
#: How long storage may take to answer the watcher, for which `close` waits.
_STORE_TIMEOUT_S: Final = 5.0

_log = logging.getLogger(__name__)


class _Pending(NamedTuple):
    """A save whose end is waited for; `slot` is None on a rank that has no data file."""

    machine: SaveMachine
    checkpoint_id: str
    slot: Slot | None


class Watcher:
    """Tells saves that were handed over how they end, and sees to it that a keeper is alive.

    A thread of its own looks from `begin` until `close`. All methods are for the thread that saves, and `add` for the
    background of a save.
    """

    def __init__(self, run: Location, node_dir: Path, *, rank: int) -> None:
        self.memory = RankMemory(run, node_dir, rank=rank, watched=lambda: [each.slot for each in self._pending_now()])
        self.given_up = GivenUp(self.memory)
        self._run = run
        #: Of the list below; whoever holds it calls nothing else.
        self._lock = Lock()
        self._pending: list[_Pending] = []
        self._closed = Latch()
        self._thread: Thread | None = None

    def begin(self) -> None:
        """See to it that the thread runs."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = Thread(target=self._watch, name="holdfast-watch", daemon=True)
            self._thread.start()

    def add(self, machine: SaveMachine, checkpoint_id: str, slot: Slot | None) -> None:
        """Watch what becomes of a save that was handed over."""
        with self._lock:
            self._pending.append(_Pending(machine, checkpoint_id, slot))

    @property
    def trouble(self) -> str:
        """Why the last try to make a snapshot durable failed; "" where none did."""
        return next((each.machine.trouble for each in self._pending_now() if each.machine.trouble), "")

    def look_at(self, slot: Slot) -> None:
        """Look at once what became of the save in `slot`, which is about to be filled anew."""
        for pending in self._pending_now():
            if pending.slot is slot:
                self._look(pending)

    def end_given_up(self, checkpoint_ids: Collection[str]) -> None:
        """Tell the saves of `checkpoint_ids` that all ranks gave them up."""
        for pending in self._pending_now():
            if pending.checkpoint_id in checkpoint_ids:
                pending.machine.fail(incomplete(pending.machine.step))

    def ids_beyond(self, reached: Place | None) -> list[str]:
        """Ids of the checkpoints that are watched for places after `reached` (None: for all places)."""
        return [
            pending.checkpoint_id
            for pending in self._pending_now()
            if pending.machine.place is not None and (reached is None or pending.machine.place > reached)
        ]

    def close(self) -> None:
        """End watching. What is staged stays, and is made durable by the keeper: whoever waits for that here is told.
        Nothing is being copied any more."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
        for pending in self._pending_now():
            self._look(pending)
            pending.machine.leave(unwatched(pending.machine.step))

    def _pending_now(self) -> list[_Pending]:
        with self._lock:
            return list(self._pending)

    def _watch(self) -> None:
        pause_s, look_further_at = _LOOK_FURTHER_S, 0.0
        while not self._closed.wait(_LOOK_S):
            waiting = self._pending_now()
            if (waiting or not self.given_up.is_told) and time.monotonic() > look_further_at:
                self.given_up.tell_keeper()
                is_sound = self._look_further(waiting)
                pause_s = _LOOK_FURTHER_S if is_sound else min(2 * pause_s, _LOOK_FURTHER_AT_MOST_S)
                look_further_at = time.monotonic() + pause_s
            for pending in waiting:
                self._look(pending)
            self.memory.give_back()

    def _look(self, pending: _Pending) -> None:
        machine, slot = pending.machine, pending.slot
        if slot is not None and not machine.is_over:
            self._look_at_slot(machine, pending.checkpoint_id, slot)
        if machine.is_over:
            with self._lock:
                if pending in self._pending:
                    self._pending.remove(pending)

    def _look_at_slot(self, machine: SaveMachine, checkpoint_id: str, slot: Slot) -> None:
        record = slot.refresh()
        contents = record.contents
        if slot.is_damaged:
            self.given_up.fail(checkpoint_id)
            machine.fail(removed(machine.step))
        elif contents is None or contents.checkpoint_id != checkpoint_id:
            machine.fail(incomplete(machine.step))
        elif record.state == SlotState.COMMITTED:
            machine.commit(contents.nbytes)
        elif record.state == SlotState.FENCED:
            machine.fail(superseded(machine.step, record.error))
        elif slot.is_removed and not self.memory.used.has_keeper:
            # Nobody else can open it any more, and the keeper that had it mapped is dead.
            self.given_up.fail(checkpoint_id)
            machine.fail(removed(machine.step))
        else:
            if record.state == SlotState.SEALED:
                machine.seal()
            if record.error:
                machine.delay(record.error)

    def _look_further(self, waiting: Sequence[_Pending]) -> bool:
        """Look whether there is a keeper that makes what is waited for durable; and in storage, whether that is
        committed which this rank took part in without a slot to look at. Whether that could be looked at."""
        memory = self.memory.current
        try:
            # Of memory that was removed, the keeper that has it mapped makes it durable, or nobody can.
            if memory is not None and not memory.is_removed:
                with unusable_memory(memory.folder.path):
                    ensure_keeper(memory.folder, self._run.url)
            with TimedStore(open_store(self._run), timeout_s=_STORE_TIMEOUT_S) as storage:
                for machine in [pending.machine for pending in waiting if pending.slot is None]:
                    assert machine.place is not None
                    if storage.nbytes(records.commit_key(machine.place)) is not None:
                        machine.commit()
        except Exception as error:  # noqa: BLE001
            # Whatever it is, the thread goes on: saves would never hear of their ends.
            if not isinstance(error, HoldfastError):
                _log.exception("nobody can look now whether a keeper makes snapshots durable; that is tried again")
            for pending in waiting:
                pending.machine.delay(str(error))
            return False
        return True
