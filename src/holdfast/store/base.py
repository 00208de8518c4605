"""The protocol of a store: the operations on bytes that holdfast needs.

Keys are relative, ``/``-separated names below the store's root. A store never overwrites an object: it creates each
once, whole and durable, or not at all. The only other change is the deletion of whole checkpoints. Errors are
`NotFoundError` for a missing key and `StorageError` (``retryable`` where a retry can help) for everything else; both
name the full path.
"""

from __future__ import annotations

import builtins
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, runtime_checkable

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: A string, so that this module does not import numpy: the command line reads records without it, and starts in half
#: the time.
Bytes: TypeAlias = "npt.NDArray[np.uint8]"


#: The beginning of a URL; any text without it is the path of a folder.
SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Location(msgspec.Struct, frozen=True, array_like=True):
    """The location of a store, as a value: the absolute path of a folder or a URL, and options for opening it.

    Processes that can reach the store open the same one from equal locations (`holdfast.store.urls.open_store`).
    """

    url: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.url

    @property
    def folder(self) -> Path | None:
        """The folder that the location names; None for a URL."""
        return None if SCHEME.match(self.url) else Path(self.url)

    @property
    def parent(self) -> Location | None:
        """The location that this one lies in, with the same options; None for a bucket or a root folder."""
        scheme = SCHEME.match(self.url)
        above = self.url.rstrip("/").rpartition("/")[0]
        return Location(above, self.options) if len(above) > (scheme.end() if scheme else 0) else None

    def below(self, name: str) -> Location:
        """The location of `name` in this one, with the same options."""
        return Location(f"{self.url.rstrip('/')}/{name}", self.options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The abilities of a store that not all stores have.

    `is_mappable`: the path of an object is the path of a file that this process can map into its memory.

    `unlisted_remains`: what dead writers may leave that `Store.leftovers` does not list, and who removes it, or empty.
    ``holdfast doctor`` shows it.

    `in_order`: objects may have to be written from the first byte to the last; `FileWriter.in_order` says which.

    `request_nbytes`, `num_requests`: so many reads of this size at a time use the store fully. Where the size is more
    than 2 MiB, its readers should be `StreamingReader`.

    `is_fenced`: of several writers that create one object at once, one succeeds. Where a store lacks it, one of two
    jobs that write to a run at the same time can replace records of the other.
    """

    is_mappable: bool = False
    in_order: bool = False
    is_fenced: bool = True
    unlisted_remains: str = ""
    request_nbytes: int = 2 << 20
    num_requests: int = 3


class FileWriter(Protocol):
    """One object under construction; invisible under its key until `publish`. Safe for concurrent `write_at`."""

    @property
    def alignment(self) -> int:
        """The alignment for direct writes, in bytes; 1 where alignment has no effect.

        Writes whose offset, length and buffer address are multiples of it go directly to the device. Others work, too,
        but are buffered.
        """

    @property
    def in_order(self) -> bool:
        """Whether the object must be written from its first byte to its last.

        Then a `write_at` waits until all bytes before it were written, so of concurrent ones the first must be under
        way. `abort` may be called while threads wait, and makes them raise.
        """

    def write_at(self, offset: int, *data: Bytes) -> None:
        """Write all of `data`, one array after the other, from `offset` on. Returns when the store has taken the bytes,
        and the arrays may change again; the bytes are not yet durable."""

    def publish(self, nbytes: int) -> None:
        """Cut the object to `nbytes`, make it durable, and make it visible under its key.

        Raises `StorageError`, code ``storage.exists``, when the key exists.
        """

    def abort(self) -> None:
        """Drop the object and all bytes written. Does nothing after `publish`; never raises."""


class FileReader(Protocol):
    """An open object. Safe for concurrent `read_at`."""

    @property
    def alignment(self) -> int:
        """As `FileWriter.alignment`."""

    @property
    def nbytes(self) -> int:
        """Size of the object."""

    @property
    def memory(self) -> Bytes | None:
        """All bytes of the object, valid until `close`, where they are in memory that this process sees; else None."""

    def read_at(self, offset: int, out: Bytes) -> None:
        """Fill `out` with the bytes from `offset` on.

        Raises `CorruptError`, code ``corrupt.short``, where the object ends before `out` is full.
        """

    def close(self) -> None:
        """Release the object."""


@runtime_checkable
class StreamingReader(FileReader, Protocol):
    """A `FileReader` that gets the bytes of several reads by one request."""

    def expect(self, start: int, stop: int) -> None:
        """Note that the calling thread will read [start, stop) next, in order, by any number of `read_at`."""


class Store(Protocol):
    """A place for bytes: create-only objects with atomic, durable publication."""

    #: The location that this store was opened from.
    location: Location
    capabilities: Capabilities

    def resolved(self) -> str:
        """A canonical text for the root: two stores with equal texts have the same root."""

    def path(self, key: str) -> str:
        """The full path of `key`, for messages and for people."""

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        """Read the bytes of an object, or `nbytes` of them from `start`.

        Raises `CorruptError`, code ``corrupt.size``, for an object of more than `limit` bytes, before it allocates
        memory.
        """

    def nbytes(self, key: str) -> int | None:
        """Size of an object, or None where there is none.

        A temporary name from `leftovers`, below its folder, is a key here, too.
        """

    def list(self, folder: str, *, limit: int | None = None) -> list[str]:
        """The names directly below `folder`, sorted; empty where the folder does not exist. ``""`` is the root.

        Temporary names of unpublished objects are left out. With `limit`, only the first `limit` names; a store whose
        server sorts them gets them with a number of requests that does not depend on how many others there are.
        """

    def create(self, key: str, data: bytes) -> bool:
        """Publish `data` under `key`, atomically and durably. Returns False, without a change, when the key exists."""

    def writer(self, key: str, *, nbytes: int) -> FileWriter:
        """Begin an object of `nbytes`. The store reserves space where it can, so that a full disk fails here."""

    def reader(self, key: str) -> FileReader:
        """Open an object for positional reads."""

    def delete(self, key: str) -> bool:
        """Delete an object, durably on return. Returns False where there was none.

        A temporary name from `leftovers`, below its folder, is a key here, too.
        """

    def leftovers(self, folder: str, *, older_than_s: float = 0.0) -> builtins.list[str]:
        """Temporary names directly below `folder`, sorted: of objects that a writer left, or may still be writing.

        Lists only names to which nothing was written for `older_than_s` seconds, or whose writer is known to be dead.
        Empty where the store shows no temporary names.
        """
