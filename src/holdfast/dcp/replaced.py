"""The checkpoint that a save into a folder replaces, and the mark that outlives a job that is killed meanwhile.

A save marks the old checkpoint before it begins. Once the new one is committed, it deletes the old one, and then the
mark. A job that is killed in between leaves the mark, so the next save knows that the old one is no part of a history.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec import DecodeError

from holdfast.decoding import decode_json
from holdfast.errors import HoldfastError, NotFoundError
from holdfast.format.records import MARKER_KEY, REPLACED, Place, commit_name, parse_commit_name
from holdfast.run.history import Run
from holdfast.run.leases import await_ended_reads
from holdfast.run.removal import remove_checkpoint
from holdfast.run.session import JOB
from holdfast.store.base import Location, Store
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

_log = logging.getLogger(__name__)


class _Mark(msgspec.Struct, frozen=True):
    """A mark: the incarnation of the job that is about to replace the checkpoint."""

    by: str


class Replaced(NamedTuple):
    """The checkpoints that a save into a folder replaces: the one that is there, and those of saves that were killed
    before they could delete theirs."""

    location: Location
    places: Sequence[Place]


def mark_replaced(location: Location, timeout_s: float) -> Replaced | None:
    """Mark the checkpoint in a folder as one that a save replaces.

    None where there is none, and where there are several without a mark: a run with a history, of which a save of DCP
    deletes nothing.
    """
    with TimedStore(open_store(location), timeout_s=timeout_s) as storage:
        names = storage.list("")
        if MARKER_KEY not in names:
            return None
        run = Run.open(storage)
        places = run.places()
        marked = _replaced(run, places) if REPLACED in names else []
        current = [place for place in places if place not in marked]
        if len(current) > 1 or not (current or marked):
            return None
        mark = msgspec.json.encode(_Mark(JOB.incarnation(run)))
        for place in current:
            storage.delete(_key(place))  # that of a save that was killed before its commit
            storage.create(_key(place), mark)
        return Replaced(location, [*marked, *current])


def remove_replaced(replaced: Replaced, timeout_s: float) -> None:
    """Delete the checkpoints that a save has replaced. One stays where it is pinned or being read, and the log says so:
    the new one is committed, so the save has succeeded. The next save tries again."""
    await_ended_reads()
    try:
        with TimedStore(open_store(replaced.location), timeout_s=timeout_s) as storage:
            run = Run.open(storage)
            for place in replaced.places:
                try:
                    _remove(run, place)
                except HoldfastError as error:  # a pin, say: the others can go
                    _tell(replaced, error)
    except HoldfastError as error:
        _tell(replaced, error)


def _remove(run: Run, place: Place) -> None:
    try:
        commit = run.commit(place)
    except NotFoundError:  # a save that was killed while it deleted this one
        pass
    else:
        remove_checkpoint(run, commit)
    run.storage.delete(_key(place))


def _tell(replaced: Replaced, error: HoldfastError) -> None:
    _log.warning("'%s' keeps a checkpoint that was replaced: %s", replaced.location, error)


def _replaced(run: Run, places: Sequence[Place]) -> list[Place]:
    """The marked checkpoints that were replaced: the job that marked them has committed one that is not marked. Other
    marks are of saves that were killed before their commit, and say nothing."""
    by = {place: _by(run.storage, place) for place in map(parse_commit_name, run.storage.list(REPLACED)) if place}
    jobs = {run.epoch(place.epoch).incarnation for place in places if place not in by}
    return [place for place, job in by.items() if job in jobs]


def _by(storage: Store, place: Place) -> str:
    try:
        return decode_json(storage.read(_key(place)), _Mark).by
    except (NotFoundError, DecodeError):
        return ""


def _key(place: Place) -> str:
    return f"{REPLACED}/{commit_name(place)}"
