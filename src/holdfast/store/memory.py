"""Memory as a store: existing bytes in memory, read like files."""

from __future__ import annotations

import builtins
from typing import NoReturn

import numpy as np

from holdfast.errors import CorruptError, NotFoundError, StorageError
from holdfast.store.base import Bytes, Capabilities, FileReader, Location


class FilesInMemory:
    """A read-only `Store` of objects in memory that this process sees. Messages call it `name`."""

    capabilities = Capabilities()

    def __init__(self, name: str) -> None:
        self.location = Location(name)
        self._objects: dict[str, FileReader] = {}

    def add(self, key: str, data: FileReader) -> None:
        """Add the object `data` under `key`."""
        self._objects[key] = data

    def clear(self) -> None:
        """Drop all objects. Readers that are open can go on."""
        self._objects.clear()

    def resolved(self) -> str:
        """The name of the store."""
        return str(self.location)

    def path(self, key: str) -> str:
        """The name of the object in messages."""
        return f"{self.location}/{key}"

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        """As `Store.read`, but `limit` is ignored: the caller of `add` knows the size of each object."""
        reader = self.reader(key)
        out = np.empty(reader.nbytes - start if nbytes is None else nbytes, np.uint8)
        reader.read_at(start, out)
        return out.tobytes()

    def nbytes(self, key: str) -> int | None:
        """As `Store.nbytes`."""
        data = self._objects.get(key)
        return None if data is None else data.nbytes

    def list(self, folder: str, *, limit: int | None = None) -> builtins.list[str]:
        """As `Store.list`; there are no folders."""
        return [] if folder else sorted(self._objects)[:limit]

    def reader(self, key: str) -> FileReader:
        """As `Store.reader`."""
        if key not in self._objects:
            raise NotFoundError(
                f"{self.path(key)} is not in the memory of this rank.",
                code="not_found.object",
                action="Read it on the rank that owns it.",
                path=self.path(key),
            )
        return self._objects[key]

    def leftovers(self, folder: str, *, older_than_s: float = 0.0) -> builtins.list[str]:
        """As `Store.leftovers`."""
        return []

    def create(self, key: str, data: bytes) -> NoReturn:
        """Raises `StorageError`."""
        raise self._read_only(key)

    def writer(self, key: str, *, nbytes: int) -> NoReturn:
        """Raises `StorageError`."""
        raise self._read_only(key)

    def delete(self, key: str) -> NoReturn:
        """Raises `StorageError`."""
        raise self._read_only(key)

    def _read_only(self, key: str) -> StorageError:
        return StorageError(
            f"{self.path(key)} cannot be changed: it is memory that readers see as a file.",
            code="storage.read_only",
            action="Save into a run instead.",
            path=self.path(key),
        )


class MemoryFile:
    """`data` as a `FileReader`."""

    alignment = 1

    def __init__(self, data: Bytes, *, path: str) -> None:
        self.nbytes = len(data)
        self.memory = data
        self._path = path

    def read_at(self, offset: int, out: Bytes) -> None:
        """As `FileReader.read_at`."""
        if offset + len(out) > self.nbytes:
            raise CorruptError(
                f"{self._path} is damaged: it ends at byte {self.nbytes} instead of {offset + len(out)}.",
                code="corrupt.short",
                action="Use another copy, or an older checkpoint.",
                path=self._path,
            )
        np.copyto(out, self.memory[offset : offset + len(out)])

    def close(self) -> None:
        """Does nothing: the code that mapped the memory unmaps it."""
