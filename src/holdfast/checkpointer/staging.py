"""One rank's steps from an agreed plan to a staged slot."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from errno import ENOENT
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from holdfast.agreement.assignment import StoredShare, WriteAssignment
from holdfast.checkpoint.stored_checkpoint import pack_values
from holdfast.checkpointer.backoff import Backoff
from holdfast.checkpointer.parallel_groups import parallel_groups
from holdfast.checkpointer.peer_meeting import CopiesLeft, PeerMeeting, ProtectedPart, ProtectionRules
from holdfast.checkpointer.save_errors import is_unusable, unprotected, unusable
from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.checkpointer.snapshot_messages import Agreed, MemoryStatus
from holdfast.checkpointer.watcher import Watcher
from holdfast.control.channel import Channel
from holdfast.control.deadline import Deadline
from holdfast.errors import DeadlineError, ErrorWire, HoldfastError, StorageError, to_wire
from holdfast.format import manifest as fmt
from holdfast.format.container import ALIGNMENT, FileLayout
from holdfast.format.records import Place
from holdfast.format.values import Node
from holdfast.keeper.client import ensure_keeper, start_early
from holdfast.node_disk.disk_folder import own_folder, part_of, use_disk
from holdfast.node_memory.arena import Register
from holdfast.node_memory.claims import is_claimed
from holdfast.node_memory.generations import Generation, protected_ids, write_generation
from holdfast.node_memory.node_folder import NodeFolder, boot_id, memory_error, unusable_memory
from holdfast.node_memory.peering import forget_peers, noted_secret, peer_trouble
from holdfast.node_memory.slots import Contents, Slot, SlotFile, SlotRecord, SlotState, promote_all
from holdfast.snapshot.device import registered
from holdfast.snapshot.guard import Guard
from holdfast.snapshot.routes import RoutedPart, Routes
from holdfast.state.flatten import FlatState
from holdfast.store.base import Location
from holdfast.store.urls import text_of

_log = logging.getLogger(__name__)


class Stager:
    """Fills the slots of one rank: it prepares room for snapshots, hands them to the keeper, and gives up failed ones.

    `standing` opens the memory, and opens it again after `retire`. One thread at a time uses this object. `close`
    leaves all staged snapshots in place.
    """

    def __init__(self, run: Location, node_dir: Path, *, rank: int, num_slots: int) -> None:
        self.guard = Guard()
        self._run = run
        self.node_dir = node_dir
        #: The folder on a disk of the node to which data files go before they go to the run (None: to the run at once).
        self.disk: Path | None = None
        #: The folder on a disk that saves have used. If it cannot be used later, files go to the run at once.
        self._used_disk: Path | None = None
        self._rank = rank
        #: The wanted number of slots. It may be raised; the next save then takes more memory.
        self.num_slots = num_slots
        self._watcher = Watcher(run, node_dir, rank=rank)
        self._memory = self._watcher.memory
        self._given_up = self._watcher.given_up
        #: The meeting of the keepers that protect the slots; None where nothing asks for protection.
        self._meeting: PeerMeeting | None = None
        #: Whether memory could be used once. If it cannot be used later, its configuration is not the cause.
        self._was_used = False
        #: The error of memory that made the last copy fail; the next save tells all ranks.
        self._trouble: StorageError | None = None
        self._prepared_nbytes = -1
        self._prepared_slots = 0
        #: The size of the slots that are prepared early; -1 if none are.
        self._reserved_nbytes = -1
        self._register: Register | None = None
        #: The routes into each slot, by the slot's name; all are for one plan.
        self._routes: dict[str, Routes] = {}
        self._routes_plan_id = ""
        #: The last place that all ranks agreed on with this one; None before there is one.
        self.last: Place | None = None
        #: The first place that this job staged for.
        self.first: Place | None = None
        #: Place and id of the last checkpoint of which this rank had no part to write, and so has no slot.
        self._partless: tuple[Place, str] | None = None
        #: The id of the run that this rank's memory belongs to; None before it is known.
        self.run_id: str | None = None

    def protect(self, rules: ProtectionRules | None) -> None:
        """Have the slots protected by these rules, from the next plan on (None: as before)."""
        if rules is not None and (self._meeting is None or self._meeting.rules != rules):
            self._meeting = PeerMeeting(rules)

    def meet_peers(self, flat: FlatState, channel: Channel, deadline: Deadline) -> None:
        """Meet the keepers of the other nodes, if the slots are to be protected. Collective. Raises as
        `PeerMeeting.meet`."""
        folder = self._memory.used.folder
        if self._meeting is not None:
            self._meeting.meet(folder, self.protected_part(flat, channel), channel, deadline)
        elif noted_secret(folder) is not None:  # an earlier job wanted it, or a restore needed other nodes
            forget_peers(folder)

    @property
    def has_to_meet(self) -> bool:
        """Whether peers have to meet again, because they do not know where the keeper of this node listens now."""
        memory = self._memory.current
        with suppress(OSError):  # another thread is giving the memory back
            return self._meeting is not None and memory is not None and self._meeting.is_outdated(memory.folder)
        return False

    @property
    def policy(self) -> str:
        """The policy by which other nodes are to protect the slots, and whether it is required; "" for none."""
        if self._meeting is None:
            return ""
        rules = self._meeting.rules
        return f"{rules.policy!r}{' with require_protection=True' if rules.is_required else ''}"

    def protect_again(self, part: ProtectedPart, left: CopiesLeft | None, channel: Channel, deadline: Deadline) -> None:
        """After a restore, meet the keepers of the other nodes, so that they protect again what the nodes hold, with
        the copies that are `left` of lost ones, and take memory for copies. Collective."""
        assert self._meeting is not None
        run = text_of(self._run)
        # Without a claim: the other ranks of this node would take it for that of a job that trains.
        with NodeFolder(run, node_dir=self.node_dir) as folder:
            self._meeting.protect_again(folder, run, left, part, channel, deadline)

    def protected_part(self, flat: FlatState, channel: Channel) -> ProtectedPart:
        """This rank's part of a snapshot of the state `flat`."""
        groups = parallel_groups(flat.tensors.values(), rank=self._rank, world_size=channel.world_size)
        return ProtectedPart(self._rank, groups)

    def fits(self, share: StoredShare) -> bool:
        """Whether there are as many slots as wanted, each large enough for the data file of `share`."""
        return _nbytes(share) <= self._prepared_nbytes and self._prepared_slots == self.num_slots

    def reserve(self, nbytes: int, *, device: torch.device | None) -> None:
        """Begin to prepare slots for data files of up to `nbytes`, and to start a keeper, in the background, before any
        save asks for them. Does nothing once this process has used its memory, nor while another process has a claim
        to the slots of this rank: they may be those of a job that trains.

        Raises:
            ConfigurationError, StorageError, OSError: memory cannot be used. The first save meets the same error, and
                that of a keeper that does not start.
        """
        if nbytes <= 0 or self._memory.current is not None or self._is_anothers():
            return
        memory = self._memory.opened(num_slots=self.num_slots, reserves=True)
        start_early(memory.folder.path, text_of(self._run))
        self._was_used = True
        self._take_memory(nbytes, device, early=True)
        self._reserved_nbytes = nbytes

    @property
    def is_unused(self) -> bool:
        """Whether no save has used the memory of this rank."""
        return self.first is None and self._prepared_nbytes < 0

    def _is_anothers(self) -> bool:
        """Whether another process has a claim to the slots of this rank. (This one has none yet.)"""
        with NodeFolder(text_of(self._run), node_dir=self.node_dir) as folder:
            return is_claimed(folder, self._rank)

    def prepare(self, share: StoredShare, *, device: torch.device | None, timeout_s: float) -> None:
        """Prepare slots for the data file of `share`, and register them with `device` if there is one. Returns when the
        first slot is ready, which takes about a second per GiB unless `reserve` has begun early enough; a background
        thread prepares the others.

        Raises:
            ConfigurationError: there is too little memory (the error names the limit), no keeper could be started, or
                the folder on the disk cannot be used and never was.
            StorageError: the memory cannot be used.
            DeadlineError: it took longer than `timeout_s`.
        """
        memory = self._memory.used
        with unusable_memory(memory.folder.path):
            ensure_keeper(memory.folder, text_of(self._run))
        if self.disk is not None and self.disk != self._used_disk:
            own_folder(self.disk / share.manifest.body.run_id)
            self._used_disk = self.disk
        nbytes = _nbytes(share)
        if nbytes and not self._has_reserved(nbytes, device, timeout_s):
            if self._reserved_nbytes >= 0 and memory.arena.error is not None:
                memory.arena.remove_empty()  # the reservation may have asked for more than is needed
            self._take_memory(nbytes, device)
            self._await_slot(timeout_s)
            if memory.arena.error is not None:
                raise memory.arena.error
        self._prepared_nbytes, self._prepared_slots = nbytes, self.num_slots
        self._reserved_nbytes = -1

    def _has_reserved(self, nbytes: int, device: torch.device | None, timeout_s: float) -> bool:
        """Wait for the first slot that `reserve` prepares, if its slots are fit for data files of `nbytes`. Returns
        whether there is one."""
        arena = self._memory.used.arena
        if not self._is_reserved(nbytes, device):
            return False
        arena.count_on_early()
        self._await_slot(timeout_s)
        return arena.error is None

    def _is_reserved(self, nbytes: int, device: torch.device | None) -> bool:
        """Whether slots that `reserve` prepares, or has prepared, are fit for data files of `nbytes`."""
        arena = self._memory.used.arena
        is_registered = self._register is not None
        return (
            nbytes <= self._reserved_nbytes
            and arena.num_slots == self.num_slots
            and is_registered == (device is not None)
            and arena.error is None
            and not arena.is_short
        )

    def _take_memory(self, nbytes: int, device: torch.device | None, *, early: bool = False) -> None:
        """Begin to prepare slots of `nbytes`."""
        arena = self._memory.used.arena
        self._register = None if device is None else partial(registered, device=device)
        arena.num_slots = self.num_slots
        arena.prepare(nbytes, register=self._register, early=early)

    def _await_slot(self, timeout_s: float) -> None:
        if not self._memory.used.arena.wait_for_one(timeout_s):
            raise DeadlineError(
                f"The memory for snapshots of rank {self._rank} was not ready within {timeout_s:.0f} s.",
                code="timeout.memory",
                action="Raise timeout_s, or keep fewer generations.",
                rank=self._rank,
            )

    def standing(
        self,
        *,
        is_as_before: bool,
        has_looked: bool,
        whole: Place | None,
        backoff: Backoff,
        awaited: Place | None = None,
        put_off: ErrorWire | None = None,
    ) -> MemoryStatus:
        """The status of this rank's memory. `whole` is the newest checkpoint that memory held whole when this job
        looked at it, if it `has_looked`. `awaited` is the checkpoint that this job restored from memory, if the save
        waits for its commit. `MemoryStatus` explains the other arguments.

        With `put_off`, this does not touch memory, and reports `put_off` as the trouble. Otherwise it opens the memory
        if it is not open, starts a keeper if there is none, because only a keeper frees slots, and prepares slots anew
        in place of removed ones. An error in that becomes the `trouble` of the status.

        Raises:
            ConfigurationError: memory could never be used, because of its configuration.
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
                found = self._look_at_slots(known, whole, awaited)
        except HoldfastError as error:
            if not (self._was_used or is_unusable(error)):
                raise
            told = to_wire(error if is_unusable(error) else unusable(error))
            return msgspec.structs.replace(known, trouble=told)
        # As long as there are no slots, the save must wait until all ranks know the plan and have taken memory.
        return msgspec.structs.replace(found, is_as_before=is_as_before and self._prepared_nbytes >= 0)

    def _look_at_slots(self, known: MemoryStatus, whole: Place | None, awaited: Place | None) -> MemoryStatus:
        """`known`, completed with the state of the slots."""
        memory = self._memory.opened(num_slots=self.num_slots)
        if memory.is_removed and self.first is None:  # it was opened for a reservation, and holds nothing of this job
            self.retire()
            memory = self._memory.opened(num_slots=self.num_slots)
        if memory.is_removed:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        if self.disk is not None:
            use_disk(memory.folder, self.disk, self._run)
        ensure_keeper(memory.folder, text_of(self._run))
        self._was_used = True
        arena = memory.arena
        if self._prepared_nbytes >= 0 and arena.error is not None:
            raise arena.error
        if self._prepared_nbytes >= 0 and arena.is_short:
            self._routes.clear()
            arena.prepare(self._prepared_nbytes, register=self._register)
        if self._prepared_nbytes == 0:
            return msgspec.structs.replace(known, sealed=self.last, is_free=True)

        if known.has_looked:
            # No job will restore any other checkpoint that an earlier job left in a slot: a rollback left it behind, or
            # its other parts are gone or long replaced, because the last job ran without this rank or its node.
            arena.is_left = lambda contents: contents.place != whole and not self._is_of_this_job(contents.place)
            known = msgspec.structs.replace(known, has_left=arena.holds_for_keeper(arena.is_left))
        record = None if awaited is None else arena.record_at(awaited)
        if record is not None:
            fenced = (record.error or "fenced") if record.state == SlotState.FENCED else ""
            known = msgspec.structs.replace(known, held_up=known.held_up or record.error, fenced=fenced)
        arena.is_given_up = lambda contents: self._given_up.has(contents.checkpoint_id)
        is_safe = self._is_safe(memory.folder)
        newest = arena.newest_sealed(lambda contents: is_safe(contents.checkpoint_id))
        is_free, oldest = arena.oldest()
        mine = [newest] if newest is not None and self._is_of_this_job(newest) else []
        if self._partless is not None and is_safe(self._partless[1]):
            mine.append(self._partless[0])  # this rank has no part of it, so none is missing
        sealed = max(mine, default=whole)
        awaits_peers = oldest is not None and newest != arena.newest_sealed()
        return msgspec.structs.replace(known, sealed=sealed, is_free=is_free, oldest=oldest, awaits_peers=awaits_peers)

    def _is_safe(self, folder: NodeFolder) -> Callable[[str], bool]:
        """Whether a checkpoint that is sealed here makes older ones needless: it is protected, or is not to be. While
        the keeper finds that it cannot be, older ones do not wait for that."""
        if self._meeting is None or self._meeting.error is not None or peer_trouble(folder):
            return lambda _: True
        return protected_ids(folder).__contains__

    def _is_of_this_job(self, place: Place) -> bool:
        """Whether this job staged the checkpoint at `place`."""
        return self.first is not None and place >= self.first

    def retire(self) -> None:
        """Give memory back: at once the slots that need not become durable any more, the others once they are durable.
        Call it only when no save is copying. The next `standing` opens the memory again."""
        self._routes.clear()
        self._prepared_nbytes, self._reserved_nbytes, self.run_id = -1, -1, None
        self._memory.retire()

    def release_held(self) -> None:
        """A newer checkpoint is in storage: memory that is given back holds snapshots of saves to memory alone no
        longer."""
        self._memory.release_held()

    def belong_to(self, run_id: str) -> None:
        """Set the run that memory belongs to. Gives up checkpoints of an earlier run at the same path, which somebody
        removed."""
        self.run_id = run_id
        self._forget(lambda contents: contents.run_id != run_id, "of a run that was removed")

    def promote(self, checkpoint_id: str) -> None:
        """Have the keeper make a checkpoint durable that this node's memory may hold from a save to memory alone."""
        with unusable_memory(self.node_dir):
            memory = self._memory.opened(num_slots=self.num_slots)
            promote_all(memory.folder, checkpoint_id, is_meant=lambda slot: not slot.is_copy)

    def give_up(self, checkpoint_ids: Sequence[str]) -> None:
        """Give up checkpoints that can never be whole: end their saves here, and tell the keeper to free their
        slots."""
        news = self._given_up.hear(checkpoint_ids)
        if self._partless is not None and self._partless[1] in news:
            self._partless = None
        self._watcher.end_given_up(news)
        self._given_up.tell_keeper()

    def give_up_beyond(self, reached: Place | None) -> None:
        """Give up the checkpoints that this process staged for places after `reached`. Some rank never heard of them
        (its answer came too late, say), and so has no part of them."""
        memory = self._memory.current
        held = [] if memory is None else [each for each in memory.arena.held() if self._is_of_this_job(each.place)]
        beyond = [each.checkpoint_id for each in held if reached is None or each.place > reached]
        self.give_up([*self._watcher.ids_beyond(reached), *beyond])

    def slot_for(self, agreed: Agreed, share: StoredShare, *, needed: Place | None) -> Slot | None:
        """A slot for this rank's part of the `agreed` checkpoint. None if this rank has no data file."""
        if self.run_id != agreed.run_id:
            self.belong_to(agreed.run_id)
        # Places rise along a history, so a checkpoint in memory at this place or a later one is of another history.
        self._forget(lambda contents: contents.place >= agreed.place, "of a history that storage does not have")
        if self._partless is not None and self._partless[0] >= agreed.place:
            self._partless = None
        self.last = agreed.place
        if self.first is None or self.last < self.first:
            self.first = self.last
        if needed is not None and needed >= agreed.place:
            needed = None
        return self._free_slot(needed) if share.layouts else None

    def begin(self, slot: Slot, agreed: Agreed, share: StoredShare, values: Mapping[str, Node]) -> Routes:
        """Begin to fill `slot`: write the values, and return the routes for the tensors."""
        files = _files_in_slot(share)
        contents = Contents(
            agreed.run_id,
            agreed.checkpoint_id,
            agreed.place,
            agreed.step,
            files[0].file,
            files[0].data_start,
            files[0].nbytes,
            agreed.memory_only,
            boot_id(),
            files[1] if len(files) > 1 else None,
        )
        slot.advance(SlotRecord(SlotState.WRITING, contents))
        for file, layout in zip(files, share.layouts, strict=True):
            _write_values(slot, file, layout, values)
        return self._routes_of(share, files, slot)

    def finish(self, machine: SaveMachine, agreed: Agreed, share: StoredShare, slot: Slot | None) -> None:
        """Hand the filled `slot` to the keeper, and watch the save from now on."""
        nbytes, part = _nbytes(share), None
        if slot is not None:
            generation = self._generation(agreed, share)
            write_generation(self._memory.used.folder, generation)
            part = None if self.disk is None else part_of(self.disk, agreed.run_id, generation)
            slot.advance(msgspec.structs.replace(slot.record, state=SlotState.STAGED))
        else:
            self._partless = (agreed.place, agreed.checkpoint_id)
        machine.stage(nbytes)
        if self._meeting is None:
            machine.leave_unprotected(unprotected(machine.step))
        elif self._meeting.error is not None:
            machine.leave_unprotected(self._meeting.error)
        if slot is None and agreed.memory_only:
            machine.hold(nbytes)  # this rank has no part that a keeper would seal
        else:
            self._watcher.add(machine, agreed.checkpoint_id, slot, part=part)

    def _generation(self, agreed: Agreed, share: StoredShare) -> Generation:
        return Generation(
            self._run.url,
            agreed.folder,
            agreed.checkpoint_id,
            agreed.place,
            agreed.step,
            share.manifest.encode(),
            agreed.incarnation,
            self._run.options,
            "" if self.disk is None else str(self.disk),
        )

    def fail(self, checkpoint_id: str, slot: Slot | None, error: BaseException | None = None) -> None:
        """Free `slot`. The next save tells all ranks that this checkpoint can never be whole. If memory itself failed
        (`error` is an `OSError`), no rank uses memory at that save."""
        # Read the slot again: an exception may have come after a change of its state and before this object knew.
        if slot is not None and slot.refresh().state == SlotState.WRITING:
            slot.advance(SlotRecord(SlotState.FREE))
        if isinstance(error, OSError):
            self._trouble = memory_error(self.node_dir, error)
        self._given_up.fail(checkpoint_id)

    def steps_on_disk(self) -> set[int]:
        """The steps of saves that have not ended, and whose part of this rank a disk of the node has."""
        return self._watcher.steps_on_disk()

    def watch(self) -> None:
        """Make sure that the watcher's thread runs."""
        self._watcher.begin()

    def close(self) -> None:
        """End the watching, and close the memory. Staged snapshots stay, and the keeper makes them durable; saves that
        are not durable yet end here with the error `unwatched`. Slots that were reserved, and that no save has filled,
        are removed. Call it only when no save is copying."""
        self._watcher.close()
        memory = self._memory.current
        if memory is not None and self.is_unused:
            memory.arena.remove_empty()
        self.guard.unhook()
        self._routes.clear()
        self._memory.close()

    def _forget(self, is_foreign: Callable[[Contents], bool], why: str) -> None:
        """Give up the checkpoints in memory that are foreign to the history that this job saves into."""
        forgotten, cared_for = self._memory.used.arena.forget(is_foreign)
        if forgotten:
            steps = ", ".join(map(str, sorted(contents.step for contents in forgotten)))
            _log.warning("memory held steps %s %s ('%s'): holdfast gives them up", steps, why, self._run)
        self.give_up(cared_for)

    def _routes_of(self, share: StoredShare, files: Sequence[SlotFile], slot: Slot) -> Routes:
        """The routes into `slot`. They are kept as long as the plan stays the same."""
        if share.plan_id != self._routes_plan_id:
            self._routes, self._routes_plan_id = {}, share.plan_id
        if slot.name not in self._routes:
            names = share.manifest.body.names
            parts = [
                RoutedPart(names[entry.tensor], entry.part, file.start + file.data_start + entry.offset)
                for file, layout in zip(files, share.layouts, strict=True)
                for entry in layout.entries
            ]
            self._routes[slot.name] = Routes(parts, slot.data, rank=self._rank)
        return self._routes[slot.name]

    def _free_slot(self, needed: Place | None) -> Slot:
        """Take a slot to fill. The ranks have agreed that there is one."""
        arena = self._memory.used.arena
        arena.remove_retired(needed)
        slot = arena.take(needed)
        if slot is None:  # another process took it after the ranks agreed that there is room
            raise StorageError(
                f"Another process has taken the free slot of rank {self._rank}.",
                code="storage.memory",
                action="Let only one job at a time save into a run. The next save tries again.",
                rank=self._rank,
                retryable=True,
            )
        self._watcher.look_at(slot)
        return slot


