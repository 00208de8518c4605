"""A storage in memory with the rules of an object store: create-only keys, no folders, no renames."""

from __future__ import annotations

import builtins
from threading import Lock

from holdfast.errors import CorruptError, NotFoundError, StorageError
from holdfast.store.base import Bytes, Location


class MemoryStorage:
    """Objects of one process, in a dictionary. `num_requests` counts what a store would have been asked."""

    def __init__(self, name: str = "run") -> None:
        self.location = Location(f"memory://{name}")
        self.num_requests = 0
        self.objects: dict[str, bytes] = {}
        self._lock = Lock()

    def resolved(self) -> str:
        return str(self.location)

    def path(self, key: str) -> str:
        return f"{self.location}/{key}"

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        data = self._get(key)
        if limit is not None and len(data) > limit:
            raise CorruptError("long object.", code="corrupt.size", action="Use another copy.", path=self.path(key))
        stop = len(data) if nbytes is None else start + nbytes
        if stop > len(data):
            raise CorruptError("short object.", code="corrupt.short", action="Use another copy.", path=self.path(key))
        return data[start:stop]

    def nbytes(self, key: str) -> int | None:
        self.num_requests += 1
        with self._lock:
            data = self.objects.get(key)
        return None if data is None else len(data)

    def list(self, folder: str) -> builtins.list[str]:
        self.num_requests += 1
        prefix = folder + "/" if folder else ""
        with self._lock:
            return sorted({key.removeprefix(prefix).split("/")[0] for key in self.objects if key.startswith(prefix)})

    def create(self, key: str, data: bytes) -> bool:
        self.num_requests += 1
        with self._lock:
            if key in self.objects:
                return False
            self.objects[key] = bytes(data)
            return True

    def writer(self, key: str, *, nbytes: int) -> MemoryWriter:
        return MemoryWriter(self, key, nbytes=nbytes)

    def reader(self, key: str) -> MemoryReader:
        return MemoryReader(self._get(key))

    def delete(self, key: str) -> bool:
        self.num_requests += 1
        with self._lock:
            return self.objects.pop(key, None) is not None

    def leftovers(self, folder: str, *, older_than_s: float = 0.0) -> builtins.list[str]:
        return []  # an object store does not show what is under construction

    def _get(self, key: str) -> bytes:
        self.num_requests += 1
        with self._lock:
            data = self.objects.get(key)
        if data is None:
            raise NotFoundError(f"no {key}.", code="not_found.object", action="Look.", path=self.path(key))
        return data


class MemoryWriter:
    """An object that appears with `publish`."""

    alignment = 1

    def __init__(self, storage: MemoryStorage, key: str, *, nbytes: int) -> None:
        self._storage, self._key = storage, key
        self._data = bytearray(nbytes)

    def write_at(self, offset: int, data: Bytes) -> None:
        self._data[offset : offset + data.nbytes] = data.tobytes()

    def publish(self, nbytes: int) -> None:
        if not self._storage.create(self._key, bytes(self._data[:nbytes])):
            raise StorageError("the key is taken.", code="storage.exists", action="Use another.", path=self._key)

    def abort(self) -> None:
        self._data.clear()


class MemoryReader:
    """A whole object."""

    alignment = 1
    memory = None

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.nbytes = len(data)

    def read_at(self, offset: int, out: Bytes) -> None:
        part = self._data[offset : offset + out.nbytes]
        if len(part) < out.nbytes:
            raise CorruptError("short object.", code="corrupt.short", action="Use another copy.")
        out.data.cast("B")[:] = part

    def close(self) -> None:
        self._data = b""
