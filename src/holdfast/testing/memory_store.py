"""A store in the memory of one process, with the rules of an object store: create-only keys, no folders, no renames."""

from __future__ import annotations

import builtins
from copy import copy
from threading import Lock
from typing import Self

import numpy as np

from holdfast.errors import CorruptError, NotFoundError, StorageError
from holdfast.store.base import Bytes, Capabilities, Location
from holdfast.wording import count


class MemoryStore:
    """A store of objects in a dictionary, for tests. `num_requests` counts the requests that a real store would get."""

    capabilities = Capabilities()

    def __init__(self, name: str = "run") -> None:
        self.location = Location(f"memory://{name}")
        self.num_requests = 0
        self.objects: dict[str, bytes] = {}
        self._lock = Lock()

    def another(self) -> Self:
        """A second handle of the same store, as another process would have."""
        return copy(self)

    def resolved(self) -> str:
        """As `Store.resolved`."""
        return str(self.location)

    def path(self, key: str) -> str:
        """As `Store.path`."""
        return f"{self.location}/{key}"

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        """As `Store.read`."""
        data = self._get(key)
        if limit is not None and len(data) > limit:
            raise self._damaged(key, f"it has {count(len(data), 'byte')}, more than {limit}", "corrupt.size")
        stop = len(data) if nbytes is None else start + nbytes
        if stop > len(data):
            raise self._damaged(key, f"it ends at byte {len(data)} instead of {stop}", "corrupt.short")
        return data[start:stop]

    def nbytes(self, key: str) -> int | None:
        """As `Store.nbytes`."""
        self.num_requests += 1
        with self._lock:
            data = self.objects.get(key)
        return None if data is None else len(data)

    def list(self, folder: str, *, limit: int | None = None) -> builtins.list[str]:
        """As `Store.list`."""
        self.num_requests += 1
        prefix = folder + "/" if folder else ""
        with self._lock:
            names = {key.removeprefix(prefix).split("/")[0] for key in self.objects if key.startswith(prefix)}
        return sorted(names)[:limit]

    def create(self, key: str, data: bytes) -> bool:
        """As `Store.create`."""
        self.num_requests += 1
        with self._lock:
            if key in self.objects:
                return False
            self.objects[key] = bytes(data)
            return True

    def writer(self, key: str, *, nbytes: int) -> MemoryWriter:
        """As `Store.writer`."""
        return MemoryWriter(self, key, nbytes=nbytes)

    def reader(self, key: str) -> MemoryReader:
        """As `Store.reader`."""
        return MemoryReader(self._get(key), path=self.path(key))

    def delete(self, key: str) -> bool:
        """As `Store.delete`."""
        self.num_requests += 1
        with self._lock:
            return self.objects.pop(key, None) is not None

    def leftovers(self, folder: str, *, older_than_s: float = 0.0) -> builtins.list[str]:
        """As `Store.leftovers`: an object store does not show objects under construction."""
        return []

    def _get(self, key: str) -> bytes:
        self.num_requests += 1
        with self._lock:
            data = self.objects.get(key)
        if data is None:
            raise NotFoundError(
                f"there is no object {self.path(key)}.",
                code="not_found.object",
                action="Check the path, and whether the run was copied completely.",
                path=self.path(key),
            )
        return data

    def _damaged(self, key: str, what: str, code: str) -> CorruptError:
        return CorruptError(
            f"{self.path(key)} is damaged: {what}.",
            code=code,
            action="Use another copy, or an older checkpoint.",
            path=self.path(key),
        )


class MemoryWriter:
    """A `FileWriter` whose object appears with `publish`."""

    alignment = 1
    in_order = False

    def __init__(self, store: MemoryStore, key: str, *, nbytes: int) -> None:
        self._store, self._key = store, key
        self._data = np.zeros(nbytes, np.uint8)

    def write_at(self, offset: int, *data: Bytes) -> None:
        """As `FileWriter.write_at`."""
        for each in data:
            self._data[offset : offset + len(each)] = each
            offset += len(each)

    def publish(self, nbytes: int) -> None:
        """As `FileWriter.publish`."""
        if not self._store.create(self._key, self._data[:nbytes].tobytes()):
            raise StorageError(
                f"{self._store.path(self._key)} exists already.",
                code="storage.exists",
                action="Use another key.",
                path=self._store.path(self._key),
            )

    def abort(self) -> None:
        """As `FileWriter.abort`."""
        self._data = np.zeros(0, np.uint8)


class MemoryReader:
    """A `FileReader` of a whole object."""

    alignment = 1
    memory = None

    def __init__(self, data: bytes, *, path: str) -> None:
        self.nbytes = len(data)
        self._data = np.frombuffer(data, np.uint8)
        self._path = path

    def read_at(self, offset: int, out: Bytes) -> None:
        """As `FileReader.read_at`."""
        part = self._data[offset : offset + out.nbytes]
        if len(part) < out.nbytes:
            raise CorruptError(
                f"{self._path} is damaged: it ends at byte {self.nbytes} instead of {offset + out.nbytes}.",
                code="corrupt.short",
                action="Use another copy, or an older checkpoint.",
                path=self._path,
            )
        out[:] = part

    def close(self) -> None:
        """As `FileReader.close`."""
        self._data = np.zeros(0, np.uint8)
