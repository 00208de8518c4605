"""A run: its epochs, its commits, its head, and the rule that place, not arrival, orders checkpoints.

Every record is created once and never changed. So readers take no lock, and writers exclude each other only by names
that can be created once: the job that creates epoch ``n`` owns the run until another job creates ``n + 1``.

The deletion of a checkpoint leaves a tombstone beside its commit (`holdfast.format.tombstones`): from then on the place
counts as not committed, even if a process writes a commit there again.

Names in ``epochs/`` and ``history/`` that no writer ever produces (other than 10 digits, or 10-10 digits, and
``.json``; a number below 1) cannot be records and are ignored. Everything else must be a sound record: a bad one
raises `CorruptError`, because a skipped record would silently change the head.
"""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, TypeVar

import msgspec

from holdfast.checkpoint.sealed import Sealed
from holdfast.errors import ConfigurationError, CorruptError, FencedError, NotFoundError
from holdfast.format import records
from holdfast.format.digests import digests_of
from holdfast.format.records import Commit, Epoch, Fork, Marker, Place, Record, Seal, Why
from holdfast.format.tombstones import removed_key
from holdfast.run.committed_places import FIRST_NAMES, History
from holdfast.run.holds import await_removals
from holdfast.run.mixed import check_unmixed
from holdfast.run.paths import Selection, lost_marker, no_run, runs_in, some, some_quoted
from holdfast.store.base import Store
from holdfast.store.urls import open_store
from holdfast.wording import count

R = TypeVar("R", bound=Record)

#: Most checkpoints whose steps an error names.
_MAX_TOLD: Final = 16


