"""A slot: one rank's region of node memory for one snapshot.

A slot is a file in a `NodeFolder`. Its first page holds its state; its data files of a checkpoint, one or two, begin at
`DATA_START`, byte for byte as they will be on disk.

The copy of a slot of another node is a slot too, under a name of its own (`copy_names`): the keeper alone fills it.
It goes from WRITING by STAGED, which it leaves at once, to HELD. So does a row of parity (`parity_records`).

The state of a slot decides which process may change it, so that at any time only one may:

    FREE        the lock's holder   the slot holds nothing
    WRITING     the lock's holder   the holder is filling the slot; if it dies, the contents are useless
    STAGED      the keeper          the copy is complete
    SEALED      the keeper          hashed, with its header: a data file like any other, read until it is durable
    HELD        the lock's holder   the same, of a save to memory alone: a newer checkpoint takes its place, or, where
                                    the trainers end before, it becomes SEALED
    ON_DISK     the lock's holder   the data file is durable on a disk of the node, from where the keeper brings it to
                                    the run: a newer checkpoint may take its place in memory
    COMMITTED   the lock's holder   the checkpoint is in the history of the run
    FENCED      the lock's holder   the contents must not become durable: another job took over the run, or somebody
                                    gave the checkpoint up

The slot's lock is a lock on its file (`file_locks`), and the keeper's right is a lock on a file of the folder
(`keeper_lock`): the kernel drops both when their holder dies. So no process has to judge whether another one lives, and
the proof that no death leaves a slot torn or without an owner is short:

1. *The record is whole.* The page has two cells, written in turn, each with a sequence number and a digest. The one
   process that may change the record writes the older cell, and never touches the newer one, which is valid. A process
   that is killed while it writes leaves a cell with a wrong digest, so the state is still the one before. The next
   change writes that same cell again.
2. *Two processes never change it at once.* A process needs the lock to take the slot from FREE, HELD, ON_DISK,
   COMMITTED or FENCED to WRITING, from HELD or ON_DISK to any other state, and to remove the file, and it reads the
   record again after it got the lock and before it relies on it. Only the lock's holder takes the slot from WRITING to
   STAGED, and it releases the lock after that change. From STAGED on only the keeper changes the slot, until it is
   HELD, ON_DISK, COMMITTED, FENCED or FREE; after that the keeper needs the lock too. The keeper's own lock makes sure
   that there is one keeper.
3. *No dead process keeps a slot.* The writer holds the lock in WRITING as long as it lives. So a process that finds
   WRITING and gets the lock knows that the writer is dead, and frees the slot (the keeper does so at its next look, or
   the rank's next trainer). STAGED and SEALED slots wait for the next keeper, which repeats the step: sealing reads
   only the staged bytes, and persisting and committing write the same bytes again.
4. *No process fills a removed slot.* A process removes the file under its lock, and only in a state in which nothing is
   lost with it. A process that gets the lock later finds that the file has no name (`is_removed`), and does not use it.
   Processes that have it mapped for reading keep its memory.
5. *No crash of the node makes bytes durable that were not saved.* Slots are never flushed. In memory they end with the
   node; on a disk some pages may have reached it, and others not. So contents say in which boot they were copied, and
   after another one the keeper frees what is STAGED, and hashes what is SEALED again before it writes it.
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
from contextlib import suppress
from enum import IntEnum, StrEnum
from threading import Lock
from typing import Final, NamedTuple, Self

import msgspec
import xxhash

from holdfast.decoding import decode_msgpack
from holdfast.errors import ConfigurationError, CorruptError
from holdfast.format.records import Place
from holdfast.io.pages import HUGE_PAGE_NBYTES, shared
from holdfast.node_memory import file_locks
from holdfast.node_memory.node_folder import NodeFolder, boot_id
from holdfast.store.base import Bytes
from holdfast.store.linux import collapse_pages
from holdfast.wording import count

#: Offset of the data file in a slot: the start of a huge page. The gap after the state's page takes no memory.
DATA_START: Final = HUGE_PAGE_NBYTES

#: Bytes that are reserved between two checks of the free memory.
_RESERVED_NBYTES: Final = 64 << 20

#: Time in which another process lets go of a slot that it promotes, and the interval of looks at it.
_PROMOTION_S: Final = 5.0
_LOOK_S: Final = 0.01

_log = logging.getLogger(__name__)
_MAGIC: Final = b"HFSLOT02"
_CELL_NBYTES: Final = 2048
#: Header of a cell: magic, sequence number, and the size and digest of the payload.
_CELL: Final = struct.Struct("<8sQI16s")


class SlotKind(StrEnum):
    """The kind of a slot, with which its name begins: a snapshot of a rank of this node; a copy of a slot of another
    node; or a row of parity of slots of other nodes."""

    SNAPSHOT = "slot"
    COPY = "copy"
    PARITY = "parity"


class SlotState(IntEnum):
    """The state of a slot; the module's docstring says what each means and who may change it."""

    FREE = 0
    WRITING = 1
    STAGED = 2
    SEALED = 3
    COMMITTED = 4
    FENCED = 5
    HELD = 6
    ON_DISK = 7


