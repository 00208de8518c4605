"""The keeper: one process per node, user and run, which makes durable what trainers have staged, and outlives them.

It looks at the slots of its folder again and again: what is staged it seals, what is sealed it writes to storage, and
when all files of a checkpoint are there, from whichever nodes, it commits. All that it knows stands in the slots, so a
keeper that is killed at any instant is replaced by another that goes on where it was.

Trainers find what became of their snapshots in the slots too: nobody waits for an answer that a death could keep back.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from holdfast.errors import CorruptError, FencedError, HoldfastError
from holdfast.keeper.generations import generation_ids, is_given_up, read_generation, remove_generation
from holdfast.keeper.node_folder import NodeFolder
from holdfast.keeper.persist import Sealing, commit, persist
from holdfast.keeper.slots import Record, Slot, State, slot_names
from holdfast.run.history import Run
from holdfast.run.paths import storage_at
from holdfast.transfer.timed import TimedStorage

#: After so long without trainers and work a keeper ends, and gives back the memory.
IDLE_S: Final = 1800.0
#: What is staged when a keeper is told to end, it makes durable for so long.
GRACE_S: Final = 60.0

_LOCK_NAME: Final = "keeper.lock"
#: ``struct flock``: type, from where, start, length, process.
_FLOCK: Final = struct.Struct("hhqqi4x")

#: How often a keeper looks when it has nothing to do; trainers need not wake it.
_LOOK_S: Final = 0.05
#: After a store failed, or while other nodes are not done, it is left alone for so long.
_RETRY_S: Final = 1.0
#: How long a store may take to answer.
_STORE_TIMEOUT_S: Final = 600.0
#: Longer texts of errors would not fit into the record of a slot.
_MAX_ERROR_LETTERS: Final = 600

#: What a keeper is to make durable.
_OWED: Final = (State.STAGED, State.SEALED)
#: What it has done with.
_DONE: Final = (State.FREE, State.COMMITTED, State.SUPERSEDED)

_log = logging.getLogger(__name__)


def try_lock(folder: NodeFolder) -> int | None:
    """The right to be the keeper of `folder`, as a descriptor, for as long as it is open; None where another has it.

    It goes with the process that holds it, however that ends.
    """
    fd = _lock_file(folder)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    except OSError:
        os.close(fd)
        return None
    return fd


def is_kept(folder: NodeFolder) -> bool:
    """Whether a keeper of `folder` is at work. (Asks for the lock without taking it, which could keep one away.)"""
    fd = _lock_file(folder)
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(fd)
    return bool(_FLOCK.unpack(found)[0] != fcntl.F_UNLCK)


def _lock_file(folder: NodeFolder) -> int:
    with suppress(FileExistsError):
        os.close(folder.create(_LOCK_NAME))
    return folder.open(_LOCK_NAME)


class Keeper:
    """Keeps `folder`; the caller holds its lock. Used by one thread; another one writes to storage meanwhile, so that a
    slow store does not keep newer snapshots from being sealed."""

    def __init__(self, folder: NodeFolder) -> None:
        self._folder = folder
        self._slots: dict[str, Slot] = {}
        self._generations: dict[str, Sealing] = {}
        self._retry_at: dict[str, float] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="holdfast-persist")
        self._writing: _Writing | None = None

    def run(self, *, is_over: Callable[[], bool], idle_s: float) -> None:
        """Work until `is_over`, or until for `idle_s` no trainer lived and nothing was to be done; then the memory is
        given back."""
        busy_at = time.monotonic()
        while not is_over():
            if self.look() or self.owes or self._has_trainers():
                busy_at = time.monotonic()
            if time.monotonic() - busy_at > idle_s:
                self.give_back()
                return
            time.sleep(_LOOK_S)

    def finish(self, *, grace_s: float) -> bool:
        """Make durable what is staged or sealed, for `grace_s` at most. Whether all of it is."""
        end = time.monotonic() + grace_s
        self.look()
        while self.owes and time.monotonic() < end:
            time.sleep(_LOOK_S)
            self.look()
        return not self.owes

    def look(self) -> bool:
        """Do what is to be done now, or begin it. Whether there was anything."""
        # A trainer that writes a generation has a slot that is not free already; so in this order none is forgotten
        # that has just come.
        known = generation_ids(self._folder)
        self._meet()
        self._give_up()
        self._remove_old()
        self._forget(known)
        sealed = self._seal_all()
        return self._write_next() or sealed

    @property
    def owes(self) -> bool:
        """Whether anything is staged or sealed that is not durable."""
        return any(slot.state in _OWED for slot in self._slots.values())

    def give_back(self) -> None:
        """Remove all slots that hold nothing that is not durable, and whose trainers are no more."""
        self._meet()
        for name, slot in list(self._slots.items()):
            if slot.state in _DONE and not _is_tended(slot):
                self._slots.pop(name).remove()
        self._forget(generation_ids(self._folder))

    def close(self) -> None:
        """Close all slots, which stay where they are; waits for what is being written."""
        self._writer.shutdown()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()

    def _meet(self) -> None:
        """Open slots that are new, and close those that are gone."""
        names = set(slot_names(self._folder))
        for name in self._slots.keys() - names:
            self._slots.pop(name).close()
        for name in sorted(names - self._slots.keys()):
            with suppress(FileNotFoundError, CorruptError):
                self._slots[name] = Slot(self._folder, name)
        for slot in self._slots.values():
            slot.refresh()

    def _forget(self, known: list[str]) -> None:
        """Forget those of the `known` generations of which no slot holds anything, nor may be about to."""
        if any(slot.state == State.WRITING for slot in self._slots.values()):
            return
        held = {slot.record.contents.checkpoint_id for slot in self._slots.values() if slot.record.contents}
        for checkpoint_id in set(known) - held:
            remove_generation(self._folder, checkpoint_id)
            self._generations.pop(checkpoint_id, None)
            self._retry_at.pop(checkpoint_id, None)

    def _remove_old(self) -> None:
        """Remove slots of ranks that are no more, when a later checkpoint of those that are is whole and committed, or
        one of another run: that which was here before is gone."""
        committed = [slot for slot in self._slots.values() if slot.state == State.COMMITTED]
        kept = [slot.record.contents for slot in committed if slot.record.contents and _is_tended(slot)]
        newest = max(kept, key=lambda contents: contents.place, default=None)
        for name, slot in list(self._slots.items()):
            contents = slot.record.contents
            if newest is None or contents is None or slot.state not in _DONE or _is_tended(slot):
                continue
            if contents.run_id != newest.run_id or contents.place < newest.place:
                self._slots.pop(name).remove()

    def _give_up(self) -> None:
        """Free what can never become whole."""
        for slot in self._slots.values():
            contents = slot.record.contents
            if slot.state in _OWED and contents and is_given_up(self._folder, contents.checkpoint_id):
                if self._writing is not None and slot in self._writing.slots:
                    continue  # not while it is being read
                slot.advance(Record(State.FREE))

    def _seal_all(self) -> bool:
        staged = [slot for slot in self._slots.values() if slot.state == State.STAGED]
        for slot in staged:
            assert slot.record.contents is not None
            sealing = self._sealing(slot.record.contents.checkpoint_id)
            if sealing is None:
                _log.error("'%s' is of a checkpoint that nothing is known of: it is given up.", slot.path)
                slot.advance(Record(State.FREE))
            else:
                sealing.seal(slot)
        return bool(staged)

    def _sealing(self, checkpoint_id: str) -> Sealing | None:
        """What is known of a checkpoint; None where that is lost."""
        if checkpoint_id not in self._generations:
            try:
                self._generations[checkpoint_id] = Sealing(read_generation(self._folder, checkpoint_id))
            except (FileNotFoundError, CorruptError) as error:
                _log.error("%s", error)
                return None
        return self._generations[checkpoint_id]

    def _write_next(self) -> bool:
        """Begin to write the oldest sealed generation, unless one is being written; take note of how that ended."""
        if self._writing is not None:
            if not self._writing.outcome.done():
                return True
            self._note(self._writing)
            self._writing = None
        now = time.monotonic()
        sealed: dict[str, list[Slot]] = {}
        for slot in self._slots.values():
            contents = slot.record.contents
            if slot.state == State.SEALED and contents and self._retry_at.get(contents.checkpoint_id, now) <= now:
                sealed.setdefault(contents.checkpoint_id, []).append(slot)
        found = ((sealing, sealed[each]) for each in sealed if (sealing := self._sealing(each)) is not None)
        oldest = min(found, key=lambda pair: pair[0].generation.place, default=None)
        if oldest is None:
            return False
        self._writing = _Writing(*oldest, self._writer.submit(_write, *oldest))
        return True

    def _note(self, writing: _Writing) -> None:
        """Say in the slots what came of it, or that it is to be tried again."""
        state, text = State.SEALED, ""
        try:
            if writing.outcome.result():
                state = State.COMMITTED
        except FencedError as error:
            state, text = State.SUPERSEDED, str(error)
        except HoldfastError as error:
            text = str(error)
        if text:
            _log.error("%s", text)
        if state == State.SEALED:
            self._retry_at[writing.sealing.generation.checkpoint_id] = time.monotonic() + _RETRY_S
        for slot in writing.slots:
            record = msgspec.structs.replace(slot.record, state=state, error=text[:_MAX_ERROR_LETTERS])
            if record != slot.record:
                slot.advance(record)

    def _has_trainers(self) -> bool:
        return any(map(_is_tended, self._slots.values()))


def _is_tended(slot: Slot) -> bool:
    """Whether the trainer that filled a slot, or took it over, is alive."""
    return slot.record.writer is not None and slot.record.writer.is_alive()


class _Writing(NamedTuple):
    """A generation that is being written to storage; the outcome is whether it was committed."""

    sealing: Sealing
    slots: list[Slot]
    outcome: Future[bool]


def _write(sealing: Sealing, slots: list[Slot]) -> bool:
    """Make `slots` durable. Whether the checkpoint is committed: it is when all nodes have done so."""
    with TimedStorage(storage_at(sealing.generation.run), timeout_s=_STORE_TIMEOUT_S) as storage:
        run = Run.open(storage)  # first: nothing is written where it is not, or not any more
        if run.run_id != sealing.stored.manifest.body.run_id:
            raise _replaced(run)
        for slot in slots:
            persist(storage, sealing, slot)
        return commit(run, sealing) is not None


def _replaced(run: Run) -> FencedError:
    return FencedError(
        f"'{run.storage.uri}' is not the run that this was saved into, but one that was begun there later.",
        code="fenced.run",
        action="Nothing is to be done: that run was removed, and this with it.",
        path=run.storage.uri,
    )


def keep(folder: NodeFolder, lock: int, *, is_over: Callable[[], bool], idle_s: float, grace_s: float) -> bool:
    """Keep `folder`, whose `lock` this process has, until `is_over` or idle. Whether everything is durable then."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, b"%d\n" % os.getpid(), 0)  # for people who look for it
    keeper = Keeper(folder)
    try:
        keeper.run(is_over=is_over, idle_s=idle_s)
        return keeper.finish(grace_s=grace_s)
    finally:
        keeper.close()
