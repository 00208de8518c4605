"""Tombstones: permanent records of a checkpoint that was given up, or of a commit whose checkpoint was deleted.

A process that slept during a deletion could later create the deleted names again. So each deletion leaves one small
record for ever. Either the record has the name that such a process would have to create, or it hides the record that
the process would write.
"""

from __future__ import annotations

from holdfast.format.records import HISTORY, Place, Record, commit_name, parse_commit_name

_SUFFIX = ".json"
_REMOVED_SUFFIX = ".removed.json"


class Abandoned(Record, frozen=True, kw_only=True, tag="abandoned"):
    """The record in place of the seal of `checkpoint`, which was given up unfinished: no process can seal it now."""

    checkpoint: str


class Removed(Record, frozen=True, kw_only=True, tag="removed"):
    """The record that hides the commit at `place`, existing or not: its `checkpoint` was, or is being, deleted."""

    place: Place
    checkpoint: str


def removed_key(place: Place) -> str:
    """The key of the record that hides the commit at `place`."""
    return f"{HISTORY}/{removed_name(place)}"


def removed_name(place: Place) -> str:
    """The file name in ``history/`` of the record that hides the commit at `place`."""
    return commit_name(place).removesuffix(_SUFFIX) + _REMOVED_SUFFIX


def parse_removed_name(name: str) -> Place | None:
    """The place whose commit a file of this name in ``history/`` hides, or None where it hides none."""
    return parse_commit_name(name.removesuffix(_REMOVED_SUFFIX) + _SUFFIX) if name.endswith(_REMOVED_SUFFIX) else None