class Run:
    """One run in a store. Made by `open` or `create`. It keeps only the run's identity, and reads the rest anew."""

    def __init__(self, storage: Store, marker: Marker) -> None:
        self.storage = storage
        self.marker = marker

    @property
    def run_id(self) -> str:
        """The random id that the run got when it was created."""
        return self.marker.run_id

    @classmethod
    def open(cls, storage: Store, *, origin: str | None = None) -> Run:
        """Open the run at the root of `storage`.

        Raises `NotFoundError` where there is none; the error names runs that are near, and the `origin` of the path.
        Raises `CorruptError` where its marker is damaged, or is missing beside records or checkpoints
        (``corrupt.marker``).
        """
        try:
            return cls(storage, _read(storage, records.MARKER_KEY, Marker))
        except NotFoundError as error:
            raise no_run(storage, origin) from error

    @classmethod
    def create(cls, storage: Store) -> Run:
        """Open the run at the root of `storage`; create it durably where there is none.

        Any number of processes may race: all of them get the same run. Raises `ConfigurationError`, code
        ``config.not_a_run``, for a folder that holds anything else, and `CorruptError` as `open`.
        """
        names = cls.checked_names(storage)
        if not names:
            marker = Marker(
                run_id=secrets.token_hex(16), format=records.FORMAT, writer=records.writer(), created=records.now()
            )
            storage.create(records.MARKER_KEY, records.encode(marker))
        # Another process may have created the marker first: the one on storage counts.
        return cls.open(storage)

    @staticmethod
    def checked_names(storage: Store) -> list[str]:
        """The names at the root of `storage`, which is a run, or could become one. Changes nothing.

        Raises `ConfigurationError`, code ``config.not_a_run``, for a folder that holds anything else, and as
        `check_unmixed`; and `CorruptError` as `open`.
        """
        names = storage.list("")
        if names and records.MARKER_KEY not in names:
            if (lost := lost_marker(storage, names)) is not None:
                raise lost
            below = runs_in(storage, names)
            raise ConfigurationError(
                f"'{storage.location}' is not a holdfast run, and it is not empty: it holds {some(names)}.",
                code="config.not_a_run",
                action=f"Name one of the runs in it ({some_quoted(below)}), or a new folder."
                if below
                else "Name a new or an empty folder for the run.",
                path=storage.location.url,
            )
        check_unmixed(storage)
        return names

    def epochs(self) -> list[int]:
        """The numbers of all epochs, newest first. One request."""
        names = self.storage.list(records.EPOCHS)
        return sorted((n for n in map(records.parse_epoch_name, names) if n is not None), reverse=True)

    def newest_epoch(self) -> int | None:
        """The number of the newest epoch, or None before the first. One request, of a few names."""
        names = self.storage.list(records.EPOCHS, limit=FIRST_NAMES)
        newest = next((n for n in map(records.parse_epoch_name, names) if n is not None), None)
        if newest is None and len(names) == FIRST_NAMES:
            return next(iter(self.epochs()), None)  # names that no writer makes come first
        return newest

    def epoch(self, number: int) -> Epoch:
        """The record of epoch `number`."""
        key = records.epoch_key(number)
        record = _read(self.storage, key, Epoch)
        if record.epoch != number:
            raise _misplaced(self.storage.path(key), f"epoch {record.epoch}")
        return record

    def commit(self, place: Place) -> Commit:
        """The record of the commit at `place`, whether or not it is on the head's lineage, or removed."""
        key = records.commit_key(place)
        record = _read(self.storage, key, Commit)
        if record.place != place:
            raise _misplaced(self.storage.path(key), f"place {record.place}")
        return record

    def commits(self, epoch: int) -> list[Place]:
        """The committed places of `epoch`, newest first. One request."""
        return [place for place in self.places() if place.epoch == epoch]

    def places(self) -> list[Place]:
        """All committed places that were not removed, newest first. One request."""
        return list(History(self.storage.list(records.HISTORY)).places())

    def history(self) -> History:
        """The names of all commits and tombstones, as of now. One request, of the newest names, and another one of all
        when older ones are needed."""
        return History.of(self.storage)

    def is_committed(self, place: Place) -> bool:
        """Whether there is a commit at `place` that was not removed. Two requests."""
        return self.storage.nbytes(records.commit_key(place)) is not None and not self.is_removed(place)

    def is_removed(self, place: Place) -> bool:
        """Whether the checkpoint at `place` was deleted, or is being deleted. One request."""
        return self.storage.nbytes(removed_key(place)) is not None

    def head(self) -> Commit | None:
        """The newest good state: the last commit of the newest epoch, else the commit that this epoch was opened from.

        None while nothing is committed. A few requests, whatever the length of the history.

        Raises `CorruptError`, code ``corrupt.history``, where the record of an epoch with commits is missing.
        """
        return next(self.lineage(), None)

    def head_place(self) -> Place | None:
        """The place of the head, whose record may be damaged. None while nothing is committed."""
        return next(self.lineage_places(), None)

    def lineage(self) -> Iterator[Commit]:
        """The head and its ancestors, newest first; one request per commit.

        Commits of abandoned futures are not on it. Nor are commits that arrived in an epoch after a later epoch was
        opened from an earlier place.
        """
        return filter(None, map(self.needed_commit, self.lineage_places()))

    def lineage_places(self, start: Place | None = None) -> Iterator[Place]:
        """The places of the head's lineage, newest first, or of the lineage of `start`, beginning with it.

        One request per epoch, and two.
        """
        # List epochs before commits: the place that an epoch was opened from was committed before the epoch began, so
        # the later listing has it. The other order could miss it.
        newest = self.newest_epoch()
        history = self.history()
        newest = self._proven(newest, history)
        epoch = newest if start is None else start.epoch
        if epoch is None:
            return
        before = None if start is None else Place(epoch, start.seq + 1)
        while True:
            yield from history.places_of(epoch, before=before)
            origin = self.needed_epoch(epoch).opened_from
            if origin is None:
                return
            # A place may be removed at the moment when an epoch is opened from it. The places before it stay.
            if not history.is_removed(origin):
                yield origin
            epoch, before = origin.epoch, origin

    def find(self, *, step: int | None = None, place: Place | None = None) -> Commit:
        """Find the commit at `place`, or the newest one of `step` on the head's lineage.

        A few requests, however many checkpoints there are. Raises `NotFoundError`, code ``not_found.commit``, which
        lists the places or steps that exist.
        """
        if place is not None and step is None:
            return self._find_place(place)
        if place is not None or step is None:
            raise ValueError("pass either step or place, not both")
        return self._find_step(step)

    def open_epoch(
        self,
        *,
        after: int,
        opened_from: Place | None,
        why: Why,
        world_size: int,
        incarnation: str | None = None,
        forked_from: Fork | None = None,
    ) -> Epoch:
        """Make the caller the owner of the run, durably, by creating epoch ``after + 1``.

        `after` is the newest epoch that the caller knows (0 for none): a caller that decided on an older view of the
        run loses, with `FencedError`, code ``fenced.lost_race``. `opened_from` must be committed. It may have been
        removed since: a job that has its state continues from that, and until the job's first commit the checkpoint
        before it is the head. If it is there on return, nobody removes it before that commit. A process recognises its
        own record by `incarnation` (default: a new one). `forked_from` is the checkpoint of another run that it has.
        """
        # Commits of an epoch without a record would become those of the new epoch.
        self._proven(after, self.history())
        if opened_from is not None and not self.is_removed(opened_from):
            self.find(place=opened_from)
        if opened_from is not None and opened_from.epoch > after:
            # The caller continues from a place in an epoch that it did not know.
            raise self._lost_race(after + 1)
        mine = Epoch(
            epoch=after + 1,
            opened_from=opened_from,
            why=why,
            created=records.now(),
            world_size=world_size,
            incarnation=incarnation or secrets.token_hex(16),
            forked_from=forked_from or msgspec.UNSET,
        )
        if not self.storage.create(records.epoch_key(mine.epoch), records.encode(mine)):
            # A store that repeated a request after serving it reports our own record as existing: check whose it is.
            theirs = self.epoch(mine.epoch)
            if theirs.incarnation != mine.incarnation:
                raise self._lost_race(mine.epoch)
        if opened_from is not None:
            # A removal that is announced now may have looked before this epoch existed; a later one finds the epoch.
            await_removals(self.storage, opened_from)
        return mine

    def check_fence(self, epoch: int) -> None:
        """Raise `FencedError` unless `epoch` is the newest.

        Its code is ``fenced.newer_epoch``, or ``fenced.epoch_lost`` where the record of `epoch` itself is gone.
        """
        newest = self.newest_epoch()
        if newest is None or newest < epoch:
            what = f"the record of epoch {epoch} is gone, so somebody deleted or replaced the run"
            raise self._fenced("fenced.epoch_lost", what)
        if newest > epoch:
            about = _about(self.epoch(newest))
            raise self._fenced(
                "fenced.newer_epoch", f"this job saves in epoch {epoch}, but a newer epoch {newest} exists ({about})"
            )

    def check_incarnation(self, epoch: int, incarnation: str) -> None:
        """Raise `FencedError`, code ``fenced.history``, unless `epoch` is the one that was opened with `incarnation`.

        Otherwise somebody restored the run from an older copy, and a job continued from there.
        """
        try:
            is_known = self.epoch(epoch).incarnation == incarnation
        except NotFoundError:
            is_known = False
        if not is_known:
            raise FencedError(
                f"run '{self.storage.location}' was restored from an older copy: its epoch {epoch} is not the epoch in "
                "which this was saved.",
                code="fenced.history",
                action="No action needed: the run continues from that copy, and this save is not part of it.",
                path=self.storage.location.url,
            )

    def publish(self, commit: Commit) -> None:
        """Make `commit` visible and durable at its place. Also succeeds when the same record exists already.

        The commit may arrive late, or from a process that no longer owns the run: it lands at its own place and never
        displaces the head. Raises `FencedError`, code ``fenced.place_taken``, for another commit at the place.
        """
        key, data = records.commit_key(commit.place), records.encode(commit)
        if self.storage.create(key, data):
            return
        existing = self.storage.read(key)
        if existing != data and not records.is_same(existing, data, Commit, path=self.storage.path(key)):
            theirs = records.decode(existing, Commit, path=self.storage.path(key))
            what = f"place {commit.place} holds another checkpoint already ('{theirs.checkpoint}')"
            raise self._fenced("fenced.place_taken", what)

    def locate(self, commit: Commit) -> Sealed:
        """The checkpoint that `commit` published. Reads its seal and verifies it against the commit."""
        prefix = records.checkpoint_key(commit.checkpoint, "")
        key = prefix + records.SEAL_NAME
        try:
            data = self.storage.read(key, limit=records.MAX_SEAL_NBYTES)
        except NotFoundError as error:
            raise _bad_seal(self.storage.path(key), commit, "is missing") from error
        digest = digests_of(commit.reader_features).hex(data)
        if (len(data), digest) != (commit.seal.nbytes, commit.seal.digest):
            raise _bad_seal(self.storage.path(key), commit, "is not the seal that its commit names")
        seal = records.decode(data, Seal, path=self.storage.path(key))
        if (seal.place, seal.step, seal.checkpoint_id) != (commit.place, commit.step, commit.checkpoint_id):
            raise _bad_seal(self.storage.path(key), commit, f"is the seal of place {seal.place}, step {seal.step}")
        if digests_of(seal.reader_features) is not digests_of(commit.reader_features):
            raise _bad_seal(self.storage.path(key), commit, "is signed as its commit is not, or the other way round")
        return Sealed(self.storage, prefix, seal, self.run_id, commit)

    def _proven(self, newest: int | None, history: History) -> int | None:
        """The newest epoch: `newest`, which was listed before `history`, or one that was opened since.

        Raises `CorruptError` where commits prove a newer epoch, whose record is lost: without it the head would
        silently be an older checkpoint.
        """
        proven = history.newest_epoch()
        if proven is None:
            self._check_not_lost(history)
        if proven is None or (newest is not None and proven <= newest):
            return newest
        newest = self.newest_epoch()
        if newest is not None and proven <= newest:
            return newest
        raise self._lost_epoch(proven)

    def _check_not_lost(self, history: History) -> None:
        """Raise `CorruptError` where a `history` without commits has lost them.

        A job that dies in its first save may leave one sealed checkpoint without a commit, and so may the next ones,
        which find nothing to go on from. Others prove that there were commits.
        """
        sealed: list[str] = []
        epochs: set[int] = set()
        are_first_saves = True
        for folder in self.storage.list(records.CHECKPOINTS):
            try:
                seal = _read(self.storage, records.checkpoint_key(folder, records.SEAL_NAME), Seal)
            except (NotFoundError, CorruptError, ValueError):
                continue  # unfinished, given up, or not a checkpoint
            if history.is_removed(seal.place):
                continue
            sealed.append(folder)
            are_first_saves = are_first_saves and seal.place.epoch not in epochs and self._is_first_save(seal.place)
            epochs.add(seal.place.epoch)
            if len(sealed) > 1 and not are_first_saves:
                raise CorruptError(
                    f"'{self.storage.location}' has sealed checkpoints ({' and '.join(sealed)}), but no commits: its "
                    "history folder was lost, or not copied.",
                    code="corrupt.history",
                    action="Restore the history folder from another copy of the run, or run holdfast doctor --finish, "
                    "which commits the checkpoints again.",
                    path=self.storage.path(records.HISTORY),
                )

    def _is_first_save(self, place: Place) -> bool:
        """Whether `place` is the first one of a job that found no checkpoint."""
        try:
            return place.seq == 1 and self.epoch(place.epoch).opened_from is None
        except (NotFoundError, CorruptError):
            return False  # more than a commit was lost

    def needed_epoch(self, number: int) -> Epoch:
        """The record of an epoch on a lineage. Raises `CorruptError` where it is missing."""
        try:
            return self.epoch(number)
        except NotFoundError as error:
            raise self._lost_epoch(number) from error

    def _lost_epoch(self, number: int) -> CorruptError:
        path = self.storage.path(records.epoch_key(number))
        return CorruptError(
            f"the record of epoch {number} of '{self.storage.location}' is missing, but the epoch has checkpoints.",
            code="corrupt.history",
            action=f"Restore '{path}' from another copy of the run, or run holdfast doctor --finish, which makes it "
            "anew. Until then load a checkpoint by its place, as RUN@3.12.",
            path=path,
        )

    def _find_step(self, step: int) -> Commit:
        """The newest commit of `step` on the head's lineage, found by the names of checkpoint folders."""
        places = list(self.lineage_places())
        lineage = set(places)
        folders = records.folders_of(step, self.storage.list(records.CHECKPOINTS))
        found = {commit.place: commit for commit in filter(None, map(self._commit_of, folders))}
        if lineage & found.keys():
            return found[max(lineage & found.keys())]
        # A committed checkpoint may have lost its folder. Steps mostly rise along a lineage, so search by bisection.
        at = bisect_left(places, -step, key=lambda place: -_step_of(self.needed_commit(place)))
        commit = self.needed_commit(places[at]) if at < len(places) else None
        if commit is not None and commit.step == step:
            return commit
        steps = sorted({_step_of(self.needed_commit(place)) for place in places[:_MAX_TOLD]}, reverse=True)
        newest = list(map(str, steps))
        others = len(places) - _MAX_TOLD
        told = [*newest, f"those of {count(others, 'older checkpoint')}"] if others > 0 else newest
        abandoned = [str(place) for place in sorted(found, reverse=True) if not self.is_removed(place)]
        raise self._no_commit(f"of step {step} on the lineage of its head", "steps", told, abandoned)

    def _commit_of(self, folder: str) -> Commit | None:
        """The commit of the checkpoint in ``checkpoints/<folder>``; None where it has no readable commit."""
        try:
            seal = _read(self.storage, records.checkpoint_key(folder, records.SEAL_NAME), Seal)
            commit = self.commit(seal.place)
        except (NotFoundError, CorruptError):
            return None  # unfinished, given up, removed or damaged; a load by place reports which
        return commit if commit.checkpoint == folder else None

    def needed_commit(self, place: Place) -> Commit | None:
        """The commit at a `place` that was listed; None where the checkpoint has been removed since.

        Raises `CorruptError`, code ``corrupt.history``, where its record is missing.
        """
        try:
            return self.commit(place)
        except NotFoundError as error:
            if self.is_removed(place):
                return None
            raise CorruptError(
                f"the record of the commit at {place} is missing from the history of '{self.storage.location}'.",
                code="corrupt.history",
                action="Restore the history folder from another copy of the run.",
                path=error.path,
            ) from error

    def _find_place(self, place: Place) -> Commit:
        if self.is_removed(place):
            raise self._no_commit_at(f"{place} any more: it was removed")
        try:
            return self.commit(place)
        except NotFoundError as error:
            raise self._no_commit_at(str(place)) from error

    def _no_commit_at(self, where: str) -> NotFoundError:
        return self._no_commit(f"at {where}", "places", [str(place) for place in self.places()])

    def _no_commit(self, which: str, kind: str, available: list[str], abandoned: Sequence[str] = ()) -> NotFoundError:
        action = f"Choose one of its {kind}: {some(available)}." if available else "Nothing is committed yet."
        if abandoned:
            which += f"; an abandoned part of its history has that step, at {' and '.join(abandoned)}"
            or_else = f", or choose one of the head's {kind}: {some(available)}" if available else ""
            action = f"Name its place (RUN@{abandoned[0]}, --to {abandoned[0]} or at='{abandoned[0]}'){or_else}."
        return NotFoundError(
            f"run '{self.storage.location}' has no commit {which}.",
            code="not_found.commit",
            action=action,
            path=self.storage.location.url,
        )

    def _lost_race(self, epoch: int) -> FencedError:
        what = f"another job opened epoch {epoch} first ({_about(self.epoch(epoch))})"
        return self._fenced("fenced.lost_race", what)

    def _fenced(self, code: str, what: str) -> FencedError:
        return FencedError(
            f"run '{self.storage.location}' belongs to another job: {what}.",
            code=code,
            action="Stop this job. If it is to go on in place of the other one, start it again, with a restore.",
            path=self.storage.location.url,
        )


