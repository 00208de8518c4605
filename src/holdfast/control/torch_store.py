"""The control channel over the store of the default process group. The only part of `control` that knows torch."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from holdfast.control.channel import Channel
from holdfast.errors import ConfigurationError, StorageError

_PREFIX: Final = "holdfast"
_MAX_POLL_S: Final = 0.5


class TorchStore:
    """A torch store as a `KeyValueStore`. A store that is gone is a `StorageError`, code ``storage.control``.

    With ``blocking=False`` it polls instead of blocking in the store, for a connection that others use too.
    """

    def __init__(self, store: dist.Store, *, blocking: bool) -> None:
        self._store = store
        self._blocking = blocking

    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""
        try:
            # The stub asks for str; stores take bytes, and as text they would be encoded as UTF-8.
            self._store.set(key, value)  # type: ignore[arg-type]
        except dist.DistError as error:
            raise _lost(error) from error

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""
        try:
            return self._store.get(key)
        except dist.DistError as error:
            raise _lost(error) from error

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Block until all `keys` exist; False when `timeout_s` (positive) passed first."""
        try:
            if not self._blocking:
                return self._poll(list(keys), timeout_s)
            self._store.wait(list(keys), timedelta(seconds=timeout_s))
            return True
        except dist.DistStoreError:
            return False
        except dist.DistError as error:
            raise _lost(error) from error

    def check(self, key: str) -> bool:
        """Whether `key` exists."""
        try:
            return self._store.check([key])
        except dist.DistError as error:
            raise _lost(error) from error

    def add(self, key: str, amount: int) -> int:
        """Add to the counter `key`, atomically, and return the new value."""
        try:
            return self._store.add(key, amount)
        except dist.DistError as error:
            raise _lost(error) from error

    def delete(self, key: str) -> None:
        """Remove `key`; a missing one is fine."""
        try:
            self._store.delete_key(key)
        except dist.DistError as error:
            raise _lost(error) from error

    def _poll(self, keys: list[str], timeout_s: float) -> bool:
        start = time.monotonic()
        while not self._store.check(keys):
            waited = time.monotonic() - start
            if waited >= timeout_s:
                return False
            # In proportion to the wait so far: quick answers come quickly, and long waits cost few requests.
            time.sleep(min(max(waited / 8, 0.001), _MAX_POLL_S, timeout_s - waited))
        return True


@dataclass(slots=True)
class _Connection:
    """Our own client of a process group's store (None where the store cannot be cloned), and the operations so far."""

    client: dist.Store | None
    numbers: dict[str, Iterator[int]] = field(default_factory=lambda: defaultdict(itertools.count))


# Bound to the store object, so that a new process group starts to count anew on all of its ranks. One is for whoever
# waits, one for what goes on in the background.
_connections: WeakKeyDictionary[dist.Store, dict[bool, _Connection]] = WeakKeyDictionary()


def group_ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Global ranks of `group` (default: of the job), in its order; ``(0,)`` in one plain process."""
    if not dist.is_available() or not dist.is_initialized():
        return (0,)
    return tuple(range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group))


def default_channel(label: str, group: dist.ProcessGroup | None = None, *, background: bool = False) -> Channel:
    """A channel between the ranks of `group` (default: all ranks of the job); of this process alone where it is alone.

    Every rank of a group makes its channels in the same order: the count is what gives an operation its keys. All
    channels of a process share one connection, those for the `background` another, so of each kind only one may be in
    use at a time. Never calls a collective.
    `ConfigurationError`, code ``config.no_process_group``, for a rank of several that has no process group.
    """
    if not dist.is_available() or not dist.is_initialized():
        _refuse_lonely_ranks()
        return Channel(None, rank=0, world_size=1, label=label)
    store = _get_default_store()
    connections = _connections.setdefault(store, {})
    connection = connections.get(background)
    if connection is None:
        connection = connections[background] = _Connection(_clone(store))
    ranks = group_ranks(group)
    if dist.get_rank() not in ranks:
        raise ConfigurationError(
            f"rank {dist.get_rank()} is not in the group it called with.",
            code="config.not_in_group",
            action="Call save and load with a group on the ranks of that group only.",
            rank=dist.get_rank(),
        )
    members = "" if group is None else "-" + hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    # A wait holds a client for as long as it lasts. On a clone that is nobody else's matter; torch's own is polled.
    kind = "-background" if background else ""
    prefix = f"{_PREFIX}{kind}{members}/{next(connection.numbers[members])}"
    return Channel(
        TorchStore(dist.PrefixStore(prefix, connection.client or store), blocking=connection.client is not None),
        rank=ranks.index(dist.get_rank()),
        world_size=len(ranks),
        label=label,
    )


def _refuse_lonely_ranks() -> None:
    """Started as one of several, but without a process group: each rank would take itself for the whole job."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size not in ("", "0", "1"):
        raise ConfigurationError(
            f"this process was started as one of {world_size} ranks (WORLD_SIZE), but no process group is initialised.",
            code="config.no_process_group",
            action="Call torch.distributed.init_process_group first, or unset WORLD_SIZE in a job of one process.",
        )


def _clone(store: dist.Store) -> dist.Store | None:
    """A second client of `store`; None where torch (before 2.8) or the kind of store offers none."""
    try:
        clone: dist.Store = store.clone()  # type: ignore[attr-defined]  # the stubs lack it
    except (AttributeError, RuntimeError):
        return None
    return clone


def _lost(error: Exception) -> StorageError:
    return StorageError(
        f"the store of the process group does not answer: {error}.",
        code="storage.control",
        action="Restart the job: the process that serves the store, usually on the node of rank 0, is gone.",
    )