#: The states that may follow each state. A slot whose contents were given up becomes FREE.
_NEXT: Final = {
    SlotState.FREE: (SlotState.WRITING,),
    SlotState.WRITING: (SlotState.STAGED, SlotState.FREE),
    SlotState.STAGED: (SlotState.SEALED, SlotState.HELD, SlotState.FREE),
    SlotState.SEALED: (SlotState.SEALED, SlotState.ON_DISK, SlotState.COMMITTED, SlotState.FENCED, SlotState.FREE),
    SlotState.COMMITTED: (SlotState.WRITING, SlotState.FREE),
    SlotState.FENCED: (SlotState.WRITING, SlotState.FREE),
    SlotState.HELD: (SlotState.WRITING, SlotState.SEALED, SlotState.FREE),
    SlotState.ON_DISK: (
        SlotState.WRITING,
        SlotState.ON_DISK,
        SlotState.SEALED,
        SlotState.COMMITTED,
        SlotState.FENCED,
        SlotState.FREE,
    ),
}


#: States of slots that hold a whole data file which may be restored. (That of a FENCED slot must not: the run goes on
#: without it.)
WHOLE: Final = (SlotState.SEALED, SlotState.HELD, SlotState.ON_DISK, SlotState.COMMITTED)
#: States of slots with which nothing is lost: the contents are nothing, durable, or must not become durable.
SPENT: Final = (SlotState.FREE, SlotState.ON_DISK, SlotState.COMMITTED, SlotState.FENCED)
#: States in which the holder of the slot's lock may overwrite or remove it. A HELD slot is needed until a newer
#: checkpoint is whole in memory, or durable.
REUSABLE: Final = (*SPENT, SlotState.HELD)
#: States of slots whose contents only memory has, and that a keeper still has to make durable.
OWED: Final = (SlotState.STAGED, SlotState.SEALED)


class SlotFile(msgspec.Struct, frozen=True, array_like=True):
    """Data file number `file` in a slot. It begins at `start` of the slot's region and has `nbytes`, of which the first
    `data_start` are its header."""

    file: int
    start: int
    data_start: int
    nbytes: int

    @property
    def stop(self) -> int:
        """The end of the file in the slot's region."""
        return self.start + self.nbytes


