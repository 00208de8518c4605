"""The broadcasts that rank 0 of a large world has made, and that some rank may not have read yet."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from holdfast.control.key_value_store import KeyValueStore
from holdfast.control.mailbox import Mailbox

_MARK: Final = b"."
#: Rank 0 forgets older ones. These are of operations that failed: ranks that never came read nothing.
_MAX_NOTED: Final = 16


class _NotedBroadcast(NamedTuple):
    key: str
    num_chunks: int


class UnreadBroadcasts:
    """The broadcasts that rank 0 of a group of ranks has noted. Safe for several threads."""

    def __init__(self) -> None:
        self._noted: deque[_NotedBroadcast] = deque(maxlen=_MAX_NOTED)

    def note(self, key: str, num_chunks: int) -> None:
        """Note a broadcast of `num_chunks` chunks under `key`."""
        self._noted.append(_NotedBroadcast(key, num_chunks))

    def has(self, key: str) -> bool:
        """Whether the broadcast `key` is noted."""
        return any(noted.key == key for noted in tuple(self._noted))

    def remove_read(self, store: KeyValueStore, *, num_readers: int) -> None:
        """Remove from `store` the broadcasts that all of `num_readers` ranks have read."""
        for _ in range(len(self._noted)):
            try:
                noted = self._noted.popleft()
            except IndexError:
                return  # another thread looks at it
            marks = _marks(noted.key)
            if not store.check(marks) or len(store.get(marks)) < num_readers:
                self._noted.append(noted)
                continue
            Mailbox(store).remove(noted.key, noted.num_chunks)
            store.delete(marks)


def mark_read(store: KeyValueStore, key: str) -> None:
    """Mark that the calling rank has read the broadcast `key`."""
    store.append(_marks(key), _MARK)


def _marks(key: str) -> str:
    return f"{key}/read"
