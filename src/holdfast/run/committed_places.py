"""The names in ``history/``: the committed places of a run, and those that were removed."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from typing import Final

from holdfast.format import records
from holdfast.format.records import Place
from holdfast.format.tombstones import parse_removed_name, removed_name
from holdfast.store.base import Store

#: The names that are listed first: enough for the head, and one page of any object store.
FIRST_NAMES: Final = 100


class History:
    """The names in ``history/``, as of one listing.

    Names count down, so the listing is sorted newest first, and methods parse only the names that they need. A history
    `of` a store has the newest names at first. When one needs others, it lists all; what was committed since is not
    among the places that it goes on with.
    """

    def __init__(self, names: list[str], list_all: Callable[[], list[str]] | None = None) -> None:
        """`names` are all, or the first of those that `list_all` returns."""
        self._names = names
        self._list_all = list_all

    @classmethod
    def of(cls, storage: Store) -> History:
        """The history in `storage`. One request, and another one where more than the newest names are needed."""
        names = storage.list(records.HISTORY, limit=FIRST_NAMES)
        return cls(names, partial(storage.list, records.HISTORY) if len(names) == FIRST_NAMES else None)

    def places(self) -> Iterator[Place]:
        """The committed places that were not removed, newest first."""
        return self._behind("")

    def places_of(self, epoch: int, *, before: Place | None = None) -> Iterator[Place]:
        """The committed places of `epoch`, newest first; with `before`, only those that are older than that place."""
        if before is None:
            newer = records.commit_name(Place(epoch, records.MAX_SEQ)).removesuffix(".json")  # sorts just before it
        else:
            newer = records.commit_name(before)
        return takewhile(lambda place: place.epoch == epoch, self._behind(newer))

    def newest_epoch(self) -> int | None:
        """The newest epoch that has a commit or a tombstone."""
        places = (records.parse_commit_name(name) or parse_removed_name(name) for name in self._names_behind(""))
        return next((place.epoch for place in places if place is not None), None)

    def is_removed(self, place: Place) -> bool:
        """Whether the checkpoint at `place` was deleted, or is being deleted."""
        name = removed_name(place)
        if not self._names or name > self._names[-1]:
            self._complete()
        at = bisect_left(self._names, name)
        return self._names[at : at + 1] == [name]

    def removed(self) -> frozenset[Place]:
        """The places that were removed."""
        self._complete()
        return frozenset(place for place in map(parse_removed_name, self._names) if place is not None)

    def _behind(self, name: str) -> Iterator[Place]:
        """The committed places whose names sort behind `name`."""
        for each in self._names_behind(name):
            place = records.parse_commit_name(each)
            if place is not None and not self.is_removed(place):
                yield place

    def _names_behind(self, name: str) -> Iterator[str]:
        while True:
            at = bisect_right(self._names, name)
            if at == len(self._names):
                self._complete()
                at = bisect_right(self._names, name)
            if at == len(self._names):
                return
            name = self._names[at]
            yield name

    def _complete(self) -> None:
        """Have all names."""
        if self._list_all is not None:
            self._names, self._list_all = self._list_all(), None
