"""The contributions of the ranks of one group to one gather, which the first rank of the group collects.

In a world of one group, each contribution has a key of its own: the first rank waits in the store for all of them.

In a world of several groups, one store serves thousands of ranks, and should be asked little. There each member
appends a record to the value of one key, and waits for no answer; the first rank reads all records with one request,
and removes them with another. A store cannot wait for a number of records, so the first rank looks at them now and
then.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from holdfast.control.envelopes import RankEnvelope
from holdfast.control.mailbox import Mailbox, packed
from holdfast.control.meeting import Meeting
from holdfast.decoding import decode_msgpack

#: Head of a record: its rank, and the number of its bytes.
_HEAD: Final = struct.Struct(">II")
#: A larger contribution has a key of its own, and an empty record: the first rank reads the records repeatedly.
_MAX_RECORD_NBYTES: Final = 16 * 2**10
#: The pause between two looks at records is this part of the wait so far, within limits. One store serves all groups.
_PAUSE_SHARE: Final = 1 / 16
_MIN_PAUSE_S: Final = 0.0005
_MAX_PAUSE_S: Final = 0.02
_MAX_LOOKS_PER_S: Final = 2000


class GatherInbox(Protocol):
    """The contributions of one group. Make all calls but `stand_in` inside `Meeting.ask`."""

    def put(self, rank: int, contribution: RankEnvelope) -> None:
        """Contribute as `rank`."""

    def await_all(self, ranks: Sequence[int], timeout_s: float) -> list[int]:
        """Wait until all `ranks` have contributed. Returns those that have not after `timeout_s`."""

    def take(self, ranks: Sequence[int]) -> list[RankEnvelope]:
        """Remove the contributions of `ranks`, which have all come, and return them."""

    def stand_in(self, rank: int, contribution: RankEnvelope, *, is_mine: bool) -> None:
        """Contribute in place of a `rank` that will not. Another thread calls this while this rank waits, in
        `await_all` if the inbox `is_mine`. A contribution that `rank` has made counts, and this one does not."""


class KeyedInbox:
    """The inbox of the only group: contributions to a gather under ``<prefix>/<rank>``."""

    def __init__(self, meeting: Meeting, prefix: str) -> None:
        self._meeting = meeting
        self._prefix = prefix

    def put(self, rank: int, contribution: RankEnvelope) -> None:
        """As `GatherInbox.put`."""
        Mailbox(self._meeting.store).put(self._key(rank), contribution)

    def await_all(self, ranks: Sequence[int], timeout_s: float) -> list[int]:
        """As `GatherInbox.await_all`."""
        return without_key(self._meeting, {rank: self._key(rank) for rank in ranks}, timeout_s)

    def take(self, ranks: Sequence[int]) -> list[RankEnvelope]:
        """As `GatherInbox.take`."""
        mailbox = Mailbox(self._meeting.store)
        return [mailbox.take(self._key(rank), RankEnvelope) for rank in ranks]

    def stand_in(self, rank: int, contribution: RankEnvelope, *, is_mine: bool) -> None:
        """As `GatherInbox.stand_in`."""
        self._meeting.claim(self._key(rank), packed(contribution))

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


class GroupInbox:
    """The inbox of one of `num_groups` groups: records under `key`."""

    def __init__(self, meeting: Meeting, key: str, *, num_groups: int) -> None:
        self._meeting = meeting
        self._key = key
        self._num_groups = num_groups
        #: The contributions of another thread.
        self._instead: dict[int, RankEnvelope] = {}

    def put(self, rank: int, contribution: RankEnvelope) -> None:
        """As `GatherInbox.put`."""
        record = _record(rank, contribution)
        if len(record) > _MAX_RECORD_NBYTES:
            Mailbox(self._meeting.store).put(self._key_of(rank), contribution)
            record = _HEAD.pack(rank, 0)
        self._meeting.store.append(self._key, record)

    def announce(self, rank: int) -> None:
        """Show rank 0 that the first `rank` of the group has come. Its contribution lies nowhere in the store."""
        self._meeting.store.append(self._key, _HEAD.pack(rank, 0))

    def arrived(self) -> set[int]:
        """The ranks that have contributed so far."""
        return set(self._records())

    def await_all(self, ranks: Sequence[int], timeout_s: float) -> list[int]:
        """As `GatherInbox.await_all`."""
        start_s, max_pause_s = time.monotonic(), max(_MAX_PAUSE_S, self._num_groups / _MAX_LOOKS_PER_S)
        while True:
            arrived = self._records()
            absent = [rank for rank in ranks if rank not in arrived and rank not in self._instead]
            waited_s = time.monotonic() - start_s
            if not absent or waited_s >= timeout_s:
                return absent
            pause_s = min(max(_PAUSE_SHARE * waited_s, _MIN_PAUSE_S), max_pause_s)
            time.sleep(min(pause_s, timeout_s - waited_s))

    def take(self, ranks: Sequence[int]) -> list[RankEnvelope]:
        """As `GatherInbox.take`. Removes the records of all ranks."""
        records = self._records()
        taken = [self._taken(rank, records) for rank in ranks]
        self._meeting.store.delete(self._key)
        return taken

    def stand_in(self, rank: int, contribution: RankEnvelope, *, is_mine: bool) -> None:
        """As `GatherInbox.stand_in`."""
        if rank not in self._instead:
            self._instead[rank] = contribution
            if not is_mine:
                self._meeting.append(self._key, _record(rank, contribution))

    def _taken(self, rank: int, records: Mapping[int, bytes]) -> RankEnvelope:
        record = records.get(rank)
        if record is None:
            return self._instead[rank]
        if record:
            return decode_msgpack(record, RankEnvelope)
        return Mailbox(self._meeting.store).take(self._key_of(rank), RankEnvelope)

    def _records(self) -> dict[int, bytes]:
        """The records by rank, the first one of each."""
        store = self._meeting.store
        if not store.check(self._key):
            return {}
        value, start, records = store.get(self._key), 0, dict[int, bytes]()
        while start < len(value):
            rank, nbytes = _HEAD.unpack_from(value, start)
            start += _HEAD.size
            records.setdefault(rank, value[start : start + nbytes])
            start += nbytes
        return records

    def _key_of(self, rank: int) -> str:
        return f"{self._key}/{rank}"


def without_key(meeting: Meeting, keys: Mapping[int, str], timeout_s: float) -> list[int]:
    """Wait until all `keys` exist, which are those of ranks. Returns the ranks whose key did not appear in time."""
    if not keys or meeting.store.wait(list(keys.values()), timeout_s):
        return []
    return [rank for rank, key in keys.items() if not meeting.store.check(key)]


def _record(rank: int, contribution: RankEnvelope) -> bytes:
    """The contribution of `rank`, in the form in which it is appended."""
    data = msgspec.msgpack.encode(contribution)
    return _HEAD.pack(rank, len(data)) + data
