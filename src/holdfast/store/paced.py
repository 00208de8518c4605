"""A store for background work that training must not feel."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable
from typing import Final, TypeVar

from holdfast.latch import Latch
from holdfast.store.base import FileReader, FileWriter, Store

#: The rest after a request: so many times the processor time since the last rest, and never less than `_LEAST_S`.
#: One thread of Python runs at a time, so processor time of this one is time that another may have to wait.
_TIMES: Final = 30.0
_LEAST_S: Final = 0.002

T = TypeVar("T")


class PacingStoppedError(Exception):
    """The work is to end here, between two requests."""


class PacedStore:
    """A store whose caller rests after each request, so that its thread takes at most a small share of a processor, in
    many short turns. After `hurry` is set, it rests no more. After `stop` is set, each request raises
    `PacingStoppedError` and changes nothing.

    The work of its caller is spread by itself: there is a rest wherever it makes a request.
    """

    def __init__(self, storage: Store, *, hurry: Latch, stop: Latch) -> None:
        self.location = storage.location
        self.capabilities = storage.capabilities
        self._storage = storage
        self._hurry = hurry
        self._stop = stop
        self._rested_at_s = time.thread_time()

    def resolved(self) -> str:
        """As `Store.resolved`."""
        return self._paced(self._storage.resolved)

    def path(self, key: str) -> str:
        """As `Store.path`."""
        return self._storage.path(key)

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        """As `Store.read`."""
        return self._paced(lambda: self._storage.read(key, start=start, nbytes=nbytes, limit=limit))

    def nbytes(self, key: str) -> int | None:
        """As `Store.nbytes`."""
        return self._paced(lambda: self._storage.nbytes(key))

    def list(self, folder: str, *, limit: int | None = None) -> builtins.list[str]:
        """As `Store.list`."""
        return self._paced(lambda: self._storage.list(folder, limit=limit))

    def create(self, key: str, data: bytes) -> bool:
        """As `Store.create`."""
        return self._paced(lambda: self._storage.create(key, data))

    def writer(self, key: str, *, nbytes: int) -> FileWriter:
        """As `Store.writer`."""
        return self._paced(lambda: self._storage.writer(key, nbytes=nbytes))

    def reader(self, key: str) -> FileReader:
        """As `Store.reader`."""
        return self._paced(lambda: self._storage.reader(key))

    def delete(self, key: str) -> bool:
        """As `Store.delete`."""
        return self._paced(lambda: self._storage.delete(key))

    def leftovers(self, folder: str, *, older_than_s: float = 0.0) -> builtins.list[str]:
        """As `Store.leftovers`."""
        return self._paced(lambda: self._storage.leftovers(folder, older_than_s=older_than_s))

    def _paced(self, request: Callable[[], T]) -> T:
        used_s = time.thread_time() - self._rested_at_s
        self._hurry.wait(max(_LEAST_S, _TIMES * used_s))
        if self._stop.is_set:
            raise PacingStoppedError
        self._rested_at_s = time.thread_time()
        return request()
