"""One rank's way from an agreed plan to a staged slot, and what becomes of it then."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from errno import ENOENT
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch

from holdfast.agreement.assignment import WriteAssignment
from holdfast.checkpoint.reading import pack_values
from holdfast.checkpointer.backoff import Backoff
from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.messages import Agreed, MemoryStatus
from holdfast.checkpointer.save_errors import (
    incomplete,
    is_unusable,
    not_yet_given_back,
    removed,
    superseded,
    unusable,
    unwatched,
)
from holdfast.errors import (
    DeadlineError,
    ErrorWire,
    HoldfastError,
    StorageError,
    to_wire,
)
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.container import FileLayout
from holdfast.format.records import Place
from holdfast.format.values import Node
from holdfast.keeper.client import ensure_keeper
from holdfast.latch import Latch
from holdfast.node_memory.arena import Arena, Register
from holdfast.node_memory.generations import Generation, give_up_generation, write_generation
from holdfast.node_memory.keeper_lock import is_locked, open_lock
from holdfast.node_memory.node_folder import NodeFolder, memory_error, unusable_memory
from holdfast.node_memory.slots import Contents, Slot, SlotRecord, SlotState
from holdfast.snapshot.device import registered
from holdfast.snapshot.guard import Guard
from holdfast.snapshot.routes import RoutedPart, Routes
from holdfast.store.base import Location
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

#: How often it is looked at what became of a snapshot, and whether a slot is free.
_LOOK_S: Final = 0.025
_LOOK_FURTHER_S: Final = 0.2
#: How long storage may take to answer the watcher, for which `close` waits.
_STORE_TIMEOUT_S: Final = 5.0
#: How many failed checkpoints a rank tells of, and how many that it has heard of it remembers.
_NUM_TOLD: Final = 8
_NUM_HEARD: Final = 4096
#: While no keeper can be had, that is tried again after twice as long each time, up to this.
_LOOK_FURTHER_AT_MOST_S: Final = 10.0

_log = logging.getLogger(__name__)


class _Pending(NamedTuple):
    """A save whose end is waited for; `slot` is None on a rank that has no data file."""

    handle: Handle
    checkpoint_id: str
    slot: Slot | None


class _RankMemory:
    """A rank's part of the memory of its node, as it is opened: what is in it outlives this object.

    Raises `ConfigurationError` where the folder is not this user's alone, and OSError.
    """

    def __init__(self, run: Location, node_dir: Path, *, rank: int, num_slots: int) -> None:
        with ExitStack() as stack:
            self.folder = stack.enter_context(NodeFolder(run.url, node_dir=node_dir))
            # First: its claim keeps the folder, and makes it anew where the keeper of an ended job is removing it.
            self.arena = Arena(self.folder, rank=rank, num_slots=num_slots)
            stack.callback(self.arena.close)
            #: The file that the keeper locks. It tells whether that one is alive even when its name is gone.
            self.lock = open_lock(self.folder)
            stack.pop_all()

    @property
    def is_removed(self) -> bool:
        """Whether somebody has removed it from the node: a process that comes later finds nothing in it."""
        return os.fstat(self.lock).st_nlink == 0

    def close(self) -> None:
        self.arena.close()
        os.close(self.lock)
        self.folder.close()


class Stager:
    """The memory of one rank: has room for snapshots in it, hands them to the keeper, and watches what becomes of them.

    Memory is opened when a save asks how it stands, and again after `retire`. Used by one thread at a time. `close`
    leaves all that is staged where it is.
    """

    def __init__(self, run: Location, node_dir: Path, *, rank: int, num_slots: int) -> None:
        self.guard = Guard()
        self._run = run
        self.node_dir = node_dir
        self._rank = rank
        #: May be raised; whoever saves next takes more memory then.
        self.num_slots = num_slots
        #: None before it is opened, and when all of it was given back. Whoever changes that has the lock below.
        self._memory: _RankMemory | None = None
        self._memory_lock = Lock()
        self._is_retired = False
        #: Whether memory could be used once: what hinders that later is no mistake of whoever set it up.
        self._was_used = False
        #: What made the last copy fail, to be told to all ranks by the next save.
        self._trouble: StorageError | None = None
        self._prepared_nbytes = -1
        self._prepared_slots = 0
        self._register: Register | None = None
        #: By name of the slot, all of one plan.
        self._routes: dict[str, Routes] = {}
        self._routes_plan_id = ""
        self._lock = Lock()
        self._pending: list[_Pending] = []
        #: Checkpoints whose copy failed here. Each save tells all ranks of the last ones, not only the next one, since
        #: the exchange that told it may have failed on some rank. And those that this rank has heard of.
        self._given_up: deque[str] = deque(maxlen=_NUM_TOLD)
        self._heard: deque[str] = deque(maxlen=_NUM_HEARD)
        #: Checkpoints that all ranks gave up, and the keeper of this node was not told of yet.
        self._untold: set[str] = set()
        self._closed = Latch()
        self._watcher: Thread | None = None
        #: The last place that was agreed on with this rank, and the run of what its memory holds; None before it is
        #: known.
        self.last: Place | None = None
        #: The first place that this job staged for.
        self._first: Place | None = None
        #: The last checkpoint of which this rank had nothing to write, so that no slot tells of it: its place, and id.
        self._partless: tuple[Place, str] | None = None
        self.run_id: str | None = None

    def fits(self, share: WriteAssignment) -> bool:
        """Whether there are slots for data files of this size, and as many as are wanted."""
        return _nbytes(share) <= self._prepared_nbytes and self._prepared_slots == self.num_slots

    def prepare(self, share: WriteAssignment, *, device: torch.device | None, timeout_s: float) -> None:
        """Have slots for data files of this size, registered with `device` if there is one; returns when there is a
        slot, which takes a second per GiB or so. The others are made in the background.

        Raises:
            ConfigurationError: there is not enough memory, and what bounds it; or there is no keeper.
            StorageError: the memory cannot be used.
            DeadlineError: it took longer than `timeout_s`.
        """
        memory = self._used
        with unusable_memory(memory.folder.path):
            ensure_keeper(memory.folder, self._run.url)
        nbytes = _nbytes(share)
        self._register = None if device is None else partial(registered, device=device)
        memory.arena.num_slots = self.num_slots
        if nbytes:
            memory.arena.prepare(nbytes, register=self._register)
            if not memory.arena.wait_for_one(timeout_s):
                raise DeadlineError(
                    f"The memory for snapshots of rank {self._rank} was not ready within {timeout_s:.0f} s.",
                    code="timeout.memory",
                    action="Raise timeout_s, or keep fewer generations.",
                    rank=self._rank,
                )
            if memory.arena.error is not None:
                raise memory.arena.error
        self._prepared_nbytes, self._prepared_slots = nbytes, self.num_slots

    def standing(
        self,
        *,
        is_as_before: bool,
        has_looked: bool,
        whole: Place | None,
        backoff: Backoff,
        put_off: ErrorWire | None = None,
    ) -> MemoryStatus:
        """How the memory of this rank stands; its state `is_as_before`, or not, and it `has_looked` at what memory held
        before this job, or not: then `whole` is the newest checkpoint that memory held whole.

        With `put_off`, memory is left alone, for that reason. Else memory that is not open is opened. A keeper that is
        gone is replaced, since nothing else becomes free; and so are slots that somebody has removed. What hinders all
        that is the `trouble` of the standing.

        Raises:
            ConfigurationError: memory could not be used from the beginning, because of how it was set up.
        """
        known = MemoryStatus(
            None,
            is_free=False,
            oldest=None,
            given_up=tuple(self._given_up),
            is_as_before=False,
            reached=self.last,
            has_looked=has_looked,
            backoff=backoff,
            held_up=next((each.handle.trouble for each in self._pending_now() if each.handle.trouble), ""),
        )
        if put_off is not None:
            return msgspec.structs.replace(known, trouble=put_off)
        try:
            trouble, self._trouble = self._trouble, None
            if trouble is not None:
                raise trouble
            with unusable_memory(self.node_dir):
                found = self._look_at_slots(known, whole)
        except HoldfastError as error:
            if not (self._was_used or is_unusable(error)):
                raise
            told = to_wire(error if is_unusable(error) else unusable(error))
            return msgspec.structs.replace(known, trouble=told)
        # Where there are no slots yet, a plan must be made known, and memory taken, before the save returns.
        return msgspec.structs.replace(found, is_as_before=is_as_before and self._prepared_nbytes >= 0)

    def _look_at_slots(self, known: MemoryStatus, whole: Place | None) -> MemoryStatus:
        """`known`, with what the slots say."""
        memory = self._opened()
        if memory.is_removed:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        ensure_keeper(memory.folder, self._run.url)
        self._was_used = True
        arena = memory.arena
        if arena.error is not None:
            raise arena.error
        if arena.is_short:
            self._routes.clear()
            arena.prepare(self._prepared_nbytes, register=self._register)
        if self._prepared_nbytes == 0:
            return msgspec.structs.replace(known, sealed=self.last, is_free=True)

        if known.has_looked:
            # What else is in a slot from before this job nobody goes back to: a rollback left it behind, or other parts
            # of it are gone or long replaced, since the last job ran without this rank, or without its node.
            arena.is_left = lambda contents: contents.place != whole and not self._is_of_this_job(contents.place)
        newest, (is_free, oldest) = arena.newest_sealed(), arena.oldest()
        mine = [newest] if newest is not None and self._is_of_this_job(newest) else []
        if self._partless is not None:
            mine.append(self._partless[0])  # all of its part is there
        sealed = max(mine, default=whole)
        return msgspec.structs.replace(known, sealed=sealed, is_free=is_free, oldest=oldest)

    def _is_of_this_job(self, place: Place) -> bool:
        """Whether this job staged the checkpoint at `place`."""
        return self._first is not None and place >= self._first

    def _opened(self) -> _RankMemory:
        """The memory of this rank, opened if it is not."""
        with self._memory_lock:
            if self._is_retired and self._memory is not None:
                if self._pending_now():
                    raise not_yet_given_back(self._memory.folder.path)
                self._drop_memory()
            if self._memory is None:
                node = self.node_dir
                self._memory = _RankMemory(self._run, node, rank=self._rank, num_slots=self.num_slots)
                self._is_retired = False
            return self._memory

    @property
    def _used(self) -> _RankMemory:
        assert self._memory is not None, "memory is opened before it is used"
        return self._memory

    def retire(self) -> None:
        """Give memory back: what holds nothing that is still to become durable at once, the rest as soon as it is.
        Nothing is being copied any more. The next `standing` opens memory anew."""
        self._routes.clear()
        self._prepared_nbytes, self.run_id = -1, None
        self._is_retired = True
        self._give_back()

    def _give_back(self) -> None:
        with self._memory_lock:
            if not self._is_retired or self._memory is None:
                return
            watched = [pending.slot for pending in self._pending_now() if pending.slot is not None]
            if self._memory.arena.give_back(watched=watched) and not self._pending_now():
                self._drop_memory()

    def _drop_memory(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def belong_to(self, run_id: str) -> None:
        """Know the run: what memory holds of an earlier one at the same path, which was removed, is given up."""
        self.run_id = run_id
        self._forget(lambda contents: contents.run_id != run_id, "of a run that was removed")

    def give_up(self, checkpoint_ids: Sequence[str]) -> None:
        """Have this node free what it holds of checkpoints that can never be whole."""
        unheard = [each for each in checkpoint_ids if each not in self._heard]
        self._heard.extend(unheard)
        self._untold.update(unheard)
        if self._partless is not None and self._partless[1] in unheard:
            self._partless = None
        for pending in self._pending_now():
            if pending.checkpoint_id in unheard:
                pending.handle.durable.end(incomplete(pending.handle.step))
        self._tell_given_up()

    def give_up_beyond(self, reached: Place | None) -> None:
        """Give up what this process staged for places after `reached`. Some rank has no part there, because it never
        heard of them: the answer came too late, say."""
        self.give_up(
            [
                pending.checkpoint_id
                for pending in self._pending_now()
                if pending.handle.place is not None and (reached is None or pending.handle.place > reached)
            ]
        )

    def _tell_given_up(self) -> None:
        """Tell the keeper which checkpoints were given up. Where memory takes no file now, the watcher tries later."""
        with self._memory_lock:
            memory = self._memory
            if memory is None or memory.is_removed:
                self._untold.clear()  # nothing of them is there any more
                return
            for checkpoint_id in list(self._untold):
                with suppress(OSError):
                    give_up_generation(memory.folder, checkpoint_id)
                    self._untold.discard(checkpoint_id)

    def slot_for(self, agreed: Agreed, share: WriteAssignment, *, needed: Place | None) -> Slot | None:
        """A slot for this rank's part of what was agreed on. None where this rank has no data file."""
        if self.run_id != agreed.run_id:
            self.belong_to(agreed.run_id)
        # Places rise along a history, so what has this one, or a later one, is of another.
        self._forget(lambda contents: contents.place >= agreed.place, "of another history than storage has")
        if self._partless is not None and self._partless[0] >= agreed.place:
            self._partless = None
        self.last = agreed.place
        if self._first is None or self.last < self._first:
            self._first = self.last
        if needed is not None and needed >= agreed.place:
            needed = None
        return None if share.layout is None else self._free_slot(needed)

    def begin(self, slot: Slot, agreed: Agreed, share: WriteAssignment, values: Mapping[str, Node]) -> Routes:
        """Begin to fill `slot`: with the values, and the routes into it for the rest."""
        layout = share.layout
        assert layout is not None
        contents = Contents(
            agreed.run_id,
            agreed.checkpoint_id,
            agreed.place,
            agreed.step,
            layout.index,
            layout.data_start,
            _nbytes(share),
        )
        slot.advance(SlotRecord(SlotState.WRITING, contents))
        _write_values(slot, layout, values)
        return self._routes_of(share, layout, slot)

    def finish(self, handle: Handle, agreed: Agreed, share: WriteAssignment, slot: Slot | None) -> None:
        """Hand what is copied into `slot` to the keeper, and watch what becomes of it."""
        nbytes = _nbytes(share)
        if slot is not None:
            manifest = share.manifest.encode()
            write_generation(
                self._used.folder,
                Generation(
                    self._run.url,
                    agreed.folder,
                    agreed.checkpoint_id,
                    agreed.place,
                    agreed.step,
                    manifest,
                    agreed.incarnation,
                    self._run.options,
                ),
            )
            slot.advance(msgspec.structs.replace(slot.record, state=SlotState.STAGED))
        else:
            self._partless = (agreed.place, agreed.checkpoint_id)
        handle.staged.end(nbytes=nbytes)
        with self._lock:
            self._pending.append(_Pending(handle, agreed.checkpoint_id, slot))

    def fail(self, checkpoint_id: str, slot: Slot | None, error: BaseException | None = None) -> None:
        """Free `slot`, and have all ranks hear with the next save that this checkpoint can never be whole. Where it is
        the memory that failed, no rank uses it then."""
        # Read anew: an exception may have come between a change of the state and the note of it.
        if slot is not None and slot.refresh().state == SlotState.WRITING:
            slot.advance(SlotRecord(SlotState.FREE))
        if isinstance(error, OSError):
            self._trouble = memory_error(self.node_dir, error)
        if checkpoint_id not in self._given_up:
            self._given_up.append(checkpoint_id)

    def close(self) -> None:
        """End watching. What is staged stays, and is made durable by the keeper: whoever waits for that here is told.
        Nothing is being copied any more."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
        for pending in self._pending_now():
            self._look(pending)
            pending.handle.durable.end(unwatched(pending.handle.step))
        self.guard.unhook()
        self._routes.clear()
        self._give_back()
        self._drop_memory()

    def _forget(self, is_foreign: Callable[[Contents], bool], why: str) -> None:
        """Give up what memory holds that is foreign to the history that this job saves into."""
        forgotten, cared_for = self._used.arena.forget(is_foreign)
        if forgotten:
            steps = ", ".join(map(str, sorted(contents.step for contents in forgotten)))
            _log.warning("memory held steps %s %s ('%s'): they are let go", steps, why, self._run)
        self.give_up(cared_for)

    def _routes_of(self, share: WriteAssignment, layout: FileLayout, slot: Slot) -> Routes:
        """The routes into `slot`, which hold as long as the plan does."""
        if share.plan_id != self._routes_plan_id:
            self._routes, self._routes_plan_id = {}, share.plan_id
        if slot.name not in self._routes:
            names = share.manifest.body.names
            parts = [
                RoutedPart(names[entry.tensor], entry.part, layout.data_start + entry.offset)
                for entry in layout.entries
            ]
            self._routes[slot.name] = Routes(parts, slot.data, rank=self._rank)
        return self._routes[slot.name]

    def _free_slot(self, needed: Place | None) -> Slot:
        """A slot to fill: that there is one was agreed on, but where the plan is new, and so may be the slots."""
        arena = self._used.arena
        arena.remove_retired(needed)
        slot = arena.take(needed)
        if slot is None:  # ranks agreed that there is room
            raise StorageError(
                f"Another process has taken the memory of rank {self._rank} since.",
                code="storage.memory",
                action="Have one job at a time save into a run; the next save is another chance.",
                rank=self._rank,
                retryable=True,
            )
        for pending in self._pending_now():
            if pending.slot is slot:
                self._look(pending)
        return slot

    def _pending_now(self) -> list[_Pending]:
        with self._lock:
            return list(self._pending)

    def watch(self) -> None:
        """See to it that a thread looks what becomes of what was handed over."""
        if self._watcher is None or not self._watcher.is_alive():
            self._watcher = Thread(target=self._watch, name="holdfast-watch", daemon=True)
            self._watcher.start()

    def _watch(self) -> None:
        pause_s, look_further_at = _LOOK_FURTHER_S, 0.0
        while not self._closed.wait(_LOOK_S):
            waiting = self._pending_now()
            if (waiting or self._untold) and time.monotonic() > look_further_at:
                self._tell_given_up()
                is_sound = self._look_further(waiting)
                pause_s = _LOOK_FURTHER_S if is_sound else min(2 * pause_s, _LOOK_FURTHER_AT_MOST_S)
                look_further_at = time.monotonic() + pause_s
            for pending in waiting:
                self._look(pending)
            self._give_back()

    def _look(self, pending: _Pending) -> None:
        handle, slot = pending.handle, pending.slot
        if slot is not None and not handle.durable.is_over:
            record = slot.refresh()
            contents = record.contents
            if slot.is_damaged:
                self.fail(pending.checkpoint_id, slot)
                handle.durable.end(removed(handle.step))
            elif contents is None or contents.checkpoint_id != pending.checkpoint_id:
                handle.durable.end(incomplete(handle.step))
            elif record.state == SlotState.COMMITTED:
                handle.durable.end(nbytes=contents.nbytes)
            elif record.state == SlotState.FENCED:
                handle.durable.end(superseded(handle.step, record.error))
            elif slot.is_removed and not is_locked(self._used.lock):
                # Nobody else can open it any more, and the keeper that had it mapped is dead.
                self.fail(pending.checkpoint_id, slot)
                handle.durable.end(removed(handle.step))
            elif record.error and record.error != handle.trouble:
                handle.durable.trouble = record.error
                _log.warning("step %d is not durable yet, and is tried again: %s", handle.step, record.error)
        if handle.durable.is_over:
            with self._lock:
                if pending in self._pending:
                    self._pending.remove(pending)

    def _look_further(self, waiting: Sequence[_Pending]) -> bool:
        """Look whether there is a keeper that makes what is waited for durable; and in storage, whether that is
        committed which this rank took part in without a slot to look at. Whether that could be looked at."""
        memory = self._memory
        try:
            # Of memory that was removed, the keeper that has it mapped makes it durable, or nobody can.
            if memory is not None and not memory.is_removed:
                with unusable_memory(memory.folder.path):
                    ensure_keeper(memory.folder, self._run.url)
            with TimedStore(open_store(self._run), timeout_s=_STORE_TIMEOUT_S) as storage:
                for handle in [pending.handle for pending in waiting if pending.slot is None]:
                    assert handle.place is not None
                    if storage.nbytes(records.commit_key(handle.place)) is not None:
                        handle.durable.end()
        except Exception as error:  # noqa: BLE001
            # Whatever it is, the thread goes on: handles would never hear of their ends.
            if not isinstance(error, HoldfastError):
                _log.exception("nobody can look now whether a keeper makes snapshots durable; that is tried again")
            for pending in waiting:
                pending.handle.durable.trouble = str(error)
            return False
        return True


def next_share(agreed: Agreed, known: WriteAssignment | None, rank: int) -> WriteAssignment:
    """The share of `rank` in what was agreed on; `known` is the last one."""
    if agreed.manifest:
        return WriteAssignment.in_manifest(agreed.plan_id, fmt.decode(agreed.manifest, path=agreed.folder), rank)
    assert known is not None
    assert known.plan_id == agreed.plan_id
    return known.again(
        checkpoint_id=agreed.checkpoint_id,
        run_id=agreed.run_id,
        place=(agreed.place.epoch, agreed.place.seq),
        step=agreed.step,
        created=agreed.created,
        metrics=agreed.metrics,
        diverged=agreed.diverged,
    )


def _nbytes(share: WriteAssignment) -> int:
    return 0 if share.layout is None else share.layout.data_start + share.layout.data_nbytes


def _write_values(slot: Slot, layout: FileLayout, values: Mapping[str, Node]) -> None:
    if layout.values is not None:
        packed = pack_values(dict(values), capacity=layout.values.capacity)
        start = layout.data_start + layout.values_offset
        slot.data[start : start + len(packed)] = np.frombuffer(packed, np.uint8)
