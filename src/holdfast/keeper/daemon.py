"""The keeper: one process per node, user and run, which makes staged snapshots durable and outlives the trainers.

It looks at the slots of its folder again and again. It seals staged slots, writes sealed slots to storage, and commits
a checkpoint when all its files are in storage, whichever nodes wrote them. Snapshots of saves to memory alone it only
seals; the newest one it makes durable when the trainers have ended. Everything that it must know is in the slots and in
the generations' files beside them. So when a keeper is killed, at whatever instant, the next one goes on from there.

Trainers read the fate of their snapshots from the slots too, so no trainer waits for an answer that a dead keeper would
never send.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from holdfast.errors import CorruptError, FencedError, IncompatibleError, StorageError
from holdfast.keeper.copies import PeerCopies
from holdfast.keeper.disk_tier import DiskTier
from holdfast.keeper.parity_rows import ParityRows
from holdfast.keeper.peer_generations import PeerGenerations
from holdfast.keeper.persist import Sealing
from holdfast.keeper.protecting import Protection
from holdfast.keeper.writing import KeptFiles, StagedFiles, Writing
from holdfast.node_memory.claims import has_trainer, is_claimed
from holdfast.node_memory.generations import generation_ids, given_up_ids, read_generation, remove_generation
from holdfast.node_memory.inventory import remove_ended, write_run
from holdfast.node_memory.keeper_lock import clear_protocol, is_unwanted, note_keeper, write_protocol
from holdfast.node_memory.keeper_starts import clear_starts, note_start
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import OWED, SPENT, Contents, Slot, SlotRecord, SlotState, slot_names
from holdfast.signing import has_keys
from holdfast.store.retry_budget import RetryBudget

#: Time without trainers and work after which a keeper removes its slots and ends.
IDLE_S: Final = 1800.0
#: The same where trainers came and went and left no slot, as a job that only restores does.
_LEFT_EMPTY_S: Final = 60.0
#: Time without trainers after which a keeper frees slots that it could not make durable: parts of checkpoints whose
#: other parts were in the memory of lost nodes, or of a run whose storage is gone.
ORPHANED_S: Final = 86400.0
#: Time for which a keeper waits for the parts that other nodes have of a snapshot in memory alone, before it makes the
#: next older one durable too.
PATIENCE_S: Final = 60.0
#: Time that a keeper spends on making its slots durable after it was told to end.
GRACE_S: Final = 60.0

#: Interval of a keeper's looks at everything; and of its glances at whether a trainer has changed something, which cost
#: almost nothing: in general, and while a trainer fills a slot. So trainers need not wake the keeper.
_LOOK_S: Final = 0.25
_GLANCE_S: Final = 0.05
_SHORT_GLANCE_S: Final = 0.01
#: Number of slots sealed, and of files written, at the same time.
_NUM_SEALERS: Final = 2
_NUM_WRITERS: Final = 4
#: Pauses after a store has failed. Only the end of the keeper ends its tries.
_RETRIES: Final = RetryBudget(total_s=math.inf, first_s=1.0, longest_s=30.0)
#: Pause before the keeper asks the store again for files of other nodes.
_RETRY_S: Final = 1.0
#: While files of other nodes are missing, pause before the keeper asks the store for them again. It doubles each time,
#: up to `_RETRY_S`. When a slot of this node is staged meanwhile, the keeper asks at once.
_FIRST_RETRY_S: Final = 0.05
#: Limit for an error's text, which has to fit into the record of a slot.
_MAX_ERROR_NBYTES: Final = 1200

_log = logging.getLogger(__name__)


class _Retry(NamedTuple):
    """The time at which a generation is tried again, the delay that led to it, and the number of failures in a row."""

    at_s: float
    delay_s: float
    num_failures: int = 0


class Keeper:
    """The keeper of `folder`, whose lock the caller holds. Only one thread uses it. Its own threads hash and write
    meanwhile, so that a slow store does not delay the sealing of newer snapshots.

    The keeper changes a slot only as `holdfast.node_memory.slots` allows: it owns STAGED and SEALED slots, and takes
    the lock of any other slot. Its threads share that right without a race. Only the sealer changes a slot from STAGED
    to SEALED or HELD, and from HELD to SEALED (`_seals` has the slot's name meanwhile). Writers only read. The one
    thread that uses this object makes every other change: it does not change a slot that is being sealed, and does not
    free a slot that is being read.
    """

    def __init__(self, folder: NodeFolder, lock: int | None = None) -> None:
        self._folder = folder
        #: The descriptor that holds the folder's lock; None where the caller makes sure that there is one keeper.
        self._lock = lock
        self._slots: dict[str, Slot] = {}
        self._generations: dict[str, Sealing] = {}
        self._disks = DiskTier(folder)
        self._peer_generations = PeerGenerations(folder, self._generations.get)
        self._copies = PeerCopies(folder, self._peer_generations)
        self._rows = ParityRows(folder, self._peer_generations)
        self._protection = Protection(folder, self._copies, self._rows, self._peer_generations, self._sealing)
        self._sealers = ThreadPoolExecutor(_NUM_SEALERS, thread_name_prefix="holdfast-seal")
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, thread_name_prefix="holdfast-persist")
        #: Slots that are being sealed, by name.
        self._seals: dict[str, Future[None]] = {}
        #: The names of the slots that this keeper has hashed.
        self._checked: set[str] = set()
        #: The checkpoint that is being written; and those whose slots here are written but whose other files are
        #: missing.
        self._writing: Writing | None = None
        self._waiting: dict[str, Writing] = {}
        #: The times from which on they wait.
        self._waiting_since: dict[str, float] = {}
        self._retries: dict[str, _Retry] = {}
        #: The folder's time of change (`NodeFolder.changed_ns`) at the last look.
        self._met_ns = 0
        #: The last trouble that the log tells of each slot or checkpoint; the same trouble is not told again.
        self._told: dict[str, str] = {}
        #: Whether this keeper has brought a checkpoint to an end, and so works.
        self._works = False

    def run(self, *, is_over: Callable[[], bool], idle_s: float, orphaned_s: float = ORPHANED_S) -> None:
        """Work until `is_over`, or until there was no trainer and no work for `idle_s`; in that case, remove the slots.
        A slot that cannot be made durable counts as work until there was no trainer for `orphaned_s`, when it is freed.
        Where trainers came and went and left no slot, a minute is enough. Also ends when the lock's file was removed
        and all slots are durable."""
        busy_at = tended_at = time.monotonic()
        was_tended = False
        while not is_over():
            is_tended = is_claimed(self._folder)
            was_tended = was_tended or is_tended
            if is_tended:
                tended_at = time.monotonic()
            self._disks.is_abandoned = time.monotonic() - tended_at > orphaned_s
            if self._disks.is_abandoned:
                self._abandon(orphaned_s)
            if self.look() or self.owes or is_tended:
                busy_at = time.monotonic()
            is_left_empty = was_tended and not self._slots
            if time.monotonic() - busy_at > (min(idle_s, _LEFT_EMPTY_S) if is_left_empty else idle_s):
                self._copies.give_back()
                self._rows.give_back()
                self.give_back()
                return
            if self.is_displaced and not self.owes:
                return
            self._rest()

    def finish(self, *, grace_s: float) -> bool:
        """Make STAGED and SEALED slots durable, and HELD ones that no trainer tends, within `grace_s`. Returns whether
        all of them are durable."""
        end = time.monotonic() + grace_s
        # A HELD slot owes nothing, but one that is being promoted will. So work counts as well.
        while (self.look() or self.owes) and time.monotonic() < end:
            self._rest()
        return not self.owes

    def look(self) -> bool:
        """Start the work that is due, and record the results of finished work. Returns whether there is work."""
        # List these before looking at the slots: a slot names its generation before the generation gets its file, so
        # every generation in this list is named by its slots by the time they are read.
        known = {*generation_ids(self._folder), *given_up_ids(self._folder)}
        self._meet()
        self._disks.meet()
        if not self.is_displaced:
            self._protection.meet(self._slots.values())
            self._give_up()
            self._remove_old()
            self._forget(known)
            self._promote()
            self._promote_copies()
        sealing = self._seal_all()
        storing = self._disks.store(self._slots.values(), self._seals, self._sealing)
        protecting = self._protection.look(self._slots.values())
        return self._write() or sealing or storing or protecting

    @property
    def owes(self) -> bool:
        """Whether any slot is STAGED or SEALED, and so not durable yet, or the run lacks what a disk here has."""
        return bool(self._disks.owed or self._copies.owed) or any(slot.state in OWED for slot in self._slots.values())

    def give_back(self) -> None:
        """Remove all slots without a living trainer whose contents are durable, and the generations that no slot needs
        then."""
        self._meet()
        if self.is_displaced:
            return
        for name, slot in list(self._slots.items()):
            if not self._is_tended(slot) and slot.remove_if(lambda record: record.state in SPENT):
                del self._slots[name]
        self._forget({*generation_ids(self._folder), *given_up_ids(self._folder)})

    def close(self) -> None:
        """Close all slots, which stay in the folder; waits for running hashes and requests."""
        if self._writing is not None:
            self._writing.give_up()
        self._protection.close()
        self._sealers.shutdown()
        self._disks.close()
        self._writers.shutdown()
        for writing in (*self._waiting.values(), *([self._writing] if self._writing else [])):
            writing.close()
        self._rows.close()
        self._copies.close()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def _rest(self) -> None:
        """Wait until a thread of the keeper has finished, a trainer has changed something, or the next look is due."""
        busy: list[Future[Any]] = [*self._seals.values()]
        if self._writing is not None:
            busy += self._writing.pending
        is_awaited = any(slot.state == SlotState.WRITING for slot in self._slots.values())
        glance_s = _SHORT_GLANCE_S if is_awaited or self._protection.is_sending else _GLANCE_S
        end = time.monotonic() + _LOOK_S
        if self._writing is None:
            end = min([end, *(retry.at_s for retry in self._retries.values())])
        while True:
            if not busy:
                time.sleep(glance_s)
            elif not wait(busy, timeout=glance_s).not_done:
                return
            if self._folder.changed_ns() != self._met_ns or any(slot.has_changed() for slot in self._slots.values()):
                return
            if self._protection.has_news:
                return
            if time.monotonic() >= end:
                return

    @property
    def is_displaced(self) -> bool:
        """Whether some process has removed the file of the keeper's lock, usually with the whole folder. Another keeper
        may be at work at that path by now, and owns the files that are there. Only this keeper still has the removed
        slots: it makes them durable, and ends."""
        return self._lock is not None and os.fstat(self._lock).st_nlink == 0

    def _meet(self) -> None:
        """Open new slots, and close removed ones once their contents need not become durable any more. Also drop
        damaged slots, and free those whose writer is dead."""
        self._met_ns = self._folder.changed_ns()
        names = set() if self.is_displaced else set(slot_names(self._folder))
        for name in self._slots.keys() - names:
            slot = self._slots[name]
            if not (slot.refresh().state in OWED and (slot.is_removed or name in self._being_read)):
                self._slots.pop(name).close()
        for name in sorted(names - self._slots.keys()):
            with suppress(FileNotFoundError):
                try:
                    self._slots[name] = Slot(self._folder, name)
                except CorruptError as error:  # also for durable slots that another version left
                    self._tell(name, str(error))
                    self._folder.discard(name)  # where it cannot be removed, it is passed over
                except (StorageError, OSError) as error:  # it cannot be opened now
                    if isinstance(error, FileNotFoundError):
                        raise
                    self._tell(name, str(error))
        for name, slot in list(self._slots.items()):
            slot.refresh()
            if slot.is_damaged and name not in self._being_read:
                self._folder.discard(name)
                self._slots.pop(name).close()
            elif slot.free_if_abandoned():
                _log.warning("'%s' is freed: the process that was filling it is dead", slot.path)

    def _forget(self, known: Collection[str]) -> None:
        """Forget those of the `known` generations that no slot's contents name, and remove the unnamed files of killed
        processes."""
        held = {slot.record.contents.checkpoint_id for slot in self._slots.values() if slot.record.contents}
        self._disks.forget(held)
        held.update(self._disks.owed, self._copies.ids, self._rows.ids)
        self._peer_generations.forget(held)
        for checkpoint_id in set(known) - held:
            remove_generation(self._folder, checkpoint_id)
        for about in self._told.keys() - held - set(self._folder.names()):
            del self._told[about]
        for checkpoint_id in {*self._generations, *self._retries, *self._waiting, *self._waiting_since} - held:
            self._waiting_since.pop(checkpoint_id, None)
            self._generations.pop(checkpoint_id, None)
            self._retries.pop(checkpoint_id, None)
            if (writing := self._waiting.pop(checkpoint_id, None)) is not None:
                writing.close()
        self._folder.remove_unnamed()

    def _remove_old(self) -> None:
        """Remove dead ranks' slots once a newer checkpoint of living ranks has been committed. Slots of another run are
        older too: the run that was here before is gone. Where no job wants protection any more, so do copies and
        parity."""
        committed = [slot for slot in self._slots.values() if slot.state == SlotState.COMMITTED]
        kept = [slot.record.contents for slot in committed if slot.record.contents and self._is_tended(slot)]
        newest = max(kept, key=lambda contents: contents.place, default=None)
        if newest is None:
            return

        def is_old(record: SlotRecord) -> bool:
            contents = record.contents
            return contents is None or contents.run_id != newest.run_id or contents.place < newest.place

        for name, slot in list(self._slots.items()):
            if is_old(slot.record) and not self._is_tended(slot) and slot.remove_if(is_old):
                del self._slots[name]
        if not self._protection.is_wanted:
            self._copies.give_back(is_old)
            self._rows.give_back(is_old)

    def _give_up(self) -> None:
        """Free the slots of given-up generations, which can never become whole, unless they are being read, and remove
        their parts on disks."""
        given_up = given_up_ids(self._folder)
        if self._writing is not None:
            given_up.discard(self._writing.sealing.generation.checkpoint_id)
        self._disks.give_up(given_up)
        self._copies.tend(given_up)
        self._rows.tend(given_up)
        for slot in [*self._owed_at_rest(), *self._in_state(SlotState.HELD), *self._in_state(SlotState.ON_DISK)]:
            if slot.record.contents and slot.record.contents.checkpoint_id in given_up:
                self._free(slot)

    def _promote(self) -> None:
        """Begin to make the newest HELD checkpoint durable, if the trainers have ended that would have replaced it.
        Each node does so. Where it waits for other nodes for long, these may lack their part of it, and the next older
        one follows. Parts of older ones than a durable one are freed: nobody needs them, and other nodes may have
        freed theirs."""
        held, at_rest = (
            self._in_state(SlotState.HELD),
            [slot for slot in self._owed_at_rest() if slot.state == SlotState.SEALED],
        )
        has_trainers = any(has_trainer(self._folder, slot.rank) for slot in held)
        for slot in [*held, *at_rest]:
            contents = slot.record.contents
            if contents is None:  # freed just now, with another part of its checkpoint
                continue
            newer = [(state, other) for state, other in self._living(contents.run_id) if contents.place < other.place]
            is_late = contents.memory_only and any(state == SlotState.COMMITTED for state, _ in newer)
            is_next = all(
                state in (*OWED, SlotState.ON_DISK) and self._waits_long(other.checkpoint_id) for state, other in newer
            )
            if is_late and (slot.state == SlotState.SEALED or not has_trainers):
                self._free(slot)
            elif is_next and slot.state == SlotState.HELD and not has_trainers and slot.name not in self._seals:
                sealing = self._sealing(contents.checkpoint_id)
                if sealing is not None:
                    self._seals[slot.name] = self._sealers.submit(sealing.promote, slot)

    def _promote_copies(self) -> None:
        """Begin to write copies to the run of checkpoints for which this node waits in vain: the nodes that own these
        files may be lost."""
        for checkpoint_id in filter(self._waits_long, self._waiting):
            sealing = self._sealing(checkpoint_id)
            if sealing is None:
                continue
            for copy in self._copies.held(checkpoint_id):
                if copy.name not in self._seals:
                    self._seals[copy.name] = self._sealers.submit(sealing.promote, copy)

    def _waits_long(self, checkpoint_id: str) -> bool:
        """Whether this node has written its part of a checkpoint, and waits in vain for those of other nodes."""
        since_s = self._waiting_since.get(checkpoint_id)
        return since_s is not None and time.monotonic() - since_s > PATIENCE_S

    def _living(self, run_id: str) -> list[tuple[SlotState, Contents]]:
        """The states and contents of all slots that hold a part of a checkpoint of the run `run_id`, except for those
        that must not become durable."""
        found = [(slot.state, slot.record.contents) for slot in self._slots.values() if slot.state != SlotState.FENCED]
        return [(state, contents) for state, contents in found if contents is not None and contents.run_id == run_id]

    def _in_state(self, state: SlotState) -> list[Slot]:
        return [slot for slot in self._slots.values() if slot.state == state]

    def _free(self, slot: Slot) -> None:
        """Free a slot whose contents nobody needs: one that the keeper owns, or another one that no trainer has just
        taken."""
        state = slot.state
        if state not in OWED and not slot.take():
            return
        if state not in OWED and slot.refresh().state != state:
            slot.let_go()
            return
        slot.advance(SlotRecord(SlotState.FREE))

    def _abandon(self, orphaned_s: float) -> None:
        """Release unpersisted slots whose trainers never returned, unless they are being read."""
        for slot in self._owed_at_rest():
            trouble = slot.record.error or "Parts are missing"
            self._lose(slot, f"its trainer did not return within {orphaned_s:.0f} s. {trouble}")

    def _owed_at_rest(self) -> list[Slot]:
        """The slots that still have to become durable and that no thread is hashing or writing.

        They may be on the way to a peer. That takes as long as a lost peer does not answer, so it keeps no slot from
        being freed; a peer that gets other bytes than it was offered finds that by the digests."""
        at_work = self._at_work
        return [slot for name, slot in self._slots.items() if slot.state in OWED and name not in at_work]

    @property
    def _being_read(self) -> set[str]:
        """The names of the slots that are being hashed or written, or read for peers."""
        return {*self._at_work, *self._protection.being_read}

    @property
    def _at_work(self) -> set[str]:
        """The names of the slots that are being hashed or written. (Those that wait for other nodes' files already
        were.)"""
        written = () if self._writing is None else self._writing.names
        return {*self._seals, *self._disks.being_read, *written}

    def _seal_all(self) -> bool:
        """Start to seal STAGED slots, and to hash those again that were SEALED before the node's last boot. Returns
        whether any slot is being sealed, hashed or promoted."""
        for name in [name for name, seal in self._seals.items() if seal.done()]:
            error = self._seals.pop(name).exception()
            slot = self._slots.get(name) or self._copies.named(name)
            if error is not None and slot is not None:
                self._lose(slot, str(error))
        for slot in self._slots.values():
            contents = slot.record.contents
            is_new = slot.state == SlotState.STAGED
            if contents is None or slot.name in self._seals or not (is_new or self._is_unchecked(slot, contents)):
                continue
            sealing = self._sealing(contents.checkpoint_id)
            if sealing is not None:
                self._checked.add(slot.name)
                self._seals[slot.name] = self._sealers.submit(sealing.seal if is_new else sealing.check, slot)
        return bool(self._seals)

    def _is_unchecked(self, slot: Slot, contents: Contents) -> bool:
        """Whether a SEALED slot must be hashed again before it is written."""
        return slot.state == SlotState.SEALED and slot.name not in self._checked and contents.is_of_earlier_boot

    def _lose(self, slot: Slot, why: str) -> None:
        _log.error("'%s' is given up: %s.", slot.path, why.rstrip("."))
        self._free(slot)

    def _sealing(self, checkpoint_id: str) -> Sealing | None:
        """The `Sealing` of a checkpoint. None where the file of its generation cannot be read now, and where it is lost
        or damaged: then this gives up the checkpoint's slots."""
        if checkpoint_id not in self._generations:
            try:
                on_disk = self._disks.generation(checkpoint_id)
                self._generations[checkpoint_id] = Sealing(on_disk or read_generation(self._folder, checkpoint_id))
            except (FileNotFoundError, CorruptError, IncompatibleError) as error:
                for slot in [*self._owed_at_rest(), *self._in_state(SlotState.HELD)]:
                    if slot.record.contents is not None and slot.record.contents.checkpoint_id == checkpoint_id:
                        self._lose(slot, f"nothing is known of its checkpoint. {error}")
                return None
            except (StorageError, OSError) as error:
                self._tell(checkpoint_id, str(error))
                return None
        return self._generations[checkpoint_id]

    def _write(self) -> bool:
        """Record the result of a finished write, and write the oldest generation that is not durable. Returns whether
        one is being written."""
        if self._writing is not None and self._writing.is_over():
            self._note(self._writing)
            self._writing = None
        owed = self._owed()
        if self._writing is None:
            found = ((sealing, each) for each in owed if (sealing := self._sealing(each)) is not None)
            oldest, checkpoint_id = min(found, key=lambda pair: pair[0].generation.place, default=(None, ""))
            if oldest is None:
                return False
            self._writing = self._waiting.pop(checkpoint_id, None) or Writing(oldest, self._writers)
            self._writing.retry(owed[checkpoint_id])
        for file in owed.get(self._writing.sealing.generation.checkpoint_id, ()):
            self._writing.join(file)
        return True

    def _owed(self) -> dict[str, list[KeptFiles]]:
        """The files to write to the run now, by checkpoint. Those on a disk come in the order of their checkpoints:
        one is behind the next older one, unless that waits for other nodes, or fails for a cause of its own."""
        owed: dict[str, list[KeptFiles]] = {}
        for slot in self._slots.values():
            contents = slot.record.contents
            is_staying = slot.state == SlotState.STAGED and contents is not None and contents.memory_only
            if slot.state in OWED and contents and not is_staying and not self._goes_to_disk(slot, contents):
                owed.setdefault(contents.checkpoint_id, []).append(StagedFiles(slot, self._seals.get(slot.name)))
        for copy in self._copies.owed:
            if copy.record.contents is not None:
                owed.setdefault(copy.record.contents.checkpoint_id, []).append(StagedFiles(copy))
        for checkpoint_id in self._disks.owed:
            owed.setdefault(checkpoint_id, []).extend(self._disks.files(checkpoint_id))
            if checkpoint_id not in self._waiting and self._disks.holds_up(checkpoint_id):
                break
        return {each: files for each, files in owed.items() if self._is_due(each, files)}

    def _goes_to_disk(self, slot: Slot, contents: Contents) -> bool:
        """Whether a slot that is owed goes to a disk of the node before it goes to the run."""
        sealing = self._sealing(contents.checkpoint_id)
        return sealing is not None and self._disks.takes(slot, sealing)

    def _is_due(self, checkpoint_id: str, files: Iterable[KeptFiles]) -> bool:
        """Whether it is time to write a checkpoint: it was not tried yet, its retry is due, or one of its files came
        since the last try, and may be the one that was missing."""
        retry = self._retries.get(checkpoint_id)
        if retry is None or retry.at_s <= time.monotonic():
            return True
        waiting = self._waiting.get(checkpoint_id)
        return waiting is not None and any(file.name not in waiting.names for file in files)

    def _note(self, writing: Writing) -> None:
        """Record the outcome of `writing` in its slots, or plan a retry."""
        checkpoint_id = writing.sealing.generation.checkpoint_id
        state, text = self._fate(writing)
        self._tell(checkpoint_id, text)
        before = self._retries.pop(checkpoint_id, None)
        if state == SlotState.SEALED:
            self._retries[checkpoint_id] = _next_retry(before, has_failed=bool(text))
        else:  # the store works again, so the others need not wait
            self._retries = {each: retry for each, retry in self._retries.items() if not retry.num_failures}
        if state == SlotState.SEALED and not text:
            self._waiting[checkpoint_id] = writing
            self._waiting_since.setdefault(checkpoint_id, time.monotonic())
        else:
            writing.close()
        self._disks.note(checkpoint_id, state, writing.seal)
        for slot in self._in_state(SlotState.ON_DISK):
            fate = SlotState.ON_DISK if state == SlotState.SEALED else state
            slot.settle(checkpoint_id, fate, _short(text), referenced_nbytes=writing.referenced_nbytes(slot))
        for slot in writing.slots:
            contents = slot.refresh().contents
            if slot.state != SlotState.SEALED or contents is None or contents.checkpoint_id != checkpoint_id:
                continue  # its seal failed or is not finished, and is tried again; or the slot was given up
            referenced_nbytes = writing.referenced_nbytes(slot)
            record = msgspec.structs.replace(
                slot.record, state=state, error=_short(text), referenced_nbytes=referenced_nbytes
            )
            if record != slot.record:
                slot.advance(record)
        if state != SlotState.SEALED and not self._works and not self.is_displaced:
            self._works = True
            clear_starts(self._folder)

    def _fate(self, writing: Writing) -> tuple[SlotState, str]:
        """The state of a checkpoint after a try to write it, SEALED if it is to be tried again; and the error."""
        try:
            return (SlotState.COMMITTED if writing.outcome() else SlotState.SEALED), ""
        except FencedError as error:
            return SlotState.FENCED, str(error)
        except Exception as error:  # noqa: BLE001 - errors of sealing too: the keeper must survive for the other slots
            self._disks.note_failure(writing.sealing.generation.checkpoint_id, error, self._slots.values())
            return SlotState.SEALED, str(error) or repr(error)

    def _tell(self, about: str, trouble: str) -> None:
        """Log the `trouble` with a slot or a checkpoint, once for each text; "" says that it is over."""
        if trouble and self._told.get(about) != trouble:
            _log.error("%s", trouble)
        self._told[about] = trouble

    def _is_tended(self, slot: Slot) -> bool:
        """Whether a living trainer has a claim to the slot's rank."""
        return is_claimed(self._folder, slot.rank)


def _next_retry(before: _Retry | None, *, has_failed: bool) -> _Retry:
    """The next try of a generation after a try that failed, or that found files of other nodes missing."""
    if has_failed:
        number = before.num_failures if before else 0
        delay_s = _RETRIES.pause_s(number) or 0.0
        return _Retry(time.monotonic() + delay_s, delay_s, number + 1)
    delay_s = min(2 * before.delay_s if before and not before.num_failures else _FIRST_RETRY_S, _RETRY_S)
    return _Retry(time.monotonic() + delay_s, delay_s)


def _short(text: str) -> str:
    return text.encode()[:_MAX_ERROR_NBYTES].decode(errors="ignore")


def keep(
    folder: NodeFolder, run: str, lock: int, *, is_over: Callable[[], bool], idle_s: float, grace_s: float
) -> bool:
    """Keep `folder` of `run`, whose `lock` this process has, until `is_over`, until idle for `idle_s`, or until a
    process asks the keeper to end. Then makes its slots durable within `grace_s`, removes the durable slots of dead
    trainers, and removes the folder if nothing is left in it. Returns whether everything is durable."""
    note_keeper(lock)
    note_start(folder)
    write_run(folder, run)
    write_protocol(folder)
    keeper = Keeper(folder, lock)
    try:
        keeper.run(is_over=lambda: is_over() or is_unwanted(lock, signs=has_keys()), idle_s=idle_s)
        owes_nothing = keeper.finish(grace_s=grace_s)
        keeper.give_back()
        if not keeper.is_displaced:
            clear_starts(folder)
    finally:
        keeper.close()
    if owes_nothing and not keeper.is_displaced:
        clear_protocol(folder)
        remove_ended(folder)
    return owes_nothing
