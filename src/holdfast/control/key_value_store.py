"""The store that all ranks of an operation share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class KeyValueStore(Protocol):
    """A store that all ranks share. Only one thread at a time uses it."""

    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""

    def get(self, key: str) -> bytes:
        """The value of a key that exists."""

    def get_all(self, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys`, which exist."""

    def append(self, key: str, value: bytes) -> None:
        """Add `value` to the end of the value of `key` (empty at first), atomically."""

    def wait(self, keys: Sequence[str], timeout_s: float) -> bool:
        """Block until all `keys` exist; False when `timeout_s` (positive) passed first."""

    def check(self, key: str) -> bool:
        """Whether `key` exists."""

    def add(self, key: str, amount: int) -> int:
        """Add to the counter `key` (0 at first), atomically, and return the new value."""

    def delete(self, key: str) -> None:
        """Remove `key`; a missing one is fine."""
