"""Records that something will never be: a checkpoint that was given up, a commit whose checkpoint was deleted.

A name that is free again after a deletion could be taken once more by a process that slept meanwhile. So what is
deleted leaves one small record for ever, under a name that such a process would have to take, or that hides what it
would write.
"""

from __future__ import annotations

from holdfast.format.records import HISTORY, Place, Record, commit_name, parse_commit_name

_SUFFIX = ".json"
_REMOVED_SUFFIX = ".removed.json"


class Abandoned(Record, frozen=True, kw_only=True, tag="abandoned"):
    """Stands where the seal of `checkpoint` would: it was given up unfinished, and nobody can seal it any more."""

    checkpoint: str


class Removed(Record, frozen=True, kw_only=True, tag="removed"):
    """Hides the commit at `place`, whether its record is there or not: its `checkpoint` was, or is being, deleted."""

    place: Place
    checkpoint: str


def removed_key(place: Place) -> str:
    """The key of the record that hides the commit at `place`."""
    return f"{HISTORY}/{removed_name(place)}"


def removed_name(place: Place) -> str:
    """The name of that record in ``history/``."""
    return commit_name(place).removesuffix(_SUFFIX) + _REMOVED_SUFFIX


def parse_removed_name(name: str) -> Place | None:
    """The place that a file of this name in ``history/`` hides, or None where it hides none."""
    return parse_commit_name(name.removesuffix(_REMOVED_SUFFIX) + _SUFFIX) if name.endswith(_REMOVED_SUFFIX) else None