class Contents(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a slot: data file number `file` of a checkpoint of the run `run_id`. The file has `nbytes`, of
    which the first `data_start` are its header. With `memory_only`, it is to become HELD. It was copied into the slot
    while the node ran as `boot` ("": not recorded). A rank with a moving and a still file has the still one as
    `second`."""

    run_id: str
    checkpoint_id: str
    place: Place
    step: int
    file: int
    data_start: int
    nbytes: int
    memory_only: bool = False
    boot: str = ""
    second: SlotFile | None = None

    @property
    def files(self) -> tuple[SlotFile, ...]:
        """The data files in the slot."""
        first = SlotFile(self.file, 0, self.data_start, self.nbytes)
        return (first,) if self.second is None else (first, self.second)

    @property
    def files_nbytes(self) -> int:
        """The size of all its files."""
        return sum(each.nbytes for each in self.files)

    @property
    def is_of_earlier_boot(self) -> bool:
        """Whether the node has booted since the copy. Then the slot lies on a disk, and the node may have gone down
        before all of it was there: only what agrees with its digests is what was saved."""
        return self.boot not in ("", boot_id())


class SlotRecord(msgspec.Struct, frozen=True, array_like=True):
    """The record of a slot: its state, and its `contents`, which are those to come while it is WRITING. `digest` is the
    digest of the data file's digest table, from SEALED on, and `second_digest` that of the second file. `error` says
    why the last attempt to make it durable failed. ``referenced_nbytes`` are the bytes that did not go to storage,
    because an earlier checkpoint has them there."""

    state: SlotState
    contents: Contents | None = None
    digest: str = ""
    error: str = ""
    second_digest: str = ""
    referenced_nbytes: int = 0

    @property
    def digests(self) -> tuple[str, ...]:
        """The digest of each file of the contents."""
        return (self.digest, self.second_digest)


class _WrittenRecord(NamedTuple):
    """A record read from its cell: it was written as change number `sequence`, at the time `since`."""

    sequence: int
    since: float
    record: SlotRecord


class Slot:
    """A slot, mapped into this process; safe for several threads. Use it as a context manager, or `close` it.

    `data` is the region for the data file; it has `nbytes`.
    """

    def __init__(self, folder: NodeFolder, name: str) -> None:
        """Open the slot called `name`.

        Raises:
            FileNotFoundError: there is no such slot.
            CorruptError: the file is not a slot, other users may use it, or both cells of its page are damaged.
        """
        self.name = name
        self.path = folder.path / name
        self._folder = folder
        self._lock = Lock()
        #: Whether this object has the slot's lock.
        self._is_mine = False
        #: Whether some process has truncated the file or overwritten both its records: its contents are lost. Set by
        #: the first read of the record that finds it.
        self.is_damaged = False
        try:
            self._fd = folder.open(name)
        except ConfigurationError as error:  # other users may have written to it
            raise self._corrupt("it is not a regular file that only this user may access") from error
        try:
            size = os.fstat(self._fd).st_size
            if size <= DATA_START:
                raise self._corrupt(f"it has {count(size, 'byte')}")
            self.nbytes = size - DATA_START
            self._memory = shared(self._fd, size, for_children=False)
            #: The page as it was last read, and the record in it.
            self._page, self._found = b"", _WrittenRecord(0, 0.0, SlotRecord(SlotState.FREE))
            self.record = self._newest().record
        except BaseException:
            os.close(self._fd)
            raise

    @staticmethod
    def create(folder: NodeFolder, *, rank: int, nbytes: int, kind: SlotKind = SlotKind.SNAPSHOT) -> Slot:
        """Create a FREE slot for data files of up to `nbytes`. It takes memory only when it is reserved or written. A
        row of parity has its number, 0 for P and 1 for Q, for a rank."""
        name = f"{kind}-{rank}-{secrets.token_hex(8)}"
        new, fd = folder.create_unnamed()  # gets its name once it is complete: no process ever finds half a slot
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
        """The state as this process last read or wrote it."""
        return self.record.state

    @property
    def rank(self) -> int:
        """The rank whose snapshots the slot is for."""
        return rank_of(self.name)

    @property
    def kind(self) -> SlotKind:
        """The kind of the slot, from its name."""
        return SlotKind(self.name.partition("-")[0])

    @property
    def is_copy(self) -> bool:
        """Whether this is the copy of a slot of another node."""
        return self.kind is SlotKind.COPY

    @property
    def region(self) -> tuple[int, int]:
        """The open file, and the offset in it at which the region for the data file begins."""
        return self._fd, DATA_START

    @property
    def is_reserved(self) -> bool:
        """Whether the slot has all its memory. Otherwise a write to it kills the process when no memory is left."""
        return os.fstat(self._fd).st_blocks * 512 >= self.nbytes

    @property
    def is_closed(self) -> bool:
        """Whether this object was closed, and knows no more than the last record that it read."""
        return self._fd < 0

    @property
    def is_removed(self) -> bool:
        """Whether some process has removed or damaged the slot: no process would find a snapshot written to it."""
        with self._lock:
            return self._fd >= 0 and (self.is_damaged or os.fstat(self._fd).st_nlink == 0)

    @property
    def since(self) -> float:
        """The time at which the slot came into its known `state`, in seconds since 1970."""
        return self._found.since

    @property
    def held_nbytes(self) -> int:
        """The bytes of memory that the slot takes now."""
        return os.fstat(self._fd).st_blocks * 512

    @property
    def is_taken(self) -> bool:
        """Whether another process, which then is alive, has the slot's lock."""
        return file_locks.is_locked(self._fd)

    @property
    def is_occupied(self) -> bool:
        """Whether another process, which is alive, is filling the slot. It may stand still for as long as it likes."""
        return self.refresh().state == SlotState.WRITING and self.is_taken

    def take(self) -> bool:
        """Take the slot's lock if it is free, and read the record again. Returns whether this process has the lock now;
        it does not take the lock of a slot that was removed."""
        if self._fd < 0 or not file_locks.try_lock(self._fd):
            return False
        self._is_mine = True
        if self.is_removed:
            self.let_go()
            return False
        self.refresh()
        return True

    def let_go(self) -> None:
        """Release the slot's lock."""
        self._is_mine = False
        file_locks.unlock(self._fd)

    def has_changed(self) -> bool:
        """Whether any process has changed the slot's record since it was last read here. Takes microseconds."""
        return self._is_cut() or self._look() != self._page

    def refresh(self) -> SlotRecord:
        """Read the record again, and return it. Takes microseconds where it has not changed. For a slot that is closed
        here or damaged, returns the last known record."""
        with self._lock:
            self._find_damage()
            return self.record

    def _find_damage(self) -> None:
        """Read the record, or note that the slot is damaged."""
        if self._fd < 0 or self.is_damaged:
            return
        try:
            if self._is_cut():  # reading mapped memory behind the end of its file kills the process
                raise self._corrupt("another process truncated it")
            self.record = self._newest().record
        except CorruptError as error:
            self.is_damaged = True
            _log.error("%s", error)

    def _is_cut(self) -> bool:
        return os.fstat(self._fd).st_size < DATA_START + self.nbytes

    def advance(self, record: SlotRecord) -> None:
        """Write a new record. The present state says which process may call this (see the module). On return, all
        processes that map the slot see the record, and it survives this process. (The record of a damaged slot changes
        in this object only.) Also releases the slot's lock, if this process has it, unless the new state is WRITING."""
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
            # A reader sees the whole cell, or its digest tells the reader that the cell is not whole yet.
            self._memory[start : start + len(cell)] = memoryview(cell)
            self.record = record
            if self._is_mine and record.state != SlotState.WRITING:
                self.let_go()  # after the change, because WRITING without a lock means that the writer is dead

    def promote(self, checkpoint_id: str) -> bool:
        """Hand the slot to the keeper to make it durable, if it is HELD with a part of that checkpoint, and no other
        process has its lock. Returns whether there is no such part in it any more."""

        def is_held() -> bool:
            contents = self.refresh().contents
            return self.state == SlotState.HELD and contents is not None and contents.checkpoint_id == checkpoint_id

        if is_held() and self.take():
            if is_held():
                self.advance(msgspec.structs.replace(self.record, state=SlotState.SEALED))
            else:
                self.let_go()
        return not is_held()

    def settle(self, checkpoint_id: str, state: SlotState, error: str, *, referenced_nbytes: int = 0) -> None:
        """Record what became of a part of that checkpoint that lies on the disk of the node: the new `state`, why the
        last try to bring it to the run failed, and how many bytes an earlier checkpoint has there. Does nothing where
        the slot holds it no longer, or a process is about to fill it anew. Only for the keeper."""

        def settled() -> SlotRecord | None:
            record = self.refresh()
            is_there = record.contents is not None and record.contents.checkpoint_id == checkpoint_id
            if not is_there or record.state != SlotState.ON_DISK:
                return None
            new = msgspec.structs.replace(record, state=state, error=error, referenced_nbytes=referenced_nbytes)
            return None if new == record else new

        if settled() is not None and self.take():
            new = settled()
            if new is None:
                self.let_go()
            else:
                self.advance(new)

    def free_if_abandoned(self) -> bool:
        """Free the slot if the process that was filling it is dead. Returns whether it freed the slot."""
        if self.state != SlotState.WRITING or not self.take():
            return False
        is_abandoned = self.refresh().state == SlotState.WRITING
        if is_abandoned:
            self.advance(SlotRecord(SlotState.FREE))
        else:
            self.let_go()
        return is_abandoned

    def reserve(self, *, before: Callable[[int], None] = lambda _: None) -> None:
        """Allocate memory for the whole slot, in huge pages where the system has them; new memory is zero.

        Blocks for long (about a second per GiB). Calls `before` with the number of bytes left, again and again; an
        error that it raises ends the reservation.

        Raises:
            ConfigurationError: the file system is full.
        """
        for start in range(0, self.nbytes, _RESERVED_NBYTES):
            before(self.nbytes - start)
            for page in range(start, min(start + _RESERVED_NBYTES, self.nbytes), HUGE_PAGE_NBYTES):
                # First a small page, around which the system makes a huge one; where that failed, the other small ones.
                self._allocate(page, 4096)
                collapse_pages(self.data.ctypes.data + page, HUGE_PAGE_NBYTES)
                self._allocate(page, HUGE_PAGE_NBYTES)

    def remove_if(self, is_unneeded: Callable[[SlotRecord], bool]) -> bool:
        """Remove the slot for all processes if it may be removed and `is_unneeded` is true of its record, which this
        reads again under the slot's lock. Returns whether it removed the slot, which then is closed here too. A
        folder that takes no changes, as after a change of the user id, keeps its slots."""
        if not self.take():
            return False
        if self.state in REUSABLE and is_unneeded(self.record):
            try:
                self.remove()
            except OSError as error:
                _log.debug("could not remove '%s': %s", self.path, error)
            else:
                return True
        self.let_go()
        return False

    def remove(self) -> None:
        """Remove the slot for all processes, and close it here. The system frees its memory when no process has it
        mapped. Only for the holder of the slot's lock, or for the process that has just made the slot."""
        self._folder.remove(self.name)
        self.close()

    def close(self) -> None:
        """Close the slot here, and release its lock. Its memory stays mapped as long as anything refers to the array
        that `data` returned."""
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
                f"'{self._folder.path}' has no room for {self.nbytes} bytes: its file system is full after {start}.",
                code="config.memory",
                action="Make the file system larger (mount -o remount,size=), keep fewer generations, or remove other "
                "files from it.",
                path=str(self.path),
            ) from error

    def _newest(self) -> _WrittenRecord:
        """The newest record whose cell is whole."""
        page = self._look()
        if page != self._page:
            found = [cell for start in (0, _CELL_NBYTES) if (cell := _read_cell(page[start : start + _CELL_NBYTES]))]
            if not found:
                raise self._corrupt("neither of its records is whole")
            self._page, self._found = page, max(found, key=lambda cell: cell.sequence)
        return self._found

    def _look(self) -> bytes:
        return self._memory[: 2 * _CELL_NBYTES].tobytes()  # a copy: another process may be writing one of the cells

    def _corrupt(self, what: str) -> CorruptError:
        return CorruptError(
            f"'{self.path}' is not a valid slot: {what}.",
            code="corrupt.slot",
            action="Remove the file: nothing in it can be used.",
            path=str(self.path),
            tier="node memory",
        )


