"""One rank's way from an agreed plan to a staged slot, and what becomes of it then."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial
from threading import Event, Lock, Thread
from typing import Final, NamedTuple

import msgspec
import numpy as np
import torch

from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.messages import Agreed, Standing
from holdfast.errors import DeadlineError, FencedError, HoldfastError, StateError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.container import FileLayout
from holdfast.format.records import Place
from holdfast.format.values import Node
from holdfast.keeper.client import ensure_keeper
from holdfast.keeper.generations import Generation, give_up_generation, write_generation
from holdfast.keeper.node_folder import NodeFolder
from holdfast.keeper.process import Process
from holdfast.keeper.slots import Contents, Record, Slot, State
from holdfast.run.checkpoint import pack_values
from holdfast.run.paths import storage_at
from holdfast.saving.share import Share
from holdfast.staging.arena import Arena, Register
from holdfast.staging.device import registered
from holdfast.staging.guard import Guard
from holdfast.staging.guarded import Guarded
from holdfast.staging.routes import Part, Routes

#: How often it is looked at what became of a snapshot, and whether a slot is free.
_LOOK_S: Final = 0.025
_LOOK_FURTHER_S: Final = 0.2

_log = logging.getLogger(__name__)


class _Pending(NamedTuple):
    """A save whose end is waited for; `slot` is None on a rank that has no data file."""

    handle: Handle
    checkpoint_id: str
    slot: Slot | None


class Stager:
    """The memory of one rank: has room for snapshots in it, hands them to the keeper, and watches what becomes of them.

    Used by one thread at a time. `close` leaves all that is staged where it is.
    """

    def __init__(self, folder: NodeFolder, run: str, *, rank: int, num_slots: int) -> None:
        self.guard = Guard()
        self.guarded = Guarded()
        self._folder = folder
        self._run = run
        self._rank = rank
        self._arena = Arena(folder, rank=rank, num_slots=num_slots)
        self._prepared_nbytes = -1
        self._register: Register | None = None
        #: By name of the slot, all of one plan.
        self._routes: dict[str, Routes] = {}
        self._routes_plan_id = ""
        self._lock = Lock()
        self._pending: list[_Pending] = []
        self._given_up: list[str] = []
        self._closed = Event()
        self._watcher = Thread(target=self._watch, name="holdfast-watch", daemon=True)
        self._watcher.start()
        #: The last place that was agreed on with this rank, and the run of what its memory holds; None before it is
        #: known.
        self.last: Place | None = None
        self.run_id: str | None = None

    def fits(self, share: Share) -> bool:
        """Whether there are slots for data files of this size."""
        return _nbytes(share) <= self._prepared_nbytes

    def prepare(self, share: Share, *, device: torch.device | None, timeout_s: float) -> None:
        """Have slots for data files of this size, registered with `device` if there is one; returns when there is a
        slot, which takes a second per GiB or so. The others are made in the background.

        Raises:
            ConfigurationError: there is not enough memory; says what bounds it.
            DeadlineError: it took longer than `timeout_s`.
        """
        ensure_keeper(self._folder, self._run)
        nbytes = _nbytes(share)
        self._register = None if device is None else partial(registered, device=device)
        if nbytes:
            self._arena.prepare(nbytes, register=self._register)
            if not self._arena.wait_for_one(timeout_s):
                raise DeadlineError(
                    f"The memory for snapshots of rank {self._rank} was not ready within {timeout_s:.0f} s.",
                    code="timeout.memory",
                    action="Raise timeout_s, or keep fewer generations.",
                    rank=self._rank,
                )
            if self._arena.error is not None:
                raise self._arena.error
        self._prepared_nbytes = nbytes

    def standing(self, *, is_as_before: bool) -> Standing:
        """How the memory of this rank stands; its state `is_as_before`, or not.

        A keeper that is gone is replaced here, since nothing else becomes free; and so are slots that somebody has
        removed.

        Raises:
            ConfigurationError: there was not enough memory for all slots; says what bounds it.
        """
        ensure_keeper(self._folder, self._run)
        if self._arena.error is not None:
            raise self._arena.error
        if self._arena.is_short:
            self._routes.clear()
            self._arena.prepare(self._prepared_nbytes, register=self._register)
        with self._lock:
            given_up, self._given_up = tuple(self._given_up), []
        if self._prepared_nbytes == 0:
            return Standing(self.last, is_free=True, oldest=None, given_up=given_up, is_as_before=is_as_before)
        is_free, oldest = self._arena.oldest()
        return Standing(
            self._arena.newest_sealed(), is_free=is_free, oldest=oldest, given_up=given_up, is_as_before=is_as_before
        )

    def belong_to(self, run_id: str) -> None:
        """Know the run: what memory holds of an earlier one at the same path, which was removed, is given up."""
        self.run_id = run_id
        self.give_up(self._arena.forget_others(run_id))

    def give_up(self, checkpoint_ids: Sequence[str]) -> None:
        """Have this node free what it holds of checkpoints that can never be whole."""
        for checkpoint_id in checkpoint_ids:
            give_up_generation(self._folder, checkpoint_id)
            for pending in self._pending_now():
                if pending.checkpoint_id == checkpoint_id:
                    pending.handle.durable.end(_incomplete(pending.handle.step))

    def begin(
        self, agreed: Agreed, share: Share, values: Mapping[str, Node], *, needed: Place | None
    ) -> tuple[Slot, Routes] | None:
        """A slot for this rank's part of what was agreed on, with its values written, and the routes into it. None
        where this rank has no data file."""
        self.last, self.run_id = agreed.place, agreed.run_id
        layout = share.layout
        if layout is None:
            return None
        slot: Slot | None = None
        try:
            slot = self._free_slot(needed)
            slot.advance(Record(State.WRITING, Process.current()))
            _write_values(slot, layout, values)
            return slot, self._routes_of(share, layout, slot)
        except BaseException:
            self.fail(agreed.checkpoint_id, slot)
            raise

    def finish(self, handle: Handle, agreed: Agreed, share: Share, slot: Slot | None) -> None:
        """Hand what is copied into `slot` to the keeper, and watch what becomes of it."""
        nbytes = _nbytes(share)
        if slot is not None:
            assert share.layout is not None
            manifest = share.manifest.encode()
            write_generation(
                self._folder,
                Generation(self._run, agreed.folder, agreed.checkpoint_id, agreed.place, agreed.step, manifest),
            )
            contents = Contents(
                agreed.run_id,
                agreed.checkpoint_id,
                agreed.place,
                agreed.step,
                share.layout.index,
                share.layout.data_start,
                nbytes,
            )
            slot.advance(Record(State.STAGED, slot.record.writer, contents))
        handle.staged.end(nbytes=nbytes)
        with self._lock:
            self._pending.append(_Pending(handle, agreed.checkpoint_id, slot))

    def fail(self, checkpoint_id: str, slot: Slot | None) -> None:
        """Free `slot`, and have all ranks hear with the next save that this checkpoint can never be whole."""
        if slot is not None and slot.state == State.WRITING:
            slot.advance(Record(State.FREE))
        with self._lock:
            self._given_up.append(checkpoint_id)

    @property
    def is_awaited(self) -> bool:
        """Whether anything is not known to be durable, or lost."""
        return bool(self._pending_now())

    def close(self) -> None:
        """End watching. What is staged stays, and is made durable by the keeper. Nothing is being copied any more."""
        self._closed.set()
        self._watcher.join()
        self.guard.unhook()
        self._routes.clear()
        self._arena.close()
        self._folder.close()

    def _routes_of(self, share: Share, layout: FileLayout, slot: Slot) -> Routes:
        """The routes into `slot`, which hold as long as the plan does."""
        if share.plan_id != self._routes_plan_id:
            self._routes, self._routes_plan_id = {}, share.plan_id
        if slot.name not in self._routes:
            names = share.manifest.body.names
            parts = [
                Part(names[entry.tensor], entry.part, layout.data_start + entry.offset) for entry in layout.entries
            ]
            self._routes[slot.name] = Routes(parts, slot.data, rank=self._rank)
        return self._routes[slot.name]

    def _free_slot(self, needed: Place | None) -> Slot:
        """A slot to fill: that there is one was agreed on, but where the plan is new, and so may be the slots."""
        self._arena.remove_retired(needed)
        slot = self._arena.reusable(needed)
        assert slot is not None, "ranks agreed that there is room"
        for pending in self._pending_now():
            if pending.slot is slot:
                self._look(pending)
        return slot

    def _pending_now(self) -> list[_Pending]:
        with self._lock:
            return list(self._pending)

    def _watch(self) -> None:
        look_further_at = 0.0
        while not self._closed.wait(_LOOK_S):
            waiting = self._pending_now()
            if waiting and time.monotonic() > look_further_at:
                look_further_at = time.monotonic() + _LOOK_FURTHER_S
                self._look_further(
                    [pending.handle for pending in waiting], [p.handle for p in waiting if p.slot is None]
                )
            for pending in waiting:
                self._look(pending)

    def _look(self, pending: _Pending) -> None:
        handle, slot = pending.handle, pending.slot
        if slot is not None:
            record = slot.refresh()
            contents = record.contents
            if contents is None or contents.checkpoint_id != pending.checkpoint_id:
                handle.durable.end(_incomplete(handle.step))
            elif record.state == State.COMMITTED:
                handle.durable.end(nbytes=contents.nbytes)
            elif record.state == State.SUPERSEDED:
                handle.durable.end(_superseded(handle.step, record.error))
            elif record.error and record.error != handle.trouble:
                handle.trouble = record.error
                _log.warning("step %d is not durable yet, and is tried again: %s", handle.step, record.error)
        if handle.durable.is_over:
            with self._lock:
                if pending in self._pending:
                    self._pending.remove(pending)

    def _look_further(self, handles: Sequence[Handle], without_slots: Sequence[Handle]) -> None:
        """Whether there is a keeper that makes `handles` durable. And in storage, for what this rank took part in
        without a slot to look at, whether it is committed."""
        try:
            ensure_keeper(self._folder, self._run)
            for handle in without_slots:
                assert handle.place is not None
                if storage_at(self._run).nbytes(records.commit_key(handle.place)) is not None:
                    handle.durable.end()
        except HoldfastError as error:
            for handle in handles:
                handle.trouble = str(error)


def next_share(agreed: Agreed, known: Share | None, rank: int) -> Share:
    """The share of `rank` in what was agreed on; `known` is the last one."""
    if agreed.manifest:
        return Share.in_manifest(agreed.plan_id, fmt.decode(agreed.manifest, path=agreed.folder), rank)
    assert known is not None
    assert known.plan_id == agreed.plan_id
    body = msgspec.structs.replace(
        known.manifest.body,
        checkpoint_id=agreed.checkpoint_id,
        run_id=agreed.run_id,
        place=(agreed.place.epoch, agreed.place.seq),
        step=agreed.step,
        created=agreed.created,
        metrics=agreed.metrics,
        diverged=agreed.diverged,
    )
    return Share(known.plan_id, known.manifest.with_body(body), known.layout, known.turn + 1)


def _nbytes(share: Share) -> int:
    return 0 if share.layout is None else share.layout.data_start + share.layout.data_nbytes


def _write_values(slot: Slot, layout: FileLayout, values: Mapping[str, Node]) -> None:
    if layout.values is not None:
        packed = pack_values(dict(values), capacity=layout.values.capacity)
        start = layout.data_start + layout.values_offset
        slot.data[start : start + len(packed)] = np.frombuffer(packed, np.uint8)


def _incomplete(step: int) -> StateError:
    return StateError(
        f"step {step} was given up: the copy of some rank failed, so it can never be whole.",
        code="state.incomplete",
        action="See the log of that rank; the next save is another chance.",
        step=step,
    )


def _superseded(step: int, why: str) -> HoldfastError:
    if why:
        return FencedError(
            f"step {step} is not committed: {why}", code="fenced.epoch", action="Stop this job.", step=step
        )
    return _incomplete(step)
