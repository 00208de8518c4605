"""The keeper's work on disks of its node: files of slots go there first, and from there to the run, in order.

A slot whose file is on the disk may be filled again, so a slow or absent store does not stop saves. What is owed to
the run then lies on the disk alone, and says so by itself (`holdfast.node_disk.disk_folder`): the death of a keeper at
any instant, or of the node, loses nothing of it.

Parts are removed in two cases only. Parts that the run has too: all but the newest `NUM_KEPT`, and where the disk is
full, the oldest first. And parts that can never be committed, because another job has taken over the run: once the run
has a newer checkpoint, or the disk is full.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from holdfast.errors import CorruptError, HoldfastError, NotFoundError, StorageError
from holdfast.keeper.persist import Sealing, persist
from holdfast.keeper.writing import DiskFile
from holdfast.node_disk.disk_folder import DiskPart, found_parts, part_of, sweep
from holdfast.node_disk.disk_store import NODE_DISK
from holdfast.node_memory.generations import Generation
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.noted_disks import NotedDisk, noted_disks
from holdfast.node_memory.slots import OWED, Contents, Slot, SlotState
from holdfast.store.timed import TimedStore

#: Number of complete checkpoints that stay on a disk after the run has them too: a restore reads them there.
NUM_KEPT: Final = 2
#: Number of slots written to disks at the same time. Uploads have threads of their own, which a slow store may block.
_NUM_STORERS: Final = 2
#: Time limit for the disk to answer.
_DISK_TIMEOUT_S: Final = 600.0

_log = logging.getLogger(__name__)


class _Storing(NamedTuple):
    """The writing of a slot with these `contents` to the disk, begun after `num_removed` removals of parts."""

    slot: Slot
    contents: Contents
    part: DiskPart
    written: Future[None]
    num_removed: int


class DiskTier:
    """The parts of checkpoints that the disks of this node have. Only the one thread of the keeper uses it; its own
    threads only write files."""

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder
        self._storers = ThreadPoolExecutor(_NUM_STORERS, thread_name_prefix="holdfast-store")
        self._storing: dict[str, _Storing] = {}
        #: The slots whose files go to the run at once, because the disk did not take them, and their checkpoints.
        self._refused: dict[str, str] = {}
        self._parts: dict[str, DiskPart] = {}
        #: The ids of the parts that the run has too, and of those that it will never get.
        self._drained: set[str] = set()
        self._hopeless: set[str] = set()
        #: The ids of the parts that failed at the last try, for another cause than the run's store.
        self._stuck: set[str] = set()
        self._num_removed = 0
        self._met: set[NotedDisk] = set()
        self._told: set[str] = set()
        #: Whether nothing more is brought to the run, because trainers are gone for long: the disk keeps it for the
        #: next job.
        self.is_abandoned = False

    def meet(self) -> None:
        """Look at disks that were noted since the last call: what earlier keepers left on them is owed to the run."""
        for disk in noted_disks(self._folder):
            if disk in self._met:
                continue
            try:
                with self._telling():  # a disk that has become read-only may have what the run lacks
                    sweep(disk)
                for part in found_parts(disk):
                    self._parts[part.checkpoint_id] = part
                    if part.is_drained:
                        self._drained.add(part.checkpoint_id)
            except (HoldfastError, OSError) as error:  # it is tried again
                self._tell(str(error))
            else:
                self._met.add(disk)

    @property
    def owed(self) -> list[str]:
        """The ids of the checkpoints of which the run lacks this node's part, the oldest first."""
        owed = set() if self.is_abandoned else self._parts.keys() - self._drained - self._hopeless
        return self._by_place(owed)

    def generation(self, checkpoint_id: str) -> Generation | None:
        """The generation of a part that is on a disk; None if there is no such part."""
        part = self._parts.get(checkpoint_id)
        return None if part is None else part.generation

    def files(self, checkpoint_id: str) -> list[DiskFile]:
        """The data files of a checkpoint that are on a disk; none while the disk fails."""
        part = self._parts[checkpoint_id]
        try:
            return [DiskFile(part, number) for number in part.file_numbers()]
        except (HoldfastError, OSError) as error:
            self._tell(str(error))
            return []

    def takes(self, slot: Slot, sealing: Sealing) -> bool:
        """Whether the file of a slot that is owed goes to the disk first."""
        return bool(sealing.generation.disk) and self._refused.get(slot.name) != sealing.generation.checkpoint_id

    @property
    def being_read(self) -> set[str]:
        """The names of the slots that are being written to the disk."""
        return set(self._storing)

    def store(
        self,
        slots: Iterable[Slot],
        seals: Mapping[str, Future[None]],
        sealing_of: Callable[[str], Sealing | None],
    ) -> bool:
        """Start to write files of slots to the disk, also those that are being sealed (`seals`). Records which are
        durable there. Returns whether any is being written."""
        self._end_stores()
        for slot in slots:
            contents = slot.record.contents
            is_staying = slot.state == SlotState.STAGED and contents is not None and contents.memory_only
            if contents is None or slot.state not in OWED or is_staying or slot.name in self._storing:
                continue
            sealing = sealing_of(contents.checkpoint_id)
            if sealing is None or not self.takes(slot, sealing):
                continue
            sealed = seals.get(slot.name)
            if slot.state == SlotState.SEALED or sealed is not None:
                part = part_of(Path(sealing.generation.disk), contents.run_id, sealing.generation)
                written = self._storers.submit(_store, part, sealing, slot, sealed)
                self._storing[slot.name] = _Storing(slot, contents, part, written, self._num_removed)
        return bool(self._storing)

    def _end_stores(self) -> None:
        for name, storing in list(self._storing.items()):
            if not storing.written.done():
                continue
            del self._storing[name]
            error = storing.written.exception()
            if error is None:
                self._parts.setdefault(storing.part.checkpoint_id, storing.part)
                record = storing.slot.refresh()
                if record.state == SlotState.SEALED and record.contents == storing.contents:
                    storing.slot.advance(msgspec.structs.replace(record, state=SlotState.ON_DISK, error=""))
            elif not (isinstance(error, StorageError) and error.code == "storage.full" and self._has_room(storing)):
                self._refuse(storing, error)

    def note(self, checkpoint_id: str, state: SlotState, seal: bytes | None) -> None:
        """Record what a try to bring a part to the run came to. It stays on the disk for now."""
        part = self._parts.get(checkpoint_id)
        if part is None:
            return
        if state == SlotState.COMMITTED and seal is not None:
            self._stuck.discard(checkpoint_id)
            self._drained.add(checkpoint_id)
            self._prune(part.run_id)  # first, because a full disk takes no seal
            with self._telling():
                part.note_commit(seal)
        elif state == SlotState.FENCED:
            self._hopeless.add(checkpoint_id)

    def give_up(self, checkpoint_ids: Collection[str]) -> None:
        """Remove the parts of checkpoints that were given up. None of them may be under way to the run."""
        for checkpoint_id in self._parts.keys() & checkpoint_ids:
            self._remove(checkpoint_id)

    def holds_up(self, checkpoint_id: str) -> bool:
        """Whether newer parts go to the run only after this one."""
        return checkpoint_id not in self._stuck

    def note_failure(self, checkpoint_id: str, error: Exception, slots: Iterable[Slot]) -> None:
        """Record why a try to bring a part to the run failed. A damaged part is not tried again. One that fails for
        another cause than the run's store does not hold up newer ones. Where memory still has what the disk fails to
        give, it goes to the run from there."""
        is_of_disk = isinstance(error, HoldfastError) and error.tier == NODE_DISK
        if checkpoint_id not in self._parts:
            return
        if isinstance(error, CorruptError) and is_of_disk:
            self._hopeless.add(checkpoint_id)
        elif is_of_disk or not isinstance(error, StorageError | NotFoundError):
            self._stuck.add(checkpoint_id)
        for slot in slots if is_of_disk else ():
            contents = slot.record.contents
            if contents is not None and contents.checkpoint_id == checkpoint_id:
                self._refused[slot.name] = checkpoint_id
                slot.settle(checkpoint_id, SlotState.SEALED, "")

    def forget(self, held: Collection[str]) -> None:
        """Forget about slots that hold no longer what the disk refused; `held` are the ids of what slots hold."""
        self._refused = {name: each for name, each in self._refused.items() if each in held}

    def close(self) -> None:
        """Wait for running writes."""
        self._storers.shutdown()

    def _prune(self, run_id: str) -> None:
        """Remove the parts that the run `run_id` has too, but for the newest, and older ones that it will never get;
        and those of the run that was in its place before."""
        drained = self._by_place(each for each in self._drained if self._parts[each].run_id == run_id)
        newest = self._parts[drained[-1]].place
        hopeless = [each for each in self._hopeless if self._parts[each].place < newest]
        others = [each for each in self._drained | self._hopeless if self._parts[each].run_id != run_id]
        for checkpoint_id in {*drained[:-NUM_KEPT], *hopeless, *others}:
            self._remove(checkpoint_id)

    def _has_room(self, storing: _Storing) -> bool:
        """Whether to try a writing again that found the disk full. Unless a part was removed since it began, this
        removes the oldest one that the run has too or will never get."""
        removable = self._by_place((self._drained | self._hopeless) - {storing.part.checkpoint_id})
        if removable and storing.num_removed == self._num_removed:
            self._remove(removable[0])
        return storing.num_removed < self._num_removed

    def _refuse(self, storing: _Storing, error: BaseException) -> None:
        """Let the file of a slot go to the run at once, because of an `error` of the disk."""
        checkpoint_id = storing.part.checkpoint_id
        self._refused[storing.slot.name] = checkpoint_id
        self._tell(f"step {storing.contents.step} goes to the run at once, and not to the disk of this node: {error}")
        if checkpoint_id not in {*self._parts, *(other.part.checkpoint_id for other in self._storing.values())}:
            with self._telling():
                if not storing.part.file_numbers():  # else another keeper, which shares the disk, has written some
                    storing.part.remove()

    def _by_place(self, checkpoint_ids: Iterable[str]) -> list[str]:
        """The ids, the oldest checkpoint first."""
        return sorted(checkpoint_ids, key=lambda each: self._parts[each].place)

    def _remove(self, checkpoint_id: str) -> None:
        part = self._parts.pop(checkpoint_id)
        self._num_removed += 1
        self._drained.discard(checkpoint_id)
        self._hopeless.discard(checkpoint_id)
        self._stuck.discard(checkpoint_id)
        with self._telling():
            part.remove()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Log an error of the disk that ends the ``with`` block: what is left undone there, the next keeper does."""
        try:
            yield
        except (HoldfastError, OSError) as error:
            self._tell(str(error))

    def _tell(self, trouble: str) -> None:
        """Log `trouble` with the disk, once for each text."""
        if trouble not in self._told:
            self._told.add(trouble)
            _log.error("%s", trouble)


def _store(part: DiskPart, sealing: Sealing, slot: Slot, sealed: Future[None] | None) -> None:
    """Write the file of a slot to the disk of the node; durable on return."""
    part.begin()
    with TimedStore(part.store, timeout_s=_DISK_TIMEOUT_S) as storage:
        await_seal = (lambda: None) if sealed is None else sealed.result
        # Each part is whole by itself: older parts are removed on their own, and a restore may find this one alone.
        persist(storage, sealing, slot, await_seal=await_seal, refers=False)
