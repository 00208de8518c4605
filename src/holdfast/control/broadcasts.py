"""The broadcasts of one operation: messages of rank 0 to all other ranks, under ``down/<number>``.

In a world of one group, readers count themselves, and the last one removes the broadcast.

In a world of several groups, one store serves thousands of ranks. There one rank of each node reads a broadcast in the
store, and the others find it on the board of their node. Each reader appends a mark, and waits for no answer; rank 0
removes what all have read, when it makes its next broadcast or awaits the readers.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

from holdfast.control.envelopes import Broadcast
from holdfast.control.mailbox import Mailbox
from holdfast.control.meeting import Meeting
from holdfast.control.unread import mark_read

#: Time that rank 0 gives the others to read the end of an operation: its process may serve the store, and end then.
_READ_S: Final = 2.0


class Broadcasts(Protocol):
    """The broadcasts of one operation to `num_readers` ranks. Make all calls inside `Meeting.ask`."""

    def send(self, number: int, message: Broadcast) -> None:
        """Make broadcast `number`."""

    def read(self, number: int, timeout_s: float) -> bytes | None:
        """Wait for broadcast `number`, and return it, still encoded; None where it did not come in time."""

    def is_unread(self, number: int) -> bool:
        """Whether some rank may not have read broadcast `number` yet."""


class CountedBroadcasts:
    """The broadcasts in a world of one group."""

    def __init__(self, meeting: Meeting, *, num_readers: int) -> None:
        self._store = meeting.store
        self._num_readers = num_readers

    def send(self, number: int, message: Broadcast) -> None:
        """As `Broadcasts.send`."""
        Mailbox(self._store).put(_key(number), message)

    def read(self, number: int, timeout_s: float) -> bytes | None:
        """As `Broadcasts.read`."""
        key, mailbox = _key(number), Mailbox(self._store)
        if not self._store.wait([key], timeout_s):
            return None
        num_chunks, data = mailbox.read(key)
        if self._store.add(f"{key}/read", 1) == self._num_readers:
            mailbox.remove(key, num_chunks)
            self._store.delete(f"{key}/read")
        return data

    def is_unread(self, number: int) -> bool:
        """As `Broadcasts.is_unread`."""
        key = _key(number)
        # The last reader removes both keys, the count of readers last.
        return self._store.check(key) or self._store.check(f"{key}/read")


class SharedBroadcasts:
    """The broadcasts in a world of several groups."""

    def __init__(self, meeting: Meeting, *, num_readers: int) -> None:
        self._meeting = meeting
        self._num_readers = num_readers

    def send(self, number: int, message: Broadcast) -> None:
        """As `Broadcasts.send`."""
        num_chunks = Mailbox(self._meeting.store).put(_key(number), message)
        self._remove_read()
        self._meeting.unread.note(self._name(number), num_chunks)

    def read(self, number: int, timeout_s: float) -> bytes | None:
        """As `Broadcasts.read`."""
        store, key = self._meeting.store, _key(number)

        def fetch(timeout_s: float) -> bytes | None:
            return Mailbox(store).read(key)[1] if store.wait([key], timeout_s) else None

        data = self._meeting.board.read(self._name(number), fetch, timeout_s)
        if data is not None:
            mark_read(store, key)
        return data

    def is_unread(self, number: int) -> bool:
        """As `Broadcasts.is_unread`."""
        self._remove_read()
        return self._meeting.unread.has(self._name(number))

    def _remove_read(self) -> None:
        self._meeting.unread.remove_read(self._meeting.root, num_readers=self._num_readers)

    def _name(self, number: int) -> str:
        return f"{self._meeting.name}/{_key(number)}"


def await_readers(broadcasts: Broadcasts, number: int) -> None:
    """Return when all ranks have read broadcast `number`, or after `_READ_S`."""
    end_s, pause_s = time.monotonic() + _READ_S, _READ_S / 4000
    while broadcasts.is_unread(number) and time.monotonic() < end_s:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _READ_S / 400)


def _key(number: int) -> str:
    return f"down/{number}"
