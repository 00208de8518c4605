"""Records in ``quarantine/``: a committed checkpoint was found to be damaged in storage."""

from __future__ import annotations

from typing import Final

from holdfast.format.records import Place, Record, Seconds, commit_name

QUARANTINE: Final = "quarantine"


class Quarantine(Record, frozen=True, kw_only=True, tag="quarantine"):
    """The record that the checkpoint at `place` was found to be damaged, until somebody finds it whole and deletes the
    record. `reason` and `holder` say what was found, and who found it, for people."""

    place: Place
    created: Seconds
    reason: str
    holder: str


def quarantine_key(place: Place) -> str:
    """The key of the quarantine of the checkpoint at `place`."""
    return f"{QUARANTINE}/{commit_name(place)}"
