"""Stores and system calls that fail, hang, are slow, or do half of a request, wherever a test wants them to."""

from __future__ import annotations

import builtins
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast import loading, saving
from holdfast.errors import StorageError
from holdfast.store import posix
from holdfast.store.base import Bytes, FileReader, FileWriter, Store
from holdfast.store.urls import open_store

#: Told of every request before it is made and after: its number, "before" or "after", its name and the path.
Watch = Callable[[int, str, str, str], None]

#: The calls of `posix` that can fail. (`close` of a file is left out: what was published is synced before.)
FILE_CALLS = frozenset({"fsync", "fstat", "ftruncate", "link", "listdir", "mkdir", "open", "preadv", "pwrite", "stat"})


class FaultyStore:
    """`storage`, whose requests, and those of its writers and readers, are shown to `watch`: it may raise or wait."""

    def __init__(self, storage: Store, watch: Watch) -> None:
        self.location = storage.location
        self.capabilities = storage.capabilities
        self._storage = storage
        self._watch = watch
        self._numbers = itertools.count()

    def resolved(self) -> str:
        return self._storage.resolved()

    def path(self, key: str) -> str:
        return self._storage.path(key)

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        with self.watched("read", key):
            return self._storage.read(key, start=start, nbytes=nbytes, limit=limit)

    def nbytes(self, key: str) -> int | None:
        with self.watched("nbytes", key):
            return self._storage.nbytes(key)

    def list(self, folder: str, *, limit: int | None = None) -> builtins.list[str]:
        with self.watched("list", folder):
            return self._storage.list(folder, limit=limit)

    def create(self, key: str, data: bytes) -> bool:
        with self.watched("create", key):
            return self._storage.create(key, data)

    def writer(self, key: str, *, nbytes: int) -> FileWriter:
        with self.watched("writer", key):
            return _FaultyWriter(self, key, self._storage.writer(key, nbytes=nbytes))

    def reader(self, key: str) -> FileReader:
        with self.watched("reader", key):
            return _FaultyReader(self, key, self._storage.reader(key))

    def delete(self, key: str) -> bool:
        with self.watched("delete", key):
            return self._storage.delete(key)

    def leftovers(self, folder: str, *, older_than_s: float = 0.0) -> builtins.list[str]:
        with self.watched("leftovers", folder):
            return self._storage.leftovers(folder, older_than_s=older_than_s)

    @contextmanager
    def watched(self, name: str, key: str) -> Iterator[None]:
        number = next(self._numbers)
        path = f"{self.location}/{key}" if key else str(self.location)  # of temporary names too, which `path` refuses
        self._watch(number, "before", name, path)
        yield
        self._watch(number, "after", name, path)


class _FaultyWriter:
    def __init__(self, storage: FaultyStore, key: str, writer: FileWriter) -> None:
        self.alignment = writer.alignment
        self.in_order = writer.in_order
        self._storage, self._key, self._writer = storage, key, writer

    def write_at(self, offset: int, *data: Bytes) -> None:
        with self._storage.watched("write_at", self._key):
            self._writer.write_at(offset, *data)

    def publish(self, nbytes: int) -> None:
        with self._storage.watched("publish", self._key):
            self._writer.publish(nbytes)

    def abort(self) -> None:
        self._writer.abort()


class _FaultyReader:
    def __init__(self, storage: FaultyStore, key: str, reader: FileReader) -> None:
        self.alignment = reader.alignment
        self.nbytes = reader.nbytes
        self.memory = None
        self._storage, self._key, self._reader = storage, key, reader

    def read_at(self, offset: int, out: Bytes) -> None:
        with self._storage.watched("read_at", self._key):
            self._reader.read_at(offset, out)

    def close(self) -> None:
        self._reader.close()


@contextmanager
def watched_store(watch: Watch) -> Iterator[None]:
    """Have `holdfast.save` and `holdfast.load` of this process use stores that `watch` sees."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (saving, loading):
            patch.setattr(module, "open_store", lambda location: FaultyStore(open_store(location), watch))
        yield


class Count:
    """Counts requests and does nothing else; remembers the names and paths."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def __call__(self, number: int, when: str, name: str, path: str) -> None:
        if when == "before":
            self.seen.append((name, path))


class FailAt:
    """The request `number` fails as a broken disk does, `when` it is not yet made or made."""

    def __init__(self, number: int, when: str) -> None:
        self._at = number, when
        self.hit: tuple[str, str] | None = None

    def __call__(self, number: int, when: str, name: str, path: str) -> None:
        if (number, when) == self._at:
            self.hit = name, path
            raise StorageError(f"cannot {name} {path}: broken.", code="storage.io", action="Repair it.", path=path)


class HangAt:
    """The first request that `chosen` picks does not return until `release` is called; with `for_good`, neither does
    any after it."""

    def __init__(self, chosen: Callable[[int, str, str, str], bool], *, for_good: bool = False) -> None:
        self._chosen = chosen
        self._for_good = for_good
        self._hit = False
        self._released = threading.Event()

    def __call__(self, number: int, when: str, name: str, path: str) -> None:
        hangs = self._for_good if self._hit else self._chosen(number, when, name, path)
        if hangs:
            self._hit = True
            self._released.wait(60)

    def release(self) -> None:
        self._released.set()


class FaultyCalls:
    """The `os` module as `posix` sees it: every call in `FILE_CALLS` goes through `call(number, name, real, args)`."""

    def __init__(self, call: Callable[[int, str, Callable[..., Any], tuple[Any, ...]], Any]) -> None:
        self._call = call
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in FILE_CALLS:
            return real

        def watched(*args: Any, **options: Any) -> Any:
            assert not options or name == "open"
            return self._call(next(self._numbers), name, real, args)

        return watched


@contextmanager
def faulty_calls(call: Callable[[int, str, Callable[..., Any], tuple[Any, ...]], Any]) -> Iterator[None]:
    """Have the POSIX backend of this process make its system calls through `call`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(posix.__dict__, "os", FaultyCalls(call))
        yield
