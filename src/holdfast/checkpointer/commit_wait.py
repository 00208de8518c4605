"""The wait for the commit of a checkpoint that was restored from memory before it was committed.

The next save continues from that checkpoint, so it waits for the commit. The wait also ends when the commit can never
come: another job has opened a newer epoch, somebody gave the checkpoint up or removed it, or a later one, whose last
files came to storage after the restore had looked there, was committed first.
"""

from __future__ import annotations

import time
from typing import Final, Literal, NamedTuple

from holdfast.errors import NotFoundError
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.run.complete import can_commit
from holdfast.run.history import Run
from holdfast.run.session import JOB
from holdfast.store.base import Store

#: Interval of looks in storage at whether the commit can still come.
_LOOK_S: Final = 0.25
#: Time that a save waits for the commit after an earlier save has waited in vain.
_SHORT_PATIENCE_S: Final = 1.0

Fate = Literal["committed", "awaited", "never"]


class RestoredCheckpoint(NamedTuple):
    """A checkpoint that was restored from memory, and was not committed then: its run, the newest `epoch` of the run at
    that time, its place and id, and the name of its folder."""

    run_id: str
    epoch: int
    place: Place
    checkpoint_id: str
    folder: str


class CommitWait:
    """One job's wait for the commit of the checkpoint that it `restored`."""

    def __init__(self, restored: RestoredCheckpoint) -> None:
        self.restored = restored
        #: Whether the save that waits now has asked the keeper to make it durable.
        self.is_asked = False
        #: Whether a save has waited in vain.
        self._was_late = False
        self._begun_s = time.monotonic()
        self._looked_s = 0.0

    def begin(self) -> None:
        """Note that another save begins to wait."""
        self._begun_s = time.monotonic()
        self.is_asked = False

    def is_late(self, *, is_over: bool) -> bool:
        """Whether the save that waits now waits no longer: its own time `is_over`, or an earlier save has waited in
        vain and the short time of a later one has passed."""
        self._was_late |= is_over
        return is_over or (self._was_late and time.monotonic() - self._begun_s > _SHORT_PATIENCE_S)

    def look(self, storage: Store, *, at_once: bool) -> Fate:
        """Find out in storage whether the checkpoint is committed, or can never be; the latter `at_once`, or when the
        last look at that was a while ago. If this process has opened a newer epoch itself, the next save does not
        continue from the checkpoint, so its commit is not needed.

        Raises:
            FencedError: another job has opened a newer epoch, or the record of the epoch is gone.
        """
        place = self.restored.place
        if storage.nbytes(records.commit_key(place)) is not None:
            return "committed"
        if not at_once and time.monotonic() - self._looked_s < _LOOK_S:
            return "awaited"
        self._looked_s = time.monotonic()
        try:
            run = Run.open(storage)
        except NotFoundError:
            return "never"  # somebody removed the run
        if run.run_id != self.restored.run_id:
            return "never"
        newest = run.newest_epoch() or 0
        if newest != self.restored.epoch:
            if not JOB.has_opened(run, newest):
                run.check_fence(self.restored.epoch)
            return "never"
        if not can_commit(run, place, self.restored.folder):
            return "never"
        head = run.head_place()
        # Keepers free what is older than a committed one, if it was for memory alone.
        return "never" if head is not None and place < head else "awaited"
