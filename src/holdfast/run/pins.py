"""Pins: a user keeps a checkpoint from being deleted. See `holdfast.run.holds` for why a pin holds."""

from __future__ import annotations

from holdfast.errors import NotFoundError
from holdfast.format import records
from holdfast.format.hold_records import Pin, pin_key
from holdfast.format.records import Commit, Place
from holdfast.run.history import Run
from holdfast.run.holds import await_removals


def pin_checkpoint(run: Run, commit: Commit) -> bool:
    """Keep the checkpoint of `commit` from being deleted, durably. Returns False where it was pinned already.

    Raises `NotFoundError`, code ``not_found.removed``, if it was deleted at the same moment.
    """
    key = pin_key(commit.place)
    created = run.storage.create(key, records.encode(Pin(place=commit.place, created=records.now())))
    await_removals(run.storage, commit.place)
    if run.is_removed(commit.place):
        run.storage.delete(key)
        raise NotFoundError(
            f"checkpoint {commit.place} of '{run.storage.location}' was deleted before it could be pinned.",
            code="not_found.removed",
            action="Pin another one.",
            path=run.storage.location.url,
            step=commit.step,
        )
    return created


def unpin_checkpoint(run: Run, place: Place) -> bool:
    """Take back the pin of the checkpoint at `place`, durably. Returns False where it was not pinned."""
    return run.storage.delete(pin_key(place))
