"""The meeting point of the ranks of one operation: a store that they share, and the operation that each rank entered
last.

`holdfast.control.channel` sends messages through a `Meeting`; `holdfast.control.torch_store` makes one from a TCPStore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from holdfast.control.processes import Process

T = TypeVar("T")


class KeyValueStore(Protocol):
    """A store that all ranks share. Only one thread at a time uses it."""

    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Block until all `keys` exist; False when `timeout_s` (positive) passed first."""

    def check(self, key: str) -> bool:
        """Whether `key` exists."""

    def add(self, key: str, amount: int) -> int:
        """Add to the counter `key` (0 at first), atomically, and return the new value."""

    def delete(self, key: str) -> None:
        """Remove `key`; a missing one is fine."""


class Meeting(Protocol):
    """The meeting point of the ranks of one operation. Only one thread at a time uses it."""

    @property
    def store(self) -> KeyValueStore:
        """A store that holds the keys of this operation alone. Make its requests inside `ask`."""

    @property
    def processes(self) -> dict[int, Process]:
        """The process of each rank that has reported it; kept from one operation to the next."""

    def ask(self, call: Callable[[], T], timeout_s: float, *, meanwhile: Callable[[], None]) -> T:
        """Run `call`, which makes requests to the store, and return its result or raise its error; call `meanwhile` now
        and then until it ends. Raises `StorageError`, code ``storage.control``, after `timeout_s`."""

    def claim(self, key: str, value: bytes) -> None:
        """Store `value` under `key` unless the key exists. May be called while an `ask` is under way."""

    def announce(self, rank: int, label: str) -> None:
        """Record that `rank` has entered the operation `label`."""

    def whereabouts(self, rank: int) -> str | None:
        """The last operation that `rank` entered; None before its first."""

    def has_come_again(self, rank: int, label: str) -> bool:
        """Whether `rank` has entered an operation `label` that is later than this one."""

    def next(self) -> Meeting:
        """The meeting of the operation after this one."""

    def in_background(self) -> Meeting:
        """A second meeting of this operation, for another thread."""

    def leave(self) -> None:
        """Release the connection for other meetings: the operation is over."""