@dataclass(frozen=True, slots=True)
class Located:
    """A checkpoint that was found by its path.

    `run` is None for a folder outside any history. `epoch` is the newest epoch of the run before the search.
    """

    sealed: Sealed
    run: Run | None
    epoch: int | None


def resolve(target: Selection, storage: Store | None = None) -> Located:
    """Find the checkpoint that `target` names, and verify its seal. `storage` is the store at its root.

    For a run that is its head, or the selected commit. A checkpoint folder is taken by itself, outside any history.
    Raises `NotFoundError`, which names what is near, and `CorruptError` for a seal that is not the committed one.
    """
    storage = storage or open_store(target.location)
    if is_folder(storage):
        return _lone_folder(storage, target)
    run = Run.open(storage, origin=target.origin)
    # Read before the head: a job may continue from what it loads only if no epoch was opened after this look.
    epoch = run.newest_epoch() or 0
    if target.step is not None or target.place is not None:
        commit = run.find(step=target.step, place=target.place)
    else:
        check_unmixed(storage)
        commit = run.head() or no_head(run)
    return Located(run.locate(commit), run, epoch)


def is_folder(storage: Store) -> bool:
    """Whether the root of `storage` is one checkpoint, and no run."""
    return storage.nbytes(records.SEAL_NAME) is not None


