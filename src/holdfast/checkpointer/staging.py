"""One rank's way from an agreed plan to a staged slot."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from errno import ENOENT
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from holdfast.agreement.assignment import WriteAssignment
from holdfast.checkpoint.reading import pack_values
from holdfast.checkpointer.backoff import Backoff
from holdfast.checkpointer.messages import Agreed, MemoryStatus
from holdfast.checkpointer.save_errors import is_unusable, unusable
from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.checkpointer.watcher import Watcher
from holdfast.errors import DeadlineError, ErrorWire, HoldfastError, StorageError, to_wire
from holdfast.format import manifest as fmt
from holdfast.format.container import FileLayout
from holdfast.format.records import Place
from holdfast.format.values import Node
from holdfast.keeper.client import ensure_keeper
from holdfast.node_memory.arena import Register
from holdfast.node_memory.generations import Generation, write_generation
from holdfast.node_memory.node_folder import memory_error, unusable_memory
from holdfast.node_memory.slots import Contents, Slot, SlotRecord, SlotState
from holdfast.snapshot.device import registered
from holdfast.snapshot.guard import Guard
from holdfast.snapshot.routes import RoutedPart, Routes
from holdfast.store.base import Location

_log = logging.getLogger(__name__)


class Stager:
    """Fills the slots of one rank: has room for snapshots, hands them to the keeper, and gives up what failed.

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
        self._watcher = Watcher(run, node_dir, rank=rank)
        self._memory = self._watcher.memory
        self._given_up = self._watcher.given_up
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
        memory = self._memory.used
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
            given_up=self._given_up.failed,
            is_as_before=False,
            reached=self.last,
            has_looked=has_looked,
            backoff=backoff,
            held_up=self._watcher.trouble,
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
        memory = self._memory.opened(num_slots=self.num_slots)
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

    def retire(self) -> None:
        """Give memory back: what holds nothing that is still to become durable at once, the rest as soon as it is.
        Nothing is being copied any more. The next `standing` opens memory anew."""
        self._routes.clear()
        self._prepared_nbytes, self.run_id = -1, None
        self._memory.retire()

    def belong_to(self, run_id: str) -> None:
        """Know the run: what memory holds of an earlier one at the same path, which was removed, is given up."""
        self.run_id = run_id
        self._forget(lambda contents: contents.run_id != run_id, "of a run that was removed")

    def give_up(self, checkpoint_ids: Sequence[str]) -> None:
        """Have this node free what it holds of checkpoints that can never be whole."""
        news = self._given_up.hear(checkpoint_ids)
        if self._partless is not None and self._partless[1] in news:
            self._partless = None
        self._watcher.end_given_up(news)
        self._given_up.tell_keeper()

    def give_up_beyond(self, reached: Place | None) -> None:
        """Give up what this process staged for places after `reached`. Some rank has no part there, because it never
        heard of them: the answer came too late, say."""
        self.give_up(self._watcher.ids_beyond(reached))

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

    def finish(self, machine: SaveMachine, agreed: Agreed, share: WriteAssignment, slot: Slot | None) -> None:
        """Hand what is copied into `slot` to the keeper, and watch what becomes of it."""
        nbytes = _nbytes(share)
        if slot is not None:
            manifest = share.manifest.encode()
            write_generation(
                self._memory.used.folder,
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
        machine.stage(nbytes)
        self._watcher.add(machine, agreed.checkpoint_id, slot)

    def fail(self, checkpoint_id: str, slot: Slot | None, error: BaseException | None = None) -> None:
        """Free `slot`, and have all ranks hear with the next save that this checkpoint can never be whole. Where it is
        the memory that failed, no rank uses it then."""
        # Read anew: an exception may have come between a change of the state and the note of it.
        if slot is not None and slot.refresh().state == SlotState.WRITING:
            slot.advance(SlotRecord(SlotState.FREE))
        if isinstance(error, OSError):
            self._trouble = memory_error(self.node_dir, error)
        self._given_up.fail(checkpoint_id)

    def watch(self) -> None:
        """See to it that a thread looks what becomes of what was handed over."""
        self._watcher.begin()

    def close(self) -> None:
        """End watching. What is staged stays, and is made durable by the keeper: whoever waits for that here is told.
        Nothing is being copied any more."""
        self._watcher.close()
        self.guard.unhook()
        self._routes.clear()
        self._memory.close()

    def _forget(self, is_foreign: Callable[[Contents], bool], why: str) -> None:
        """Give up what memory holds that is foreign to the history that this job saves into."""
        forgotten, cared_for = self._memory.used.arena.forget(is_foreign)
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
        arena = self._memory.used.arena
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
        self._watcher.look_at(slot)
        return slot


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
