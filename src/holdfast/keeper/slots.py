"""A slot: one rank's region of node memory for one snapshot.

A slot is a file in a `NodeFolder`. Its first page says what state it is in; from `DATA_START` on lies the data file of
a checkpoint, byte for byte as it will be on disk. The page has two cells, written in turn, each with a sequence number
and a digest: whoever is killed while writing one leaves the other, which says what was before. So a slot has no lock
that a death could leave behind. At most one process at a time may change it, which one follows from its state, and when
the trainer of its rank is dead it is the keeper in any case:

    FREE        the trainer  nothing is in it
    WRITING     the trainer  being filled; of no use if the trainer dies
    STAGED      the keeper   all is copied
    SEALED      the keeper   hashed, with its header: a data file like any other, which is read until it is durable
    COMMITTED   the trainer  its checkpoint is in the history of the run
    SUPERSEDED  the trainer  it is not to become durable: a newer complete generation is in memory
"""

from __future__ import annotations

import errno
import os
import secrets
import struct
from collections.abc import Callable
from enum import IntEnum
from threading import Lock
from typing import Final, Self

import msgspec
import xxhash

from holdfast.errors import ConfigurationError, CorruptError
from holdfast.format.records import Place
from holdfast.keeper.node_folder import NodeFolder
from holdfast.keeper.process import Process
from holdfast.storage.base import Bytes
from holdfast.storage.linux import collapse_pages, keep_private
from holdfast.transfer.pages import HUGE_PAGE_NBYTES, shared

#: Where the data file begins in a slot: at a huge page. What lies between takes no memory.
DATA_START: Final = HUGE_PAGE_NBYTES

#: How much is reserved between two looks at what is left.
_RESERVED_NBYTES: Final = 64 << 20

_PREFIX: Final = "slot-"
_MAGIC: Final = b"HFSLOT01"
_CELL_NBYTES: Final = 2048
#: Magic, sequence number, size and digest of what follows.
_CELL: Final = struct.Struct("<8sQI16s")


class State(IntEnum):
    """What is in a slot."""

    FREE = 0
    WRITING = 1
    STAGED = 2
    SEALED = 3
    COMMITTED = 4
    SUPERSEDED = 5


#: What each state may become. What was given up becomes FREE.
_NEXT: Final = {
    State.FREE: (State.WRITING,),
    State.WRITING: (State.STAGED, State.FREE),
    State.STAGED: (State.SEALED, State.FREE),
    State.SEALED: (State.SEALED, State.COMMITTED, State.SUPERSEDED, State.FREE),
    State.COMMITTED: (State.COMMITTED, State.WRITING, State.FREE),
    State.SUPERSEDED: (State.SUPERSEDED, State.WRITING, State.FREE),
}


#: States of slots that hold a whole data file.
WHOLE: Final = (State.SEALED, State.COMMITTED, State.SUPERSEDED)


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


class Record(msgspec.Struct, frozen=True, array_like=True):
    """The state of a slot. `writer` is the process that fills it, did, or has taken it over; `contents` is what is in
    it, from STAGED on; `digest` is of its digest table, from SEALED on; `error` says why it did not become durable when
    that was tried."""

    state: State
    writer: Process | None = None
    contents: Contents | None = None
    digest: str = ""
    error: str = ""


