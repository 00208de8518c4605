"""The run that a copy is written into: the checks before the first byte, and the records that a copy creates."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, Self

from holdfast.copying.source_listing import SourceListing
from holdfast.errors import ConfigurationError, CorruptError, HoldfastError, NotFoundError
from holdfast.format import records
from holdfast.format.hold_records import Pin, pin_key
from holdfast.format.records import Place
from holdfast.format.tombstones import Removed, removed_key
from holdfast.run.history import Run
from holdfast.run.paths import Selection
from holdfast.store.base import Store

_ACTION: Final = "Copy into a new folder."


class CopyTarget:
    """A run that holds a copy of the run `source`, or a part of one, and takes more of it.

    `epochs`, `places` and `removed` are what it has, as of now.
    """

    def __init__(self, source: Run, storage: Store) -> None:
        """List what is at the root of `storage`, and change nothing. Raises `ConfigurationError` where it is no copy of
        `source`, and could not become one."""
        self.storage = storage
        self._source = source
        _check_apart(source.storage, storage)
        self.is_new = not Run.checked_names(storage)
        self.epochs: set[int] = set()
        self.places: set[Place] = set()
        self.removed: frozenset[Place] = frozenset()
        if not self.is_new:
            run = Run.open(storage)
            if run.run_id != source.run_id:
                raise _refused(storage, "config.other_run", f"another run than '{source.storage.location}' is there.")
            self.epochs.update(run.epochs())
            history = run.history()
            self.removed = history.removed()
            self.places.update(history.places())

    @property
    def run(self) -> Run:
        """The copy, as a run."""
        return Run(self.storage, self._source.marker)

    def check(self, listing: SourceListing, only: Place | None) -> None:
        """Raise `ConfigurationError`, code ``config.diverged``, where the copy has what its source has not.

        A job that saves into the copy opens an epoch of its own there first, so it is found by that epoch. Where `only`
        one checkpoint comes, epochs after its own do not matter: it lands at its own place.
        """
        before = {number for number in self.epochs if only is None or number <= only.epoch}
        newest = max(before, default=None)
        if newest is not None and not (newest in listing.epochs and self._has_same_epoch(newest)):
            raise self._diverged(f"its epoch {newest} is another one, so a job has saved into it since it was copied")
        unknown = self.places - listing.places - listing.removed
        if only is None and unknown:
            what = f"it has checkpoint {max(unknown)}, which '{self._source.storage.location}' does not have"
            raise self._diverged(what)
        if only in self.removed:
            raise self._diverged(f"checkpoint {only} was removed there, or an earlier copy left it out")

    def begin(self) -> Self:
        """Create the marker, durably, where there is none."""
        key = records.MARKER_KEY
        if self.is_new:
            self.storage.create(key, self._source.storage.read(key, limit=records.MAX_RECORD_NBYTES))
            if Run.open(self.storage).run_id != self._source.run_id:
                raise _refused(self.storage, "config.other_run", "another run was begun there at this moment.")
        return self

    def add_epoch(self, number: int, origin: Place | None) -> None:
        """Create the record of epoch `number`, which was opened from `origin`.

        Where the copy does not have the checkpoint at `origin`, its place becomes one that was removed: a reader must
        find one or the other. Raises `ConfigurationError`, code ``config.diverged``, where a job has opened the epoch.
        """
        if origin is not None and origin not in self.places and origin not in self.removed:
            self._hide(origin)
        key = records.epoch_key(number)
        data = self._source.storage.read(key, limit=records.MAX_RECORD_NBYTES)
        if not self.storage.create(key, data) and not self._has_same_epoch(number):
            raise self._diverged(f"a job has opened epoch {number} there just now")
        self.epochs.add(number)

    def add_pin(self, place: Place) -> None:
        """Pin the checkpoint at `place`, which is about to be committed."""
        self.storage.create(pin_key(place), records.encode(Pin(place=place, created=records.now())))

    def add(self, key: str, data: bytes, *, unlike: Callable[[bytes], HoldfastError]) -> None:
        """Create the object `key`. Where it exists with other bytes, raise the error that `unlike` makes of them."""
        if not self.storage.create(key, data) and (found := self.storage.read(key)) != data:
            raise unlike(found)

    def add_commit(self, place: Place, data: bytes) -> None:
        """Create the commit at `place`, which publishes a checkpoint that is all there."""
        self.add(records.commit_key(place), data, unlike=lambda _: self._diverged(f"its checkpoint {place} is another"))
        self.places.add(place)

    def _hide(self, place: Place) -> None:
        """Create a tombstone for a checkpoint that the copy lacks: that of the source, or one like it."""
        key, data = removed_key(place), b""
        with suppress(NotFoundError, CorruptError):  # the name of the record decides
            data = records.encode(Removed(place=place, checkpoint=self._source.commit(place).checkpoint))
        with suppress(NotFoundError):
            data = self._source.storage.read(key, limit=records.MAX_RECORD_NBYTES)
        self.storage.create(key, data)
        self.removed |= {place}

    def _has_same_epoch(self, number: int) -> bool:
        return self.run.epoch(number) == self._source.epoch(number)

    def _diverged(self, what: str) -> ConfigurationError:
        return _refused(
            self.storage,
            "config.diverged",
            f"it is no mere copy of '{self._source.storage.location}' any more: {what}.",
        )


def _check_apart(source: Store, target: Store) -> None:
    """Refuse a target that is the source, or lies in it."""
    ours, theirs = source.resolved(), target.resolved()
    if ours == theirs:
        raise _refused(target, "config.destination", "it is the run itself.")
    if theirs.startswith(f"{ours}/") or target.location.url.startswith(f"{source.location.url}/"):
        raise _refused(target, "config.destination", "it lies in the folder of the run.")


def _refused(storage: Store, code: str, why: str) -> ConfigurationError:
    where = str(Selection(storage.location))
    message = f"nothing is copied into '{where}': {why}"
    return ConfigurationError(message, code=code, action=_ACTION, path=where)
