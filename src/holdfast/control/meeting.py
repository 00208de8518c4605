"""Where the ranks of one operation meet: the store that they share, and what each says of where it is.

`holdfast.control.channel` sends messages through a `Meeting`; `holdfast.control.torch_store` makes one of a TCPStore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from holdfast.control.processes import Process

T = TypeVar("T")


class KeyValueStore(Protocol):
    """A store that all ranks share. Used by one thread at a time."""

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
    """Where the ranks of one operation meet. Used by one thread at a time."""

    @property
    def store(self) -> KeyValueStore:
        """Keys of this operation alone. Requests go through `ask`."""

    @property
    def processes(self) -> dict[int, Process]:
        """The process of each rank, as far as it has told; kept from one operation to the next."""

    def ask(self, call: Callable[[], T], timeout_s: float, *, meanwhile: Callable[[], None]) -> T:
        """Return or raise what `call` returns or raises, which makes requests of the store; call `meanwhile` now and
        then while it does. `StorageError`, code ``storage.control``, after `timeout_s`."""

    def claim(self, key: str, value: bytes) -> None:
        """Store `value` under `key` unless something is there already. While an `ask` is under way."""

    def announce(self, rank: int, label: str) -> None:
        """Say that `rank` has come to the operation `label`."""

    def whereabouts(self, rank: int) -> str | None:
        """The operation that `rank` came to last; None before its first."""

    def has_come_again(self, rank: int, label: str) -> bool:
        """Whether `rank` has come to an operation `label` that is later than this one."""

    def next(self) -> Meeting:
        """The meeting of the operation after this one."""

    def in_background(self) -> Meeting:
        """A second meeting of this operation, for another thread."""

    def leave(self) -> None:
        """Let others have its connection: the operation is over."""
