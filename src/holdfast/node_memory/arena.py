"""The arena of a rank: its slots in the memory of its node, prepared while training goes on.

Fresh memory costs ten times as much as the copy into it, so it is taken in the background, once, and used again and
again: by this process and by those that come after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from threading import Event, Thread
from typing import TypeAlias

from holdfast.errors import ConfigurationError, CorruptError, HoldfastError
from holdfast.format.records import Place
from holdfast.node_memory.claims import Claim
from holdfast.node_memory.inventory import give_way
from holdfast.node_memory.limits import MemoryLimit, rooms
from holdfast.node_memory.node_folder import NodeFolder, unusable_memory
from holdfast.node_memory.slots import REUSABLE, WHOLE, Contents, Slot, SlotRecord, SlotState, slot_names
from holdfast.store.base import Bytes

#: Makes memory known to an accelerator; returns what ends that.
Register: TypeAlias = Callable[[Bytes], Callable[[], None]]

#: What is left for others.
_SPARE_NBYTES = 256 << 20
#: Keepers see within so long that slots are gone, on a busy machine: they give way to all other work.
_GIVEN_WAY_S = 10.0
_LOOK_S = 0.02


class Arena:
    """`num_slots` slots of `rank` in `folder`, beginning with those that are there. Until `close`, which leaves all
    there, this process has a claim to them. Used by one thread of one process per rank."""

    def __init__(self, folder: NodeFolder, *, rank: int, num_slots: int) -> None:
        self._folder = folder
        self._rank = rank
        #: How many there are to be, from the next preparation on.
        self.num_slots = num_slots
        self._slots: list[Slot] = []
        self._retired: list[Slot] = []
        self._stopped = False
        self._register: Register | None = None
        #: What ends the registration of a slot, by its name.
        self._registered: dict[str, Callable[[], None]] = {}
        #: Whether a checkpoint is of an earlier job, and nobody goes back to it: its slot may be filled, whatever is
        #: needed, when it is durable.
        self.is_left: Callable[[Contents], bool] = lambda _: False
        self._one = Event()
        self._done = Event()
        #: Whether all slots are ready.
        self.is_ready = False
        self._thread: Thread | None = None
        #: What ended the preparation, and how long it took.
        self.error: HoldfastError | None = None
        self.seconds = 0.0
        self._claim = Claim(folder, rank)
        self._take_over()

    def prepare(self, nbytes: int, *, register: Register | None = None) -> None:
        """Begin to make ready slots for data files of up to `nbytes`: those that are there and have the room, and new
        ones; with `register` each of them is registered. Blocks only until what was begun before is over; `wait` does.
        What earlier slots hold stays as long as it may be needed."""
        if self._thread is not None:
            self._thread.join()  # slots of another size may still be being made
        self._register = register
        self._one.clear()
        self._done.clear()
        self.is_ready, self.error = False, None
        self._thread = Thread(target=self._prepare, args=(nbytes,), name="holdfast-arena", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all slots are ready, or the preparation has failed (`error`). False when that takes longer."""
        return self._done.wait(timeout_s)

    def wait_for_one(self, timeout_s: float | None = None) -> bool:
        """As `wait`, but for the first new slot; the others go on being made."""
        return self._one.wait(timeout_s)

    @property
    def is_short(self) -> bool:
        """Whether slots are missing that nobody is making: somebody has removed them."""
        return self.is_ready and any(slot.is_removed for slot in self._slots)

    def take(self, needed: Place | None) -> Slot | None:
        """A slot that may be filled, whose lock this process has from now on: it is free, or holds a committed or
        superseded checkpoint that comes before `needed`, the newest one that all ranks hold sealed, or that an earlier
        job left (`is_left`). None where there is none now.

        Where `needed` is None, some rank holds nothing, so no checkpoint is whole in memory; then it must come before
        the newest one of this rank.
        """
        needed = needed or self.newest_sealed()
        for slot in self._slots:
            if self._is_reusable(slot, needed) and slot.take():
                if self._is_reusable(slot, needed):
                    return slot
                slot.let_go()  # another job of this rank has filled it since
        return None

    def oldest(self) -> tuple[bool, Place | None]:
        """Whether there is a slot that holds nothing, or none was made yet and there will be; and the oldest checkpoint
        in one that might be filled."""
        there = [slot for slot in self._slots if not slot.is_removed]
        contents = [slot.record.contents for slot in there if slot.refresh().state in REUSABLE]
        places = [each.place for each in contents if each is not None and not self.is_left(each)]
        is_free = len(places) < len(contents) or (self._thread is None and len(there) < self.num_slots)
        return is_free, min(places, default=None)

    def forget(self, is_foreign: Callable[[Contents], bool]) -> tuple[list[Contents], list[str]]:
        """Free slots that hold checkpoints foreign to the history that is saved into. Returns what they hold, and the
        ids of those checkpoints that a keeper still cares for, whose slots are not freed here."""
        forgotten, cared_for = [], []
        for slot in (*self._slots, *self._retired):
            contents = slot.refresh().contents
            if contents is not None and is_foreign(contents):
                forgotten.append(contents)
                if slot.state not in REUSABLE:
                    cared_for.append(contents.checkpoint_id)
                elif slot.take():
                    if slot.state in REUSABLE:
                        slot.advance(SlotRecord(SlotState.FREE))
                    slot.let_go()
        return forgotten, cared_for

    def remove_retired(self, needed: Place | None) -> None:
        """Remove slots that are too small by now, or too many, as far as they could be filled again, as `take`."""
        needed = needed or self.newest_sealed()
        for slot in [slot for slot in self._retired if slot.is_removed or self._is_reusable(slot, needed)]:
            if slot.refresh().state not in REUSABLE:
                continue  # somebody removed it, and the keeper still makes durable what it has mapped
            self._retired.remove(slot)
            self._unregister(slot)
            if not slot.remove_if(lambda _: True):
                slot.close()  # it is gone already, or another job's

    def newest_sealed(self) -> Place | None:
        """The newest checkpoint of which this rank's data file is in memory, whole."""
        records = [slot.refresh() for slot in (*self._slots, *self._retired) if not slot.is_removed]
        places = [record.contents.place for record in records if record.contents and record.state in WHOLE]
        return max(places, default=None)

    def give_back(self, *, watched: Collection[Slot] = ()) -> bool:
        """Stop preparing, and remove the slots that hold nothing that is still to become durable, but for those that
        are `watched`. Returns whether none is left. Call it again when the keeper has done more; nothing else follows
        but `close`."""
        self._stop()
        for slots in (self._slots, self._retired):
            for slot in [slot for slot in slots if slot not in watched and slot.refresh().state in REUSABLE]:
                slots.remove(slot)
                self._unregister(slot)
                if not slot.remove_if(lambda _: True):
                    slot.close()  # it is gone already, or another job's
        return not (self._slots or self._retired)

    def close(self) -> None:
        """Stop preparing, and close the slots, which stay where they are."""
        self._stop()
        for slot in (*self._slots, *self._retired):
            self._unregister(slot)
            slot.close()
        self._slots, self._retired = [], []
        self._claim.close()

    def _stop(self) -> None:
        self._stopped = True
        if self._thread is not None:
            self._thread.join()

    def _prepare(self, nbytes: int) -> None:
        start_s = time.perf_counter()
        try:
            with suppress(_Stopped), unusable_memory(self._folder.path):
                self._sort(nbytes)
                self._look((self.num_slots - len(self._slots)) * nbytes)
                for slot in self._slots:
                    if not slot.is_reserved:  # whoever made it was killed before
                        slot.reserve(before=self._look)
                    self._make_known(slot)
                while len(self._slots) < self.num_slots:
                    self._add(nbytes)
                    self._one.set()
                self.is_ready = True
        except HoldfastError as error:
            self.error = error
        finally:
            self.seconds = time.perf_counter() - start_s
            self._done.set()
            self._one.set()

    def _take_over(self) -> None:
        """Take over what slots the rank has from a process that had it before."""
        for name in slot_names(self._folder, rank=self._rank):
            with suppress(FileNotFoundError, CorruptError):
                slot = Slot(self._folder, name)
                slot.free_if_abandoned()
                self._slots.append(slot)

    def _is_reusable(self, slot: Slot, needed: Place | None) -> bool:
        contents = slot.refresh().contents
        if slot.is_removed or slot.state not in REUSABLE:
            return False
        return contents is None or self.is_left(contents) or (needed is not None and contents.place < needed)

    def _sort(self, nbytes: int) -> None:
        """Retire slots that are too small, too many, or were removed by somebody."""
        fit = [slot for slot in self._slots if slot.nbytes >= nbytes and not slot.is_removed][: self.num_slots]
        self._retired += [slot for slot in self._slots if slot not in fit]
        self._slots = fit
        self.remove_retired(None)

    def _add(self, nbytes: int) -> None:
        slot = Slot.create(self._folder, rank=self._rank, nbytes=nbytes)
        try:
            slot.reserve(before=self._look)
        except BaseException:
            slot.remove()
            raise
        self._make_known(slot)
        self._slots.append(slot)

    def _make_known(self, slot: Slot) -> None:
        if self._register is not None and slot.name not in self._registered:
            self._registered[slot.name] = self._register(slot.data)

    def _unregister(self, slot: Slot) -> None:
        end = self._registered.pop(slot.name, None)
        if end is not None:
            end()  # while it is mapped

    def _look(self, left_nbytes: int) -> None:
        """Raise where `left_nbytes` more do not fit."""
        if self._stopped:
            raise _Stopped
        if not left_nbytes:
            return
        tightest = self._tightest(left_nbytes + _SPARE_NBYTES)
        if tightest.free_nbytes < left_nbytes + _SPARE_NBYTES:
            raise ConfigurationError(
                f"There is no memory for the snapshots of rank {self._rank}: {left_nbytes} bytes more are needed, and "
                f"{_SPARE_NBYTES} for others, but {tightest.what} leaves {tightest.free_nbytes}.",
                code="config.memory",
                action="Raise that limit, or keep fewer generations.",
                path=str(self._folder.path),
                rank=self._rank,
            )

    def _tightest(self, wanted_nbytes: int) -> MemoryLimit:
        """What bounds the memory most. Where that is less than is wanted, what is durable gives way first, of all runs
        of this user whose trainers are no more."""
        is_locked = self._register is not None
        tightest = rooms(self._folder.path, locked=is_locked)[0]
        missing_nbytes = wanted_nbytes - tightest.free_nbytes
        if missing_nbytes > 0 and give_way(self._folder.node_dir, missing_nbytes):
            end = time.monotonic() + _GIVEN_WAY_S
            while tightest.free_nbytes < wanted_nbytes and time.monotonic() < end and not self._stopped:
                time.sleep(_LOOK_S)
                tightest = rooms(self._folder.path, locked=is_locked)[0]
        return tightest


class _Stopped(Exception):  # noqa: N818 - nothing is wrong
    """The arena is being closed."""
