"""The checkpoints of a run as a list: those on the lineage of its head, and those off it, each with its pin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import msgspec
from msgspec.structs import replace

from holdfast.errors import CorruptError, HoldfastError, NotFoundError
from holdfast.format.records import Commit, Diverged, Epoch, Fork, Place
from holdfast.run.history import Run
from holdfast.run.holds import Holds
from holdfast.run.quarantine import in_quarantine
from holdfast.run.reference_names import references_of
from holdfast.run.resumes import ResumeCounts

UNKNOWN_LINEAGE: Final = "unknown whether the head descends from these"
#: The advice about a checkpoint that is not whole and that no save has begun.
REPEAT_CALL: Final = "An interrupted import or copy (holdfast cp) goes on if it is repeated."


class ListedCheckpoint(msgspec.Struct, frozen=True):
    """One checkpoint of a run. `abandoned` says which epoch abandoned it; it is empty on the lineage of the head.

    `place` is such as ``3.12``, `created` in unix seconds, `nbytes` the size of its data, `folder` its name in
    ``checkpoints/``. `head` and `pinned` say whether it is the head, and whether somebody has pinned it. `resumes` is
    the number of jobs that have resumed it, and of which none has committed a newer one, nor ended in an orderly way.
    `quarantined` says whether a load has found it to be damaged. ``referenced_nbytes`` are the bytes of its data that
    are not in its own folder, because earlier checkpoints have them.
    """

    place: str
    step: int
    created: float
    nbytes: int
    head: bool
    folder: str
    metrics: dict[str, str | float]
    diverged: Diverged
    abandoned: str = ""
    pinned: bool = False
    resumes: int = 0
    quarantined: bool = False
    referenced_nbytes: int = 0


class HistoryReader:
    """A reader of a run's records that turns unreadable ones into `faults` and continues."""

    def __init__(self, run: Run) -> None:
        self.faults: list[HoldfastError] = []
        self._run = run
        self._pinned = Holds.of(run.storage).pinned
        self._quarantined = in_quarantine(run.storage)
        self._referring = {each.checkpoint for each in references_of(run.storage)}
        self._resumes = ResumeCounts.of(run).counted
        self._places: list[Place] = []
        self._broken = False
        #: For each epoch, the reason why those of its checkpoints that are not on the lineage were abandoned.
        self._reasons: dict[int, str] = {}

    def lineage(self) -> list[ListedCheckpoint]:
        """The head and its ancestors, as far as epochs can be read."""
        try:
            self._places.extend(self._run.lineage_places())
        except (CorruptError, NotFoundError) as error:
            self.faults.append(error)
            self._broken = True
        return [row for number, place in enumerate(self._places) for row in self._rows(place, head=number == 0)]

    def others(self) -> list[ListedCheckpoint]:
        """All other committed checkpoints, newest first."""
        known = set(self._places)
        return [
            row
            for place in self._run.places()
            if place not in known
            for row in self._rows(place, abandoned=UNKNOWN_LINEAGE if self._broken else self._reason(place.epoch))
        ]

    def _reason(self, epoch: int) -> str:
        if epoch not in self._reasons:
            self._reasons[epoch] = _left_by(self._run, epoch)
        return self._reasons[epoch]

    def _rows(self, place: Place, *, head: bool = False, abandoned: str = "") -> Iterator[ListedCheckpoint]:
        """The row of a place; none where its record is damaged, or was removed just now."""
        try:
            row = _row(self._run.commit(place), head=head, abandoned=abandoned)
            yield replace(
                row,
                pinned=place in self._pinned,
                resumes=self._resumes.get(place, 0),
                quarantined=place in self._quarantined,
                referenced_nbytes=row.referenced_nbytes if row.folder in self._referring else 0,
            )
        except (CorruptError, NotFoundError) as error:
            if not self._run.is_removed(place):
                self.faults.append(error)


def fork_of(run: Run) -> Fork | None:
    """The checkpoint of another run that the lineage of the head began with; None where it began with none."""
    with suppress(CorruptError, NotFoundError):
        number = run.newest_epoch()
        while number is not None:
            record = run.epoch(number)
            if record.opened_from is None:
                return None if record.forked_from is msgspec.UNSET else record.forked_from
            number = record.opened_from.epoch
    return None


def _left_by(run: Run, epoch: int) -> str:
    """A clause that names the epoch on the head's lineage that did not continue from the end of `epoch`."""
    number = run.epochs()[0]
    while True:
        record = run.epoch(number)
        origin = record.opened_from
        if origin is None or origin.epoch <= epoch:
            first = _first_from(run, record, after=epoch)
            start = f"went on from {origin}" if origin is not None else "began anew"
            return f"epoch {first.epoch} {start} ({first.why})"
        number = origin.epoch


def _first_from(run: Run, record: Epoch, *, after: int) -> Epoch:
    """The first of the consecutive epochs, up to `record`, that were all opened from the same place.

    A rollback is an epoch of its own, and the job that resumes there opens the next one from the same place.
    """
    # The record of an epoch off the lineage may be damaged without harm to it: then name a later epoch.
    with suppress(CorruptError, NotFoundError):
        while record.epoch - 1 > after and (earlier := run.epoch(record.epoch - 1)).opened_from == record.opened_from:
            record = earlier
    return record


def _row(commit: Commit, *, head: bool, abandoned: str) -> ListedCheckpoint:
    return ListedCheckpoint(
        place=str(commit.place),
        step=commit.step,
        created=commit.created,
        nbytes=commit.nbytes,
        head=head,
        folder=commit.checkpoint,
        metrics=dict(commit.metrics),
        diverged=commit.diverged,
        abandoned=abandoned,
        referenced_nbytes=commit.num_referenced_bytes,
    )
