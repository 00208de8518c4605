"""A slot: one rank's region of node memory for one snapshot.

A slot is a file in a `NodeFolder`. Its first page says what state it is in; from `DATA_START` on lies the data file of
a checkpoint, byte for byte as it will be on disk.

Who may change a slot follows from its state, so that at any time it is one process:

    FREE        who has the slot's lock   nothing is in it
    WRITING     who has the slot's lock   it is being filled; of no use if the process that does it dies
    STAGED      the keeper                all is copied
    SEALED      the keeper                hashed, with its header: a data file like any other, read until it is durable
    COMMITTED   who has the slot's lock   its checkpoint is in the history of the run
    FENCED      who has the slot's lock   it must not become durable: another job took over the run

The slot's lock is a lock on its file (`file_locks`), the keeper's right a lock on the folder's: the kernel drops both
when their holder dies. So no process has to judge whether another one lives, and the proof that no death leaves a slot
torn or without an owner is short:

1. *The record is whole.* The page has two cells, written in turn, each with a sequence number and a digest. The one
   process that may change the record writes the older cell, so the newer one, which holds, is never touched. Whoever is
   killed while it writes leaves a cell whose digest is wrong, and the state is what it was before. The next change
   writes that same cell again.
2. *Two processes never change it at once.* FREE, COMMITTED, FENCED -> WRITING, and the removal of the file, need
   the lock, and who got it reads the record again before it goes by it. Only the holder takes the slot from WRITING to
   STAGED, and lets go of the lock behind that. From STAGED on the keeper alone changes it, until it is COMMITTED,
   FENCED or FREE, after which the keeper changes it no more without the lock. There is one keeper, by its lock.
3. *No slot is lost to a dead process.* WRITING is held as long as the writer lives: whoever finds WRITING and gets the
   lock knows that the writer is dead, and frees it (the keeper does at its next look, or the next trainer of the rank).
   STAGED and SEALED wait for the next keeper, which begins that step again: sealing reads only what was staged, and
   persisting and committing write what is there already.
4. *What was removed is never filled.* The file is removed under its lock, and only in a state in which nothing is lost
   with it. Whoever gets the lock later finds a file without a name (`is_removed`), and does not use it. Those who have
   it mapped for reading keep its memory.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from threading import Lock
from typing import Final, NamedTuple, Self

import msgspec
import xxhash

from holdfast.decoding import decode_msgpack
from holdfast.errors import ConfigurationError, CorruptError
from holdfast.format.records import Place
from holdfast.io.pages import HUGE_PAGE_NBYTES, shared
from holdfast.node_memory import file_locks
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.store.base import Bytes
from holdfast.store.linux import collapse_pages, keep_private
from holdfast.wording import count

#: Where the data file begins in a slot: at a huge page. What lies between takes no memory.
DATA_START: Final = HUGE_PAGE_NBYTES

#: How much is reserved between two looks at what is left.
_RESERVED_NBYTES: Final = 64 << 20

_PREFIX: Final = "slot-"
_NAME: Final = re.compile(r"slot-(\d+)-\w+")

_log = logging.getLogger(__name__)
_MAGIC: Final = b"HFSLOT02"
_CELL_NBYTES: Final = 2048
#: Magic, sequence number, size and digest of what follows.
_CELL: Final = struct.Struct("<8sQI16s")


class SlotState(IntEnum):
    """What is in a slot."""

    FREE = 0
    WRITING = 1
    STAGED = 2
    SEALED = 3
    COMMITTED = 4
    FENCED = 5


#: What each state may become. What was given up becomes FREE.
_NEXT: Final = {
    SlotState.FREE: (SlotState.WRITING,),
    SlotState.WRITING: (SlotState.STAGED, SlotState.FREE),
    SlotState.STAGED: (SlotState.SEALED, SlotState.FREE),
    SlotState.SEALED: (SlotState.SEALED, SlotState.COMMITTED, SlotState.FENCED, SlotState.FREE),
    SlotState.COMMITTED: (SlotState.WRITING, SlotState.FREE),
    SlotState.FENCED: (SlotState.WRITING, SlotState.FREE),
}


#: States of slots that hold a whole data file.
WHOLE: Final = (SlotState.SEALED, SlotState.COMMITTED, SlotState.FENCED)
#: States in which nothing is lost with what a slot holds: it is nothing, durable, or not to become so.
REUSABLE: Final = (SlotState.FREE, SlotState.COMMITTED, SlotState.FENCED)
#: States of slots that a keeper is to make durable.
OWED: Final = (SlotState.STAGED, SlotState.SEALED)


class Contents(msgspec.Struct, frozen=True, array_like=True):
    """What a slot is filled with: the data file number `file` of a checkpoint of the run `run_id`, `nbytes` with its
    header of `data_start`."""

    run_id: str
    checkpoint_id: str
    place: Place
    step: int
    file: int
    data_start: int
    nbytes: int


class SlotRecord(msgspec.Struct, frozen=True, array_like=True):
    """The state of a slot. `contents` is what is in it, or, while it is WRITING, will be; `digest` is of its digest
    table, from SEALED on; `error` says why it did not become durable when that was tried."""

    state: SlotState
    contents: Contents | None = None
    digest: str = ""
    error: str = ""


class _WrittenRecord(NamedTuple):
    """A record as it was written: as the change number `sequence`, at the time `since`."""

    sequence: int
    since: float
    record: SlotRecord


class Slot:
    """A slot, mapped into this process; safe for its threads. Use as a context manager, or `close` it.

    `data` is the region for the data file, `nbytes` of it.
    """

    def __init__(self, folder: NodeFolder, name: str) -> None:
        """Open the slot called `name`.

        Raises:
            FileNotFoundError: there is none.
            CorruptError: it is not a slot, others may use it, or both cells of its page are damaged.
        """
        self.name = name
        self.path = folder.path / name
        self._folder = folder
        self._lock = Lock()
        #: Whether this has the slot's lock.
        self._is_mine = False
        #: Whether somebody has cut the file, or written over both its records: what it holds is lost. Known from the
        #: next look at it on.
        self.is_damaged = False
        try:
            self._fd = folder.open(name)
        except ConfigurationError as error:  # others may have written to it
            raise self._corrupt("it is not a file of this user alone") from error
        try:
            size = os.fstat(self._fd).st_size
            if size <= DATA_START:
                raise self._corrupt(f"it has {count(size, 'byte')}")
            self.nbytes = size - DATA_START
            self._memory = shared(self._fd, size)
            keep_private(self._memory.ctypes.data, size)
            #: The page as it was last read, and what was found in it.
            self._page, self._found = b"", _WrittenRecord(0, 0.0, SlotRecord(SlotState.FREE))
            self.record = self._newest().record
        except BaseException:
            os.close(self._fd)
            raise

    @staticmethod
    def create(folder: NodeFolder, *, rank: int, nbytes: int) -> Slot:
        """A new slot for data files of up to `nbytes`, free. It takes memory when it is reserved, or written to."""
        name = f"{_PREFIX}{rank}-{secrets.token_hex(8)}"
        new, fd = folder.create_unnamed()  # until it is one: nobody ever finds half a slot
        try:
            os.ftruncate(fd, DATA_START + -(-nbytes // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES)
            os.pwrite(fd, _cell(0, SlotRecord(SlotState.FREE)), 0)
            folder.rename(new, name)
        except BaseException:
            folder.remove(new)
            raise
        finally:
            file_locks.close(fd)
        return Slot(folder, name)

    @property
    def data(self) -> Bytes:
        """The region for the data file."""
        return self._memory[DATA_START:]

    @property
    def state(self) -> SlotState:
        """The state that this process knows."""
        return self.record.state

    @property
    def rank(self) -> int:
        """The rank whose snapshots it is for."""
        return rank_of(self.name)

    @property
    def is_reserved(self) -> bool:
        """Whether it has its memory: a write where there is none, and none is left, would end the process."""
        return os.fstat(self._fd).st_blocks * 512 >= self.nbytes

    @property
    def is_removed(self) -> bool:
        """Whether somebody has removed it, or damaged it: what is written to it then, nobody finds."""
        with self._lock:
            return self._fd >= 0 and (self.is_damaged or os.fstat(self._fd).st_nlink == 0)

    @property
    def since(self) -> float:
        """When it came into the state that this process knows, in seconds since 1970."""
        return self._found.since

    @property
    def held_nbytes(self) -> int:
        """The memory that it takes."""
        return os.fstat(self._fd).st_blocks * 512

    @property
    def is_taken(self) -> bool:
        """Whether another process has its lock: the one that fills it, which lives."""
        return file_locks.is_locked(self._fd)

    def take(self) -> bool:
        """Take the slot's lock, if nobody else has it, and read the record again. Whether this process has it now, and
        somebody will find what it does: the file has not been removed."""
        if self._fd < 0 or not file_locks.try_lock(self._fd):
            return False
        self._is_mine = True
        if self.is_removed:
            self.let_go()
            return False
        self.refresh()
        return True

    def let_go(self) -> None:
        """Let go of the slot's lock."""
        self._is_mine = False
        file_locks.unlock(self._fd)

    def has_changed(self) -> bool:
        """Whether anybody has changed the state since it was last read. Takes microseconds."""
        return self._is_cut() or self._look() != self._page

    def refresh(self) -> SlotRecord:
        """Read what others have made of the slot. Takes microseconds where that is nothing. A slot that is closed here
        says what it said last, and so does a damaged one."""
        with self._lock:
            self._find_damage()
            return self.record

    def _find_damage(self) -> None:
        """Read the record, or note that there is none any more."""
        if self._fd < 0 or self.is_damaged:
            return
        try:
            if self._is_cut():  # whoever looks at memory behind the end of its file is killed
                raise self._corrupt("somebody has cut it")
            self.record = self._newest().record
        except CorruptError as error:
            self.is_damaged = True
            _log.error("%s", error)

    def _is_cut(self) -> bool:
        return os.fstat(self._fd).st_size < DATA_START + self.nbytes

    def advance(self, record: SlotRecord) -> None:
        """Change the state. Only for whom the present state allows it, see the module. Survives this process at once,
        and is seen by all others that map the slot. The slot's lock ends with the state WRITING."""
        with self._lock:
            self._find_damage()
            if self.is_damaged:
                self.record = record
                return
            last = self._newest()
            assert record.state in _NEXT[self.state], f"{self.state.name} does not become {record.state.name}"
            assert self._is_mine or self.state in OWED, f"{self.state.name} changes only who has the slot's lock"
            cell = _cell(last.sequence + 1, record)
            start = (last.sequence + 1) % 2 * _CELL_NBYTES
            # One write of the whole cell: a reader sees it, or by its digest that it is not whole.
            self._memory[start : start + len(cell)] = memoryview(cell)
            self.record = record
            if self._is_mine and record.state != SlotState.WRITING:
                self.let_go()  # behind the change: WRITING without a lock says that the writer is dead

    def free_if_abandoned(self) -> bool:
        """Free the slot if the process that was filling it is dead. Whether it was."""
        if self.state != SlotState.WRITING or not self.take():
            return False
        is_abandoned = self.refresh().state == SlotState.WRITING
        if is_abandoned:
            self.advance(SlotRecord(SlotState.FREE))
        else:
            self.let_go()
        return is_abandoned

    def reserve(self, *, before: Callable[[int], None] = lambda _: None) -> None:
        """Take memory for all of the slot, in huge pages where the system has them; what was not there yet is zero.

        Takes long (a second per GiB or so). `before` is called with the bytes that are still to come, again and again,
        and may end it with an error.

        Raises:
            ConfigurationError: the file system is full.
        """
        for start in range(0, self.nbytes, _RESERVED_NBYTES):
            before(self.nbytes - start)
            for page in range(start, min(start + _RESERVED_NBYTES, self.nbytes), HUGE_PAGE_NBYTES):
                # A small page, around which the huge one is made; and where that failed, the other small ones.
                self._allocate(page, 4096)
                collapse_pages(self.data.ctypes.data + page, HUGE_PAGE_NBYTES)
                self._allocate(page, HUGE_PAGE_NBYTES)

    def remove_if(self, is_unneeded: Callable[[SlotRecord], bool]) -> bool:
        """Remove the slot for all, if its record, read again under its lock, `is_unneeded` and in a state in which
        nothing is lost with it. Whether it was removed; then it is closed here too."""
        if not self.take():
            return False
        if self.state in REUSABLE and is_unneeded(self.record):
            self.remove()
            return True
        self.let_go()
        return False

    def remove(self) -> None:
        """Remove the slot for all, and close it here; its memory goes when nobody has it mapped. For who has the slot's
        lock, or has just made it."""
        self._folder.remove(self.name)
        self.close()

    def close(self) -> None:
        """Close the slot here, and let go of its lock. Its memory stays mapped as long as something refers to what
        `data` was."""
        with self._lock:
            if self._fd >= 0:
                file_locks.close(self._fd)
                self._fd, self._memory = -1, self._memory[:0].copy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _allocate(self, start: int, nbytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, DATA_START + start, nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise
            raise ConfigurationError(
                f"There is no room for {self.nbytes} bytes in '{self._folder.path}': after {start} it is full.",
                code="config.memory",
                action="Make the file system larger (mount -o remount,size=), keep fewer generations, or remove what "
                "else is in it.",
                path=str(self.path),
            ) from error

    def _newest(self) -> _WrittenRecord:
        """The newer of the two cells that are whole."""
        page = self._look()
        if page != self._page:
            found = [cell for start in (0, _CELL_NBYTES) if (cell := _read_cell(page[start : start + _CELL_NBYTES]))]
            if not found:
                raise self._corrupt("neither of its records is whole")
            self._page, self._found = page, max(found, key=lambda cell: cell.sequence)
        return self._found

    def _look(self) -> bytes:
        return self._memory[: 2 * _CELL_NBYTES].tobytes()  # others may be writing one of them

    def _corrupt(self, what: str) -> CorruptError:
        return CorruptError(
            f"'{self.path}' is no slot: {what}.",
            code="corrupt.slot",
            action="Remove it; it holds nothing that can be used.",
            path=str(self.path),
            tier="node memory",
        )


def slot_names(folder: NodeFolder, *, rank: int | None = None) -> list[str]:
    """Names of all slots in a folder, or of those of one rank, sorted."""
    names = [name for name in folder.names() if _NAME.fullmatch(name)]
    return [name for name in names if rank is None or rank_of(name) == rank]


def rank_of(name: str) -> int:
    """The rank whose slot is called `name`."""
    return int(name.split("-")[1])


def _cell(sequence: int, record: SlotRecord) -> bytes:
    payload = msgspec.msgpack.encode((time.time(), record))
    assert _CELL.size + len(payload) <= _CELL_NBYTES
    return _CELL.pack(_MAGIC, sequence, len(payload), _digest(sequence, payload)) + payload


def _read_cell(cell: bytes) -> _WrittenRecord | None:
    """What is in a cell; None where it is not whole."""
    magic, sequence, nbytes, digest = _CELL.unpack_from(cell)
    payload = cell[_CELL.size : _CELL.size + nbytes]
    if magic != _MAGIC or digest != _digest(sequence, payload):
        return None
    since, record = decode_msgpack(payload, tuple[float, SlotRecord])
    return _WrittenRecord(sequence, since, record)


def _digest(sequence: int, payload: bytes) -> bytes:
    return xxhash.xxh3_128_digest(sequence.to_bytes(8, "little") + payload)