def no_head(run: Run) -> NoReturn:
    """Raise the error for a run that has no committed checkpoint, or none on the lineage of its newest epoch."""
    newest = run.newest_epoch()
    origin = None if newest is None else run.epoch(newest).opened_from
    if origin is not None:
        raise NotFoundError(
            f"run '{run.storage.location}' has no checkpoint on the lineage of its newest epoch, which was opened from "
            f"{origin}: those were removed.",
            code="not_found.lineage",
            action="Choose another checkpoint with holdfast rollback (holdfast ls lists them), or start the training "
            "again in another folder.",
            path=run.storage.location.url,
        )
    raise NotFoundError(
        f"run '{run.storage.location}' has no committed checkpoint.",
        code="not_found.head",
        action="Save into it first, or name another run. Run holdfast doctor to see whether one can be finished.",
        path=run.storage.location.url,
    )


def _lone_folder(storage: Store, target: Selection) -> Located:
    if target.step is not None or target.place is not None:
        raise ConfigurationError(
            f"'{target}' selects a checkpoint in '{target.root}', which is one checkpoint, not a run.",
            code="config.path",
            action="Name the checkpoint folder without a selector, or a run with one.",
            path=target.root,
        )
    return Located(Sealed(storage, "", _read(storage, records.SEAL_NAME, Seal)), None, None)


def _read(storage: Store, key: str, kind: type[R]) -> R:
    return records.decode(storage.read(key, limit=records.max_nbytes(kind)), kind, path=storage.path(key))


def _step_of(commit: Commit | None) -> int:
    """The step of a commit; for a commit that was removed meanwhile, the largest step."""
    return records.MAX_STEP if commit is None else commit.step


def _misplaced(path: str, what: str) -> CorruptError:
    return CorruptError(
        f"'{path}' is the record of {what}: it was renamed or copied.",
        code="corrupt.record",
        action="Restore the file from another copy of the run.",
        path=path,
    )


def _bad_seal(path: str, commit: Commit, what: str) -> CorruptError:
    return CorruptError(
        f"checkpoint {commit.place} was committed, but '{path}' {what}.",
        code="corrupt.seal",
        action="Load an older checkpoint, or restore this one from another copy. To copy a run that is being saved "
        "into, use holdfast cp.",
        path=path,
        step=commit.step,
    )


def _about(epoch: Epoch) -> str:
    opened = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(epoch.created))
    return f"opened {opened} UTC by {count(epoch.world_size, 'rank')}, {epoch.why}"
