"""The arena of a rank: its slots in the memory of its node, prepared while training goes on.

Taking fresh memory costs ten times as much as the copy into it. So the arena takes it in the background, once, and this
process and its successors use it again and again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from errno import EAGAIN
from threading import Event, Thread, current_thread
from typing import TypeAlias

from holdfast.errors import ConfigurationError, CorruptError, HoldfastError
from holdfast.format.records import Place
from holdfast.node_memory.claims import Claim
from holdfast.node_memory.inventory import give_way
from holdfast.node_memory.limits import MemoryLimit, rooms
from holdfast.node_memory.node_folder import NodeFolder, memory_error, unusable_memory
from holdfast.node_memory.slots import OWED, REUSABLE, SPENT, WHOLE, Contents, Slot, SlotRecord, SlotState, slot_names
from holdfast.store.base import Bytes

#: Registers memory with an accelerator; returns a function that unregisters it.
Register: TypeAlias = Callable[[Bytes], Callable[[], None]]

#: Memory that the arena leaves free for others.
_SPARE_NBYTES = 256 << 20
#: Time in which keepers notice removed slots and release their memory, even on a busy machine: they run at the lowest
#: priority.
_GIVEN_WAY_S = 10.0
#: Time in which a process of an ended job that is filling a slot may still die, before the arena does without the slot.
_DYING_S = 1.0
_LOOK_S = 0.02


class Arena:
    """The arena of `rank`: `num_slots` slots in `folder`, beginning with those that are there. This process has a claim
    to them until `close`, which leaves the slots in place; with `reserves`, one that is no trainer's until `fill`. Only
    one thread of one process per rank uses it.

    A slot that another process is filling, one of an earlier job say, does not count: that process may stand still.
    """

    def __init__(self, folder: NodeFolder, *, rank: int, num_slots: int, reserves: bool = False) -> None:
        self._folder = folder
        self._rank = rank
        #: The number of slots; a change takes effect at the next preparation.
        self.num_slots = num_slots
        self._slots: list[Slot] = []
        self._retired: list[Slot] = []
        self._stopped = False
        self._register: Register | None = None
        #: The function that unregisters a slot, by the slot's name.
        self._registered: dict[str, Callable[[], None]] = {}
        #: Whether a checkpoint is from an earlier job and no rank will load it again: its slot may be filled once it
        #: is durable, whatever checkpoint is needed.
        self.is_left: Callable[[Contents], bool] = lambda _: False
        #: Whether a checkpoint was given up, because some rank has no part of it. Its slot here may still hold a part.
        self.is_given_up: Callable[[Contents], bool] = lambda _: False
        self._one = Event()
        self._done = Event()
        #: Whether all slots are ready.
        self.is_ready = False
        #: Whether a save has asked for slots, and not only an early preparation.
        self._is_asked = False
        self._thread: Thread | None = None
        #: Whether this arena has removed empty slots, which a keeper may have mapped for some more moments.
        self._has_removed = False
        #: The error that ended the preparation, if any, and the seconds that the preparation took.
        self.error: HoldfastError | None = None
        self.seconds = 0.0
        self._claim = Claim(folder, rank, reserves=reserves)
        try:
            self._take_over()
        except BaseException:
            self.close()
            raise

    def fill(self) -> None:
        """Claim the slots as a trainer, which fills them from now on."""
        self._claim.fill()

    def prepare(self, nbytes: int, *, register: Register | None = None, early: bool = False) -> None:
        """Begin to prepare slots for data files of up to `nbytes`, in the background: existing slots that are large
        enough, and new ones; with `register`, each is registered. Blocks only until an earlier preparation has ended,
        and for a moment where another process is filling a slot; `wait` waits for this preparation. All other existing
        slots keep their contents as long as these may be needed. An `early` preparation comes before the save that will
        ask for one; if it fails, nothing is lost."""
        self._join()  # it may still be making slots of another size
        self._register = register
        self.is_ready, self.error = False, None
        # Here and not in the background, where it would free and remove slots under the hands of the caller.
        start_s = time.perf_counter()
        with self._noting_errors():
            self._await_dying()
            self._sort(nbytes)
        self._thread = Thread(target=self._take_memory, args=(nbytes, start_s), name="holdfast-arena", daemon=True)
        try:
            self._one.clear()
            self._done.clear()
            self._thread.start()
        except RuntimeError as error:
            self.error = memory_error(self._folder.path, OSError(EAGAIN, f"{error}"))
            self._end_preparation()
        except BaseException:
            self._end_preparation()
            raise
        # Only now: where an exception keeps slots from being made, the next save must ask for them again.
        self._is_asked = self._is_asked or not early

    def count_on_early(self) -> None:
        """Note that a save counts on the early preparation, so that from now on only slots that are ready are free."""
        self._is_asked = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until all slots are ready, or the preparation has failed (`error`). False when `timeout_s` passed
        first."""
        return self._done.wait(timeout_s)

    def wait_for_one(self, timeout_s: float | None = None) -> bool:
        """As `wait`, but only for the first new slot; the preparation of the others goes on."""
        return self._one.wait(timeout_s)

    @property
    def is_short(self) -> bool:
        """Whether a new preparation is needed: some process has removed slots after they were ready, or is filling
        some; or an interrupt ended the last preparation."""
        if not self._done.is_set():
            return False
        return not self.is_ready or any(slot.is_removed or slot.is_occupied for slot in self._slots)

    def take(self, needed: Place | None) -> Slot | None:
        """Take the lock of a slot that may be filled, and return the slot; None where there is none now. A slot may be
        filled if it is free, if its checkpoint is fenced, or if it is COMMITTED or HELD and its checkpoint comes before
        `needed`, the newest one that all ranks hold whole, was left by an earlier job (`is_left`) or was given up.

        Where `needed` is None, some rank holds nothing, so no checkpoint is whole in memory. Then the slot's checkpoint
        must come before the newest one of this rank.
        """
        needed = needed or self.newest_sealed()
        for slot in self._slots:
            if self._is_reusable(slot, needed) and slot.take():
                if self._is_reusable(slot, needed):
                    return slot
                slot.let_go()  # another job's trainer of this rank has filled it since
        return None

    def oldest(self) -> tuple[bool, Place | None]:
        """Whether a slot holds nothing that is needed (it is empty or fenced, or its checkpoint was given up or left by
        an earlier job) or the preparation for the first save will make one; and the oldest checkpoint in the other
        slots that might be filled."""
        there = [slot for slot in self._slots if not (slot.is_removed or slot.is_occupied)]
        records = [record for slot in there if (record := slot.refresh()).state in REUSABLE]
        places = [place for record in records if (place := self._kept(record)) is not None]
        is_free = len(places) < len(records) or (not self._is_asked and len(there) < self.num_slots)
        return is_free, min(places, default=None)

    def forget(self, is_foreign: Callable[[Contents], bool]) -> tuple[list[Contents], list[str]]:
        """Free slots whose checkpoints are foreign to the history that this job saves into. Returns the contents of
        all such slots, and the ids of the checkpoints among them that a keeper still has to make durable, whose slots
        this does not free."""
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
        """Remove the slots that are too small by now or too many, once they may be filled by the rules of `take`."""
        needed = needed or self.newest_sealed()
        for slot in [slot for slot in self._retired if slot.is_removed or self._is_reusable(slot, needed)]:
            if slot.refresh().state not in REUSABLE:
                continue  # its file is removed, but the keeper has it mapped and still makes it durable
            self._remove(slot, self._retired)

    def record_at(self, place: Place) -> SlotRecord | None:
        """The record of the slot that holds a part of the checkpoint at `place`; None if there is none."""
        records = [slot.refresh() for slot in (*self._slots, *self._retired)]
        return next((each for each in records if each.contents is not None and each.contents.place == place), None)

    def held(self) -> list[Contents]:
        """The contents of the HELD slots."""
        records = [slot.refresh() for slot in (*self._slots, *self._retired)]
        return [each.contents for each in records if each.state == SlotState.HELD and each.contents is not None]

    def holds_for_keeper(self, is_old: Callable[[Contents], bool]) -> bool:
        """Whether a slot has contents that are old, and that the keeper still has to make durable."""
        records = [slot.refresh() for slot in self._slots]
        return any(each.contents is not None and is_old(each.contents) for each in records if each.state in OWED)

    def newest_sealed(self, is_counted: Callable[[Contents], bool] = lambda _: True) -> Place | None:
        """The place of the newest checkpoint whose data file of this rank is complete in memory, and that was not given
        up; of those that `is_counted` is true of."""
        records = [slot.refresh() for slot in (*self._slots, *self._retired) if not slot.is_removed]
        whole = [record.contents for record in records if record.contents and record.state in WHOLE]
        sound = [contents for contents in whole if not self.is_given_up(contents)]
        return max((contents.place for contents in sound if is_counted(contents)), default=None)

    def give_back(self, *, watched: Collection[Slot] = (), keeps_held: bool = False) -> bool:
        """Stop preparing, and remove the slots whose contents need not become durable any more, except for the
        `watched` ones, and with `keeps_held` for the HELD ones. Leaves slots that another process is filling to it.
        Returns whether no slot is left. Call it again when the keeper has made progress; afterwards only `close` may be
        called."""
        self._stop()
        removed = SPENT if keeps_held else REUSABLE
        for slots in (self._slots, self._retired):
            unneeded = [slot for slot in slots if slot.refresh().state in removed or slot.is_occupied]
            for slot in [slot for slot in unneeded if slot not in watched]:
                self._remove(slot, slots)
        return not (self._slots or self._retired)

    def remove_empty(self) -> None:
        """Stop preparing, and remove the slots that never held anything."""
        self._stop()
        for slot in [slot for slot in self._slots if slot.refresh().contents is None]:
            self._has_removed = True
            self._remove(slot, self._slots, lambda record: record.contents is None)
        self._stopped = False

    def close(self) -> None:
        """Stop preparing, and close the slots, which stay in the folder."""
        self._stop()
        for slot in (*self._slots, *self._retired):
            self._unregister(slot)
            slot.close()
        self._slots, self._retired = [], []
        self._claim.close()

    def _stop(self) -> None:
        self._stopped = True
        self._join()

    def _join(self) -> None:
        if self._thread is not None and self._thread.ident is not None:  # an interrupt may have kept it from its start
            self._thread.join()

    def _end_preparation(self) -> None:
        self._one.set()
        self._done.set()

    def _take_memory(self, nbytes: int, start_s: float) -> None:
        """Give all slots their memory, and make new ones."""
        if self._thread is not current_thread():
            return  # an interrupt came while it was started, and another one does the work
        try:
            if self.error is None:
                with self._noting_errors():
                    self._fill_up(nbytes)
                    self.is_ready = True
        finally:
            self.seconds = time.perf_counter() - start_s
            self._end_preparation()

    def _fill_up(self, nbytes: int) -> None:
        self._look((self.num_slots - len(self._slots)) * nbytes)
        for slot in self._slots:
            if not slot.is_reserved:  # the process that made it was killed before it had reserved it
                slot.reserve(before=self._look)
            self._make_known(slot)
        while len(self._slots) < self.num_slots:
            self._add(nbytes)
            self._one.set()

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """An error in the block ends the preparation, and becomes its `error`."""
        try:
            with suppress(_Stopped), unusable_memory(self._folder.path):
                yield
        except HoldfastError as error:
            self.error = error

    def _await_dying(self) -> None:
        """Wait a moment for processes that are filling slots of this arena, and free the slots of those that died."""
        end = time.monotonic() + _DYING_S
        while any(slot.is_occupied for slot in self._slots) and time.monotonic() < end and not self._stopped:
            time.sleep(_LOOK_S)
        for slot in self._slots:
            slot.free_if_abandoned()

    def _take_over(self) -> None:
        """Take over the slots that an earlier trainer of this rank left."""
        for name in slot_names(self._folder, rank=self._rank):
            with suppress(FileNotFoundError, CorruptError):
                slot = Slot(self._folder, name)
                try:
                    slot.free_if_abandoned()
                except BaseException:
                    slot.close()
                    raise
                self._slots.append(slot)

    def _is_reusable(self, slot: Slot, needed: Place | None) -> bool:
        record = slot.refresh()
        if slot.is_removed or record.state not in REUSABLE:
            return False
        place = self._kept(record)
        return place is None or (needed is not None and place < needed)

    def _kept(self, record: SlotRecord) -> Place | None:
        """The place of the checkpoint in a slot, if some job may restore it from memory; else None."""
        contents = record.contents
        if contents is None or record.state == SlotState.FENCED or self.is_left(contents):
            return None
        if self.is_given_up(contents):  # the keeper may have committed it all the same: then storage has it
            return None
        return contents.place

    def _sort(self, nbytes: int) -> None:
        """Retire slots that are too small, too many, removed, or occupied."""
        usable = [slot for slot in self._slots if not (slot.is_removed or slot.is_occupied)]
        fit = [slot for slot in usable if slot.nbytes >= nbytes][: self.num_slots]
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

    def _remove(
        self, slot: Slot, slots: list[Slot], is_unneeded: Callable[[SlotRecord], bool] = lambda _: True
    ) -> None:
        """Do without a slot of `slots`, and remove it for all processes, as `Slot.remove_if` does."""
        slots.remove(slot)
        self._unregister(slot)
        if not slot.remove_if(is_unneeded):
            slot.close()  # it is gone already, or another job has it

    def _make_known(self, slot: Slot) -> None:
        if self._register is not None and slot.name not in self._registered:
            self._registered[slot.name] = self._register(slot.data)

    def _unregister(self, slot: Slot) -> None:
        end = self._registered.pop(slot.name, None)
        if end is not None:
            end()  # before the slot is unmapped

    def _look(self, left_nbytes: int) -> None:
        """Raise where `left_nbytes` more do not fit into memory, or the arena is being closed."""
        if self._stopped:
            raise _Stopped
        if not left_nbytes:
            return
        tightest = self._tightest(left_nbytes + _SPARE_NBYTES)
        if tightest.free_nbytes < left_nbytes + _SPARE_NBYTES:
            raise ConfigurationError(
                f"There is no memory for the snapshots of rank {self._rank}: they need {left_nbytes} more bytes, and "
                f"{_SPARE_NBYTES} bytes must stay free, but {tightest.what} leaves {tightest.free_nbytes}.",
                code="config.memory",
                action="Raise that limit, or keep fewer generations.",
                path=str(self._folder.path),
                rank=self._rank,
            )

    def _tightest(self, wanted_nbytes: int) -> MemoryLimit:
        """The tightest limit on memory. Where it leaves less than `wanted_nbytes`, this first removes durable slots of
        ranks without a trainer, of all runs of this user, and waits for their memory and that of own removed slots."""
        is_locked = self._register is not None
        tightest = rooms(self._folder.path, locked=is_locked)[0]
        missing_nbytes = wanted_nbytes - tightest.free_nbytes
        if missing_nbytes > 0 and (give_way(self._folder.node_dir, missing_nbytes) or self._has_removed):
            self._has_removed = False
            end = time.monotonic() + _GIVEN_WAY_S
            while tightest.free_nbytes < wanted_nbytes and time.monotonic() < end and not self._stopped:
                time.sleep(_LOOK_S)
                tightest = rooms(self._folder.path, locked=is_locked)[0]
        return tightest


class _Stopped(Exception):  # noqa: N818 - it is no error
    """The arena is being closed."""
