"""Records in ``pins/``: why a checkpoint must stay, and that somebody is about to delete it.

A *pin* is the wish of a user, and stays until somebody takes it back. A *lease* is that of a reader, and ends by
itself. A *removal notice* is that of a process which is about to delete the checkpoint.

The name of a record says everything that others must know. So one listing answers what is held, however much is.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from holdfast.format.records import Place, Record, Seconds, commit_name, parse_commit_name

PINS: Final = "pins"
_LEASES_WANTED: Final = "leases.json"
LEASES_WANTED_KEY: Final = f"{PINS}/{_LEASES_WANTED}"

HoldKind = Literal["pin", "until", "removing"]

_SUFFIX: Final = ".json"
_TIMED: Final = re.compile(r"([0-9]{10}-[0-9]{10})\.(until|removing)-([0-9]{10,12})-[0-9a-f]{16}\.json")


class Pin(Record, frozen=True, kw_only=True, tag="pin"):
    """The record of a user that the checkpoint at `place` must stay, until the record is deleted."""

    place: Place
    created: Seconds


class Lease(Record, frozen=True, kw_only=True, tag="lease"):
    """A reader's record: the files of the checkpoint at `place` must stay until the time `until`. `holder` names the
    reader, for people."""

    place: Place
    until: Seconds
    holder: str


class RemovalNotice(Record, frozen=True, kw_only=True, tag="removal notice"):
    """The record of a process that is about to delete the checkpoint at `place`. `holder` says who, for people."""

    place: Place
    created: Seconds
    holder: str


class LeasesWanted(Record, frozen=True, kw_only=True, tag="leases wanted"):
    """The record that readers are to leave leases in this run, because checkpoints are deleted by a policy."""

    created: Seconds


class HoldName(NamedTuple):
    """The facts in the name of a record in ``pins/``. `time_s` is in whole unix seconds: the end of a lease, the
    beginning of a removal, and 0 for a pin."""

    kind: HoldKind
    place: Place
    time_s: int


def pin_key(place: Place) -> str:
    """The key of the pin of the checkpoint at `place`."""
    return f"{PINS}/{commit_name(place)}"


def lease_key(lease: Lease, token: str) -> str:
    """The key of `lease`; `token` are 16 random hexadecimal digits."""
    return _timed_key(lease.place, "until", lease.until, token)


def notice_key(notice: RemovalNotice, token: str) -> str:
    """The key of `notice`; `token` are 16 random hexadecimal digits."""
    return _timed_key(notice.place, "removing", notice.created, token)


def is_pins_name(name: str) -> bool:
    """Whether a file of this name in ``pins/`` belongs to a run."""
    return name == _LEASES_WANTED or parse_hold_name(name) is not None


def parse_hold_name(name: str) -> HoldName | None:
    """The facts in the name of a file in ``pins/``, or None where it is the name of no such record."""
    if (pinned := parse_commit_name(name)) is not None:
        return HoldName("pin", pinned, 0)
    match = _TIMED.fullmatch(name)
    place = None if match is None else parse_commit_name(match[1] + _SUFFIX)
    if match is None or place is None:
        return None
    return HoldName("until" if match[2] == "until" else "removing", place, int(match[3]))


def _timed_key(place: Place, kind: HoldKind, time_s: float, token: str) -> str:
    return f"{PINS}/{commit_name(place).removesuffix(_SUFFIX)}.{kind}-{int(time_s):010d}-{token}{_SUFFIX}"
