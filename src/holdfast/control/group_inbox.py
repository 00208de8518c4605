"""The contributions of the ranks of one group in a large world, under one key of the shared store.

Each member appends a record to the value of that key, and waits for no answer of the store; the first rank of the group
reads all of them with one request, and removes them with another. So a group costs the store few requests, whatever its
size. The first rank looks at the key now and then: a store cannot wait for a number of records.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from holdfast.control.envelopes import RankEnvelope
from holdfast.control.mailbox import Mailbox
from holdfast.control.key_value_store import KeyValueStore
from holdfast.decoding import decode_msgpack

#: Head of a record: its rank, and the number of its bytes.
_HEAD: Final = struct.Struct(">II")
#: A larger contribution lies under a key of its own, and its record is empty: the first rank reads records repeatedly.
_MAX_RECORD_NBYTES: Final = 16 * 2**10
#: The pause between two looks is this part of the wait so far, within these limits.
_PAUSE_SHARE: Final = 1 / 16
_MIN_PAUSE_S: Final = 0.0005


class GroupInbox:
    """The contributions under `key` of `store`. `max_pause_s` is the longest pause between two looks."""

    def __init__(self, store: KeyValueStore, key: str, *, max_pause_s: float) -> None:
        self._store = store
        self._key = key
        self._max_pause_s = max_pause_s

    def put(self, rank: int, contribution: RankEnvelope) -> None:
        """Add the contribution of `rank`."""
        whole = record(rank, contribution)
        if len(whole) > _MAX_RECORD_NBYTES:
            self._mailbox.put(self._key_of(rank), contribution)
            whole = _HEAD.pack(rank, 0)
        self._store.append(self._key, whole)

    def announce(self, rank: int) -> None:
        """Show that the first rank of the group has come. Its contribution does not go through the store."""
        self._store.append(self._key, _HEAD.pack(rank, 0))

    def arrived(self) -> set[int]:
        """The ranks that have contributed so far."""
        return set(self._records())

    def await_all(self, ranks: Sequence[int], timeout_s: float, instead: Mapping[int, RankEnvelope]) -> list[int]:
        """Wait until all `ranks` have contributed. Returns those that have not after `timeout_s`. The caller may add
        contributions of ranks that have ended to `instead`, meanwhile: nobody waits for these."""
        start_s = time.monotonic()
        while True:
            arrived = self._records()
            absent = [rank for rank in ranks if rank not in arrived and rank not in instead]
            waited_s = time.monotonic() - start_s
            if not absent or waited_s >= timeout_s:
                return absent
            pause_s = min(max(_PAUSE_SHARE * waited_s, _MIN_PAUSE_S), self._max_pause_s)
            time.sleep(min(pause_s, timeout_s - waited_s))

    def take(self, ranks: Sequence[int], instead: Mapping[int, RankEnvelope]) -> list[RankEnvelope]:
        """Remove all contributions, and return those of `ranks`."""
        records = self._records()
        taken = [self._taken(rank, records, instead) for rank in ranks]
        self._store.delete(self._key)
        return taken

    def _taken(self, rank: int, records: Mapping[int, bytes], instead: Mapping[int, RankEnvelope]) -> RankEnvelope:
        record = records.get(rank)
        if record is None:
            return instead[rank]
        return decode_msgpack(record, RankEnvelope) if record else self._mailbox.take(self._key_of(rank), RankEnvelope)

    def _records(self) -> dict[int, bytes]:
        """The records by rank, the first one of each."""
        if not self._store.check(self._key):
            return {}
        value, start, records = self._store.get(self._key), 0, dict[int, bytes]()
        while start < len(value):
            rank, nbytes = _HEAD.unpack_from(value, start)
            start += _HEAD.size
            records.setdefault(rank, value[start : start + nbytes])
            start += nbytes
        return records

    def _key_of(self, rank: int) -> str:
        return f"{self._key}/{rank}"

    @property
    def _mailbox(self) -> Mailbox:
        return Mailbox(self._store)


def record(rank: int, contribution: RankEnvelope) -> bytes:
    """The contribution of `rank`, in the form in which it is appended."""
    data = msgspec.msgpack.encode(contribution)
    return _HEAD.pack(rank, len(data)) + data
