"""Quarantine: a run remembers which checkpoints are damaged in storage, so that no later restore reads them again.

A load that falls back puts the damaged checkpoint into quarantine (`holdfast.run.second_reading`).

While a checkpoint is in quarantine, loads with ``fallback`` pass over it at once, and no policy counts it among those
that it keeps. A load without ``fallback`` reads it: most of it may be whole. ``holdfast verify --deep`` lifts the
quarantine of a checkpoint that it finds whole again, and ``holdfast release`` that of any.
"""

from __future__ import annotations

from typing import Final

from holdfast.errors import HoldfastError
from holdfast.format import records
from holdfast.format.quarantine_records import QUARANTINE, Quarantine, quarantine_key
from holdfast.format.records import Place, parse_commit_name
from holdfast.run.history import Run
from holdfast.run.holds import clock, holder
from holdfast.store.base import Store

#: Longest reason that a record keeps.
_MAX_REASON: Final = 2000
#: Faults of a file that a load of holdfast does not meet.
HARMLESS: Final = frozenset({"extra.file", "corrupt.header"})


def in_quarantine(storage: Store) -> frozenset[Place]:
    """The places of the checkpoints in quarantine. One request."""
    return frozenset(place for name in storage.list(QUARANTINE) if (place := parse_commit_name(name)) is not None)


def reason_of(storage: Store, place: Place) -> str:
    """The reason why the checkpoint at `place` is in quarantine, and since when. One request."""
    key = quarantine_key(place)
    try:
        record = records.decode(storage.read(key), Quarantine, path=storage.path(key))
    except HoldfastError:  # its name alone decides
        return "it is in quarantine, and the record of why cannot be read"
    since = clock(int(record.created))
    return f"it is in quarantine since {since} UTC ({record.holder}), because of this: {record.reason}"


def quarantine(run: Run, place: Place, reason: str) -> bool:
    """Put the checkpoint at `place` into quarantine, durably. Returns False where it is in quarantine already."""
    record = Quarantine(place=place, created=records.now(), reason=reason[:_MAX_REASON], holder=holder())
    return run.storage.create(quarantine_key(place), records.encode(record))


def lift(storage: Store, place: Place) -> bool:
    """Take the checkpoint at `place` out of quarantine, durably. Returns False where it is not in quarantine."""
    return storage.delete(quarantine_key(place))
