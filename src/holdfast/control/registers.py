"""Values and counters that the ranks of a group share, in the store of the default process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from holdfast.control.torch_store import Member, StoreConnection, TorchStore

T = TypeVar("T")


class StoreRegisters:
    """Values and counters under a key prefix that is unique to one use. Each object is for one thread.

    Every method is one request, or two. Raises `StorageError`, code ``storage.control``, where the store does not
    answer within `timeout_s`.
    """

    def __init__(self, prefix: Callable[[], str], connect: Callable[[], StoreConnection], *, timeout_s: float) -> None:
        self._prefix = prefix
        self._connect = connect
        self._timeout_s = timeout_s

    def claim(self, key: str, value: bytes) -> bytes:
        """Store `value` under `key` unless the key has a value. Returns the value that the key has."""
        return self._ask(lambda store: store.claim(key, value))

    def read(self, key: str) -> bytes | None:
        """The value under `key`, if it has one."""
        return self._ask(lambda store: store.get(key) if store.check(key) else None)

    def count(self, key: str) -> int:
        """Add one to the counter `key`, atomically, and return the new value."""
        return self._ask(lambda store: store.add(key, 1))

    def forget(self, key: str) -> None:
        """Remove `key`, if it exists."""
        self._ask(lambda store: store.delete(key))

    def _ask(self, request: Callable[[TorchStore], T]) -> T:
        connection = self._connect()
        store = TorchStore(dist.PrefixStore(self._prefix(), connection.client), blocking=connection.is_own)
        return connection.requests.ask(lambda: request(store), self._timeout_s)


class SharedRegisters:
    """The registers of one use by a group of ranks, which all make these objects in the same order. `foreground` is for
    the thread that calls the library, `background` for one thread beside it, which ends with `leave`. Use them only
    when this rank `has_joined`."""

    def __init__(self, member: Member, use: str, *, timeout_s: float) -> None:
        self._member = member
        self._use = f"{use}/{member.attempt.next_use(use)}"
        self._timeout_s = timeout_s
        self._own = member.job.in_background(self, timeout_s)
        self.foreground = StoreRegisters(self._prefix, self._in_foreground, timeout_s=timeout_s)
        self.background = StoreRegisters(self._prefix, self._in_background, timeout_s=timeout_s)

    @property
    def has_joined(self) -> bool:
        """Whether this rank has exchanged a message with the others, so that it knows where their registers are."""
        return self._member.attempt.has_joined

    def leave(self) -> None:
        """Release the connection of the background thread for other uses."""
        self._own.let_go(self)

    def _in_foreground(self) -> StoreConnection:
        return self._member.job.connection(self._timeout_s)

    def _in_background(self) -> StoreConnection:
        """The connection of the background thread; a new one where a request hangs in the last."""
        if self._own.requests.is_busy:
            self._own = self._member.job.in_background(self, self._timeout_s)
        return self._own

    def _prefix(self) -> str:
        return f"{self._member.name}/{self._member.attempt.name}/{self._use}"
