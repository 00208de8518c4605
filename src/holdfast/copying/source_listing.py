"""The listing of a run that is copied, taken once; the run may be written meanwhile, and checkpoints deleted."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.format.records import Place
from holdfast.run.history import Run, no_head
from holdfast.run.holds import Holds


@dataclass(frozen=True)
class SourceListing:
    """The names of a run's records: its `epochs`, its committed `places`, those `removed`, and those `pinned`.

    `head` is the place of the head, or of the only checkpoint to copy.
    """

    head: Place
    epochs: frozenset[int]
    places: frozenset[Place]
    removed: frozenset[Place]
    pinned: frozenset[Place]

    @staticmethod
    def of(run: Run, only: Place | None) -> SourceListing:
        """List `run`. Epochs first, so that each listed epoch has its origin among the places, or among those removed.

        Raises `NotFoundError` where nothing is committed, and `CorruptError` where the record of an epoch is lost.
        """
        head = only or run.head_place()
        if head is None:
            no_head(run)
        epochs = frozenset(run.epochs())
        history = run.history()
        removed, places = history.removed(), history.places()
        # Checkpoints of an epoch that was opened after epochs were listed wait for the next copy.
        newest = max(epochs, default=0)
        known = frozenset(place for place in places if place.epoch <= newest)
        for lost in {place.epoch for place in known} - epochs:
            run.needed_epoch(lost)
        return SourceListing(head, epochs, known, removed, Holds.of(run.storage).pinned)

    def wanted(self, only: Place | None) -> frozenset[Place]:
        """The places to copy."""
        return self.places if only is None else frozenset((only,))

    def new_epochs(self, run: Run, known: Collection[int], only: Place | None) -> Mapping[int, Place | None]:
        """The epochs that a copy with the epochs `known` lacks, each with the place that it was opened from: all of
        them, or those on the lineage of the `only` checkpoint to copy. One request for each."""
        if only is None:
            return {number: run.needed_epoch(number).opened_from for number in sorted(self.epochs - {*known})}
        found: dict[int, Place | None] = {}
        place: Place | None = only
        while place is not None and place.epoch not in known:
            number = place.epoch
            place = found[number] = run.needed_epoch(number).opened_from
        return found
