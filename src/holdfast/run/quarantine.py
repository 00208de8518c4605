"""Quarantine: a run remembers which checkpoints are damaged in storage, so that no later restore reads them again.

A load that falls back puts the damaged checkpoint into quarantine (`holdfast.run.second_reading`).

While a checkpoint is in quarantine, loads with ``fallback`` pass over it at once, and no policy counts it among those
that it keeps. A load without ``fallback`` reads it: most of it may be whole. ``holdfast verify --deep`` lifts the
quarantine of a checkpoint that it finds whole again, and ``holdfast release`` that of any.
"""

from __future__ import annotations

import shlex
from typing import Final

import msgspec

from holdfast.errors import HoldfastError, NotFoundError
from holdfast.format import records
from holdfast.format.quarantine_records import QUARANTINE, Quarantine, quarantine_key
from holdfast.format.records import Place, parse_commit_name
from holdfast.run.history import Run
from holdfast.run.holds import clock, holder
from holdfast.run.paths import Selection
from holdfast.store.base import Store

#: Longest reason that a record keeps.
_MAX_REASON: Final = 2000
#: Faults of a file that a load of holdfast does not meet.
HARMLESS: Final = frozenset({"extra.file", "corrupt.header"})


def in_quarantine(storage: Store) -> frozenset[Place]:
    """The places of the checkpoints in quarantine. One request."""
    return frozenset(place for name in storage.list(QUARANTINE) if (place := parse_commit_name(name)) is not None)


class Quarantined(msgspec.Struct, frozen=True, kw_only=True):
    """The quarantine of one checkpoint: since when (`created`, in unix seconds), who found the damage (`holder`), what
    it is (`reason`), and the command that lifts the quarantine, whatever is in storage (`lift`).

    Where the record cannot be read, `created` is null and `holder` is empty: the name of the record alone decides.
    """

    created: float | None
    holder: str
    reason: str
    lift: str

    def __str__(self) -> str:
        if self.created is None:
            return f"it is in quarantine, and {self.reason}"
        since = clock(int(self.created))
        return f"it is in quarantine since {since} UTC ({self.holder}), because of this: {self.reason}"

    @property
    def advice(self) -> str:
        """The effect of the quarantine, and its end, as text."""
        return (
            "Loads with fallback=True pass over it. If its files are restored, holdfast verify --deep lifts the "
            f"quarantine; without a look at them, {self.lift} does."
        )


def quarantine_of(storage: Store, place: Place) -> Quarantined | None:
    """The quarantine of the checkpoint at `place`; None where it is not in quarantine. One request."""
    key = quarantine_key(place)
    try:
        record = records.decode(storage.read(key), Quarantine, path=storage.path(key))
    except NotFoundError:
        return None
    except HoldfastError:
        return _unread(storage, place)
    return Quarantined(
        created=record.created, holder=record.holder, reason=record.reason, lift=_lift_command(storage, place)
    )


def reason_of(storage: Store, place: Place) -> str:
    """The reason why the checkpoint at `place`, which was listed, is in quarantine, and since when. One request."""
    return str(quarantine_of(storage, place) or _unread(storage, place))


def _unread(storage: Store, place: Place) -> Quarantined:
    """The quarantine of a checkpoint whose record cannot be read."""
    reason = "the record of why cannot be read"
    return Quarantined(created=None, holder="", reason=reason, lift=_lift_command(storage, place))


def _lift_command(storage: Store, place: Place) -> str:
    return f"holdfast release {shlex.quote(str(Selection(storage.location, place=place)))}"


def quarantine(run: Run, place: Place, reason: str) -> bool:
    """Put the checkpoint at `place` into quarantine, durably. Returns False where it is in quarantine already."""
    record = Quarantine(place=place, created=records.now(), reason=reason[:_MAX_REASON], holder=holder())
    return run.storage.create(quarantine_key(place), records.encode(record))


def lift(storage: Store, place: Place) -> bool:
    """Take the checkpoint at `place` out of quarantine, durably. Returns False where it is not in quarantine."""
    return storage.delete(quarantine_key(place))
