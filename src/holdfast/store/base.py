"""What holdfast needs from a place where bytes live.

Keys are relative, ``/``-separated names below the storage's root. Nothing is ever overwritten: every object is
created once, whole and durable, or not at all; the only change there is, is that a whole checkpoint is deleted. Errors
are `NotFoundError` for a missing key and `StorageError` (``retryable`` where a retry can help) for everything else;
both name the full path.
"""

from __future__ import annotations

import builtins
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

#: A string, because the records of a run are read without numpy: a command line starts in half the time.
Bytes: TypeAlias = "npt.NDArray[np.uint8]"


#: What a URL begins with; everything else is the path of a folder.
SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Location(msgspec.Struct, frozen=True, array_like=True):
    """A place for a store, as a value: the absolute path of a folder or a URL, and options for opening it.

    Every process that sees the place opens the same store from an equal location (`holdfast.store.urls.open_store`).
    """

    url: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return self.url

    @property
    def folder(self) -> Path | None:
        """The folder that it is; None for a URL."""
        return None if SCHEME.match(self.url) else Path(self.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a store can do beside what all stores do. `is_mappable`: the path of an object is that of a file which this
    process can map into its memory."""

    is_mappable: bool = False


class FileWriter(Protocol):
    """One object under construction; invisible under its key until `publish`. Safe for concurrent `write_at`."""

    @property
    def alignment(self) -> int:
        """Offsets, lengths and buffer addresses that are multiples of this go to the device without a detour; others
        work too (buffered). 1 where alignment means nothing."""

    def write_at(self, offset: int, data: Bytes) -> None:
        """Write all of `data` at `offset`; returns when the store took it (not yet durable)."""

    def publish(self, nbytes: int) -> None:
        """Cut to `nbytes`, make durable, and make visible under the key. Raises `StorageError`, code
        ``storage.exists``, when the key is taken."""

    def abort(self) -> None:
        """Drop what was written. Does nothing after `publish`; never raises."""


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
        """All of the object, to be looked at until `close`, where it is in memory that this process sees; else None."""

    def read_at(self, offset: int, out: Bytes) -> None:
        """Fill `out` from `offset`; a short object is a `CorruptError`, code ``corrupt.short``."""

    def close(self) -> None:
        """Release the object."""


class Store(Protocol):
    """A place for bytes: create-only objects with atomic, durable publication."""

    #: Where it is.
    location: Location
    capabilities: Capabilities

    def resolved(self) -> str:
        """One text for all ways to name this root: two roots with one such text are the same."""

    def path(self, key: str) -> str:
        """The full path of `key`, for messages and for people."""

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        """The bytes of an object, or `nbytes` of them from `start`. An object of more than `limit` bytes is a
        `CorruptError`, code ``corrupt.size``, before memory is taken for it."""

    def nbytes(self, key: str) -> int | None:
        """Size of an object, or None where there is none."""

    def list(self, folder: str) -> list[str]:
        """Names directly below `folder`, sorted; empty where the folder does not exist. ``""`` is the root.
        Temporary names of unpublished objects are left out."""

    def create(self, key: str, data: bytes) -> bool:
        """Publish `data` under `key`, atomically and durably. False (and no change) when the key exists."""

    def writer(self, key: str, *, nbytes: int) -> FileWriter:
        """Begin an object of `nbytes` (space is reserved where the store can, so a full disk fails here)."""

    def reader(self, key: str) -> FileReader:
        """Open an object for positional reads."""

    def delete(self, key: str) -> bool:
        """Remove an object; that is durable on return. False where there was none. A temporary name from `leftovers`,
        below its folder, is a key here too."""

    def leftovers(self, folder: str, *, older_than_s: float = 0.0) -> builtins.list[str]:
        """Temporary names directly below `folder`, sorted: objects that somebody is writing, or died while writing.
        Only those to which nothing was written for `older_than_s`, or whose writer is known to be dead. Empty where the
        store shows none."""