def slot_names(folder: NodeFolder, *, rank: int | None = None) -> list[str]:
    """The names of all slots in a folder, or of one rank's slots, sorted."""
    return [name for name in _names(folder, SlotKind.SNAPSHOT) if rank is None or rank_of(name) == rank]


def copy_names(folder: NodeFolder) -> list[str]:
    """The names of the copies in a folder that its keeper holds for other nodes, sorted."""
    return _names(folder, SlotKind.COPY)


def parity_names(folder: NodeFolder) -> list[str]:
    """The names of the rows of parity in a folder that its keeper holds for other nodes, sorted."""
    return _names(folder, SlotKind.PARITY)


def _names(folder: NodeFolder, kind: SlotKind) -> list[str]:
    return [name for name in folder.names() if re.fullmatch(rf"{kind}-\d+-\w+", name)]


def promote_all(folder: NodeFolder, checkpoint_id: str, *, is_meant: Callable[[Slot], bool] = lambda _: True) -> None:
    """Hand the HELD parts of a checkpoint in `folder` to the keeper, which makes them durable; only those slots and
    copies that `is_meant` is true of. Several processes may do so at once."""
    for name in (*slot_names(folder), *copy_names(folder)):
        with suppress(FileNotFoundError, CorruptError), Slot(folder, name) as slot:
            end = time.monotonic() + _PROMOTION_S
            while is_meant(slot) and not slot.promote(checkpoint_id) and time.monotonic() < end:
                time.sleep(_LOOK_S)


def rank_of(name: str) -> int:
    """The rank whose slot is called `name`."""
    return int(name.split("-")[1])


def _cell(sequence: int, record: SlotRecord) -> bytes:
    payload = msgspec.msgpack.encode((time.time(), record))
    assert _CELL.size + len(payload) <= _CELL_NBYTES
    return _CELL.pack(_MAGIC, sequence, len(payload), _digest(sequence, payload)) + payload


def _read_cell(cell: bytes) -> _WrittenRecord | None:
    """The record in a cell; None where the cell is not whole."""
    magic, sequence, nbytes, digest = _CELL.unpack_from(cell)
    payload = cell[_CELL.size : _CELL.size + nbytes]
    if magic != _MAGIC or digest != _digest(sequence, payload):
        return None
    try:
        since, record = decode_msgpack(payload, tuple[float, SlotRecord])
    except msgspec.DecodeError:
        return None
    return _WrittenRecord(sequence, since, record)


def _digest(sequence: int, payload: bytes) -> bytes:
    return xxhash.xxh3_128_digest(sequence.to_bytes(8, "little") + payload)
