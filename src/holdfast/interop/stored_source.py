"""A stored state as a small value, from which workers open the same state by themselves."""

from __future__ import annotations

import socket
from functools import lru_cache
from threading import Lock
from typing import NamedTuple

from holdfast.checkpoint.stored_state import StoredState
from holdfast.errors import HoldfastError, StorageError
from holdfast.format.records import Place
from holdfast.interop.foreign_format import replaced
from holdfast.interop.formats import find_state
from holdfast.run.paths import Selection, parse
from holdfast.store.base import Location, Store
from holdfast.store.urls import open_store

_opening = Lock()


class StoredSource(NamedTuple):
    """A description of a state that another process opens again: its location, and its expected content.

    `fingerprint` tells versions of its files apart, and `shared_fingerprint` does so on all machines alike.
    """

    location: Location
    place: Place | None
    identity: str
    fingerprint: str
    shared_fingerprint: str

    @staticmethod
    def of(state: StoredState) -> StoredSource:
        """The value for an open state."""
        record = state.record
        place = record.place if record.in_history else None
        return StoredSource(record.location, place, record.identity, state.fingerprint, state.shared_fingerprint)

    @property
    def path(self) -> str:
        """The path by which other processes find it, as `parse` takes it; the options of its store are not in it."""
        path = str(Selection(self.location, place=self.place))
        named = parse(path)
        is_same = (named.root, named.step, named.place) == (self.location.url, None, self.place)
        return path if is_same else f"{path}/"  # the name of the folder ends like a selector

    def open(self) -> StoredState:
        """Open the state. A process opens it once for all tasks.

        Raises `StorageError`, code ``storage.not_shared``, where another state, or none, is at the place, and
        `CorruptError`, code ``corrupt.foreign``, where its files are others than when the caller opened it.
        """
        with _opening:
            return _opened(self)


@lru_cache(maxsize=2)
def _opened(source: StoredSource) -> StoredState:
    state = find_state(Selection(source.location, place=source.place)).state
    if state.record.identity != source.identity:
        raise not_shared(
            str(source.location),
            "finds another checkpoint at",
            action="If it was replaced meanwhile, begin anew when nothing writes to it. "
            "Else name paths that all workers share.",
        )
    if state.shared_fingerprint != source.shared_fingerprint:
        raise replaced(str(source.location))
    return state


def shared_store(location: Location, key: str, expected: bytes) -> Store:
    """The store at `location`, in which the caller of this worker has created `key` with the bytes `expected`.

    Raises `StorageError`, code ``storage.not_shared``, where this process sees another place under that name.
    """
    storage = open_store(location)
    try:
        found = storage.read(key)
    except HoldfastError as error:
        raise not_shared(storage.path(key), "does not see") from error
    if found != expected:
        raise not_shared(storage.path(key), "sees other bytes in")
    return storage


def not_shared(path: str, what: str, *, action: str = "") -> StorageError:
    """The error for a worker that `what` the file or folder at `path`."""
    return StorageError(
        f"the worker on {socket.gethostname()} {what} '{path}'.",
        code="storage.not_shared",
        action=action or "Name paths that all workers share, or use processes of this machine.",
        path=path,
    )