class Slot:
    """A slot, mapped into this process; safe for its threads. Use as a context manager, or `close` it.

    `data` is the region for the data file, `nbytes` of it.
    """

    def __init__(self, folder: NodeFolder, name: str) -> None:
        """Open the slot called `name`.

        Raises:
            FileNotFoundError: there is none.
            CorruptError: it is not a slot, or both cells of its page are damaged.
            ConfigurationError: it is not a file of this user alone.
        """
        self.name = name
        self.path = folder.path / name
        self._folder = folder
        self._lock = Lock()
        self._fd = folder.open(name)
        try:
            size = os.fstat(self._fd).st_size
            if size <= DATA_START:
                raise self._corrupt(f"it has {size} bytes")
            self.nbytes = size - DATA_START
            self._memory = shared(self._fd, size)
            keep_private(self._memory.ctypes.data, size)
            #: The page as it was last read, and what was found in it.
            self._page, self._found = b"", (0, Record(State.FREE))
            _, self.record = self._newest()
        except BaseException:
            os.close(self._fd)
            raise

    @staticmethod
    def create(folder: NodeFolder, *, rank: int, nbytes: int) -> Slot:
        """A new slot for data files of up to `nbytes`, free. It takes memory when it is reserved, or written to."""
        name = f"{_PREFIX}{rank}-{secrets.token_hex(8)}"
        new = folder.unnamed()  # until it is one: nobody ever finds half a slot
        fd = folder.create(new)
        try:
            os.ftruncate(fd, DATA_START + -(-nbytes // HUGE_PAGE_NBYTES) * HUGE_PAGE_NBYTES)
            os.pwrite(fd, _cell(0, Record(State.FREE)), 0)
            folder.rename(new, name)
        except BaseException:
            folder.remove(new)
            raise
        finally:
            os.close(fd)
        return Slot(folder, name)

    @property
    def data(self) -> Bytes:
        """The region for the data file."""
        return self._memory[DATA_START:]

    @property
    def state(self) -> State:
        """The state that this process knows."""
        return self.record.state

    @property
    def rank(self) -> int:
        """The rank whose snapshots it is for."""
        return int(self.name.split("-")[1])

    @property
    def is_reserved(self) -> bool:
        """Whether it has its memory: a write where there is none, and none is left, would end the process."""
        return os.fstat(self._fd).st_blocks * 512 >= self.nbytes

    @property
    def is_removed(self) -> bool:
        """Whether somebody has removed it: what is written to it then, nobody finds."""
        with self._lock:
            return self._fd >= 0 and os.fstat(self._fd).st_nlink == 0

    def has_changed(self) -> bool:
        """Whether anybody has changed the state since it was last read. Takes microseconds."""
        return self._look() != self._page

    def refresh(self) -> Record:
        """Read what others have made of the slot. Takes microseconds where that is nothing. A slot that is closed here
        says what it said last."""
        with self._lock:
            if self._fd >= 0:
                _, self.record = self._newest()
            return self.record

    def advance(self, record: Record) -> None:
        """Change the state. Only for whom the present state allows it, see the module. Survives this process at once,
        and is seen by all others that map the slot."""
        with self._lock:
            last, self.record = self._newest()
            assert record.state in _NEXT[self.state], f"{self.state.name} does not become {record.state.name}"
            cell = _cell(last + 1, record)
            start = (last + 1) % 2 * _CELL_NBYTES
            # One write of the whole cell: a reader sees it, or by its digest that it is not whole.
            self._memory[start : start + len(cell)] = memoryview(cell)
            self.record = record

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

    def remove(self) -> None:
        """Remove the slot for all; memory goes when nobody has it mapped. Closes it here."""
        self._folder.remove(self.name)
        self.close()

    def close(self) -> None:
        """Close the slot here. Its memory stays mapped as long as something refers to what `data` was."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
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

    def _newest(self) -> tuple[int, Record]:
        """The newer of the two cells that are whole."""
        page = self._look()
        if page != self._page:
            found = [cell for start in (0, _CELL_NBYTES) if (cell := _read_cell(page[start : start + _CELL_NBYTES]))]
            if not found:
                raise self._corrupt("neither of its records is whole")
            self._page, self._found = page, max(found, key=lambda cell: cell[0])
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
    prefix = _PREFIX if rank is None else f"{_PREFIX}{rank}-"
    return [name for name in folder.names() if name.startswith(prefix)]


def _cell(sequence: int, record: Record) -> bytes:
    payload = msgspec.msgpack.encode(record)
    assert _CELL.size + len(payload) <= _CELL_NBYTES
    return _CELL.pack(_MAGIC, sequence, len(payload), _digest(sequence, payload)) + payload


def _read_cell(cell: bytes) -> tuple[int, Record] | None:
    """Sequence number and record; None where it is not whole."""
    magic, sequence, nbytes, digest = _CELL.unpack_from(cell)
    payload = cell[_CELL.size : _CELL.size + nbytes]
    if magic != _MAGIC or digest != _digest(sequence, payload):
        return None
    return sequence, msgspec.msgpack.decode(payload, type=Record)


def _digest(sequence: int, payload: bytes) -> bytes:
    return xxhash.xxh3_128_digest(sequence.to_bytes(8, "little") + payload)
