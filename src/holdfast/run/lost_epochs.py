"""Repair of an epoch's lost record from the commits of that epoch.

Without the record the head would be an older checkpoint, and committed checkpoints would be invisible. Commits prove
that the epoch existed, but they do not say which checkpoint it was opened from. Training counts steps up, so that was
the newest checkpoint of earlier epochs whose step is below the first step of this epoch.
"""

from __future__ import annotations

import secrets

from holdfast.errors import ConfigurationError, CorruptError
from holdfast.format import records
from holdfast.format.records import Commit, Epoch
from holdfast.run.complete import read_manifest
from holdfast.run.history import Run
from holdfast.run.uncommitted import UNREADABLE, RunRecords


def lost_epoch(run: Run, known: RunRecords, number: int) -> Epoch | None:
    """The likely content of the lost record of epoch `number`; None where the epoch has no readable commit.

    Changes nothing.
    """
    commits = [commit for commit in known.commits.values() if isinstance(commit, Commit)]
    first = min((commit for commit in commits if commit.place.epoch == number), key=_place, default=None)
    if first is None:
        return None
    earlier = [commit for commit in commits if commit.place.epoch < number]
    origin = max((commit for commit in earlier if commit.step < first.step), key=_place, default=None)
    newest = max(earlier, key=_place, default=None)
    return Epoch(
        epoch=number,
        opened_from=None if origin is None else origin.place,
        why="start" if origin is None else "resume" if origin is newest else "rollback",
        created=first.created,
        world_size=_world_size(run, first),
        incarnation=secrets.token_hex(16),
    )


def make_anew(run: Run, known: RunRecords, number: int) -> Epoch:
    """Write the lost or damaged record of epoch `number` anew; durable on return. A readable record stays.

    Raises `ConfigurationError`, code ``config.remedy``, where the epoch has no readable commit.
    """
    epoch = lost_epoch(run, known, number)
    if epoch is None:
        raise ConfigurationError(
            f"no checkpoint proves what the record of epoch {number} of '{run.storage.location}' was.",
            code="config.remedy",
            action="Restore the record from another copy of the run.",
            path=run.storage.path(records.epoch_key(number)),
        )
    key = records.epoch_key(number)
    if not run.storage.create(key, records.encode(epoch)):
        try:
            return run.epoch(number)
        except CorruptError:
            run.storage.delete(key)
            run.storage.create(key, records.encode(epoch))
    return run.epoch(number)


def _place(commit: Commit) -> records.Place:
    return commit.place


def _world_size(run: Run, commit: Commit) -> int:
    try:
        return read_manifest(run, commit.checkpoint).manifest.body.world_size
    except UNREADABLE:
        return 1  # messages show this number, and nothing else uses it