def next_share(agreed: Agreed, known: StoredShare | None, rank: int) -> StoredShare:
    """The share of `rank` in the `agreed` checkpoint; `known` is its last share."""
    if agreed.manifest:
        return WriteAssignment.in_manifest(agreed.plan_id, fmt.decode(agreed.manifest, path=agreed.folder), rank)
    assert known is not None
    assert known.plan_id == agreed.plan_id
    return known.again(
        agreed.references,
        checkpoint_id=agreed.checkpoint_id,
        run_id=agreed.run_id,
        place=(agreed.place.epoch, agreed.place.seq),
        step=agreed.step,
        created=agreed.created,
        metrics=agreed.metrics,
        diverged=agreed.diverged,
    )


def _files_in_slot(share: StoredShare) -> list[SlotFile]:
    """The data files of `share`, one after another; each begins where direct writes to a disk may begin."""
    files: list[SlotFile] = []
    for layout in share.layouts:
        start = -(-files[-1].stop // ALIGNMENT) * ALIGNMENT if files else 0
        files.append(SlotFile(layout.index, start, layout.data_start, layout.nbytes))
    return files


def _nbytes(share: StoredShare) -> int:
    """The size of the slot for `share`."""
    files = _files_in_slot(share)
    return files[-1].stop if files else 0


def _write_values(slot: Slot, file: SlotFile, layout: FileLayout, values: Mapping[str, Node]) -> None:
    if layout.values is not None:
        packed = pack_values(dict(values), capacity=layout.values.capacity)
        start = file.start + file.data_start + layout.values_offset
        slot.data[start : start + len(packed)] = np.frombuffer(packed, np.uint8)
