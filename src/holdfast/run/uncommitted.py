"""Checkpoint folders without a commit: their state, and the remedy for each."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import ceil
from typing import Final, Literal, NamedTuple

from holdfast.errors import CorruptError, HoldfastError, IncompatibleError, NotFoundError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.records import CHECKPOINTS, SEAL_NAME, Commit, Place, Seal
from holdfast.run.complete import StoredManifest, check_files, encode_seal, is_abandoned, missing_files, read_manifest
from holdfast.run.history import Run
from holdfast.run.holds import Holds
from holdfast.run.listing import REPEAT_CALL
from holdfast.run.paths import some
from holdfast.run.references import needed_folders

Remedy = Literal["finish", "remove", "none"]

#: A save that began or wrote less than this many seconds ago may still be in progress.
IN_PROGRESS_S: Final = 900.0

UNREADABLE: Final = (CorruptError, NotFoundError, IncompatibleError)


@dataclass(frozen=True)
class RunRecords:
    """The records of a run, as of one reading.

    `newest` is the newest epoch with a record, a commit or a tombstone. `commits` has the commits by place, with an
    error for each that cannot be read; `folders` the folders of the readable commits. `needed` are the folders that
    hold still files to which other checkpoints refer.
    """

    newest: int
    commits: dict[Place, Commit | HoldfastError]
    removed: frozenset[Place]
    folders: frozenset[str]
    needed: frozenset[str]

    @staticmethod
    def of(run: Run) -> RunRecords:
        """Read the records that are in storage now."""
        newest, history, needed = run.newest_epoch() or 0, run.history(), needed_folders(run)
        commits: dict[Place, Commit | HoldfastError] = {}
        for place in history.places():
            try:
                commits[place] = run.commit(place)
            except UNREADABLE as error:
                commits[place] = error
        folders = frozenset(commit.checkpoint for commit in commits.values() if isinstance(commit, Commit))
        return RunRecords(max(newest, history.newest_epoch() or 0), commits, history.removed(), folders, needed)

    def is_committed(self, folder: str) -> bool:
        """Whether a commit names the checkpoint folder `folder`."""
        return folder in self.folders


class FolderState(NamedTuple):
    """The state of a folder: a stable code, a text that says what it means and what to do, and the remedy."""

    code: str
    text: str
    remedy: Remedy


class Objection(NamedTuple):
    """The reason why a folder must not be deleted: a stable word for it, and a clause."""

    kind: str
    text: str


class Uncommitted:
    """One folder in ``checkpoints/`` without a commit, as it was when this object was made."""

    def __init__(self, run: Run, known: RunRecords, folder: str) -> None:
        self._run = run
        self._known = known
        #: The name of the folder.
        self.folder = folder
        self._path = run.storage.path(f"{CHECKPOINTS}/{folder}")
        names = run.storage.list(f"{CHECKPOINTS}/{folder}")
        self._names = {name for name in names if name in (fmt.NAME, SEAL_NAME) or fmt.is_file_name(name)}
        self._names |= set(filter(fmt.is_mark_name, names))
        self._seal = self._read_seal() if SEAL_NAME in self._names else None
        self._given_up = self._seal is not None and is_abandoned(self._seal)
        self._sealed_at = self._sealed_place()

    def state(self, *, deep: bool) -> FolderState | None:
        """The state of the folder; None where there is nothing to do. With `deep`, reads all its data."""
        if self._known.is_committed(self.folder):
            return FolderState("folder.committed", f"'{self._path}' is a committed checkpoint.", "none")
        if self.is_empty or self.is_kept_for_others:
            return None
        if self._given_up or self._sealed_at in self._known.removed:
            return self._removal_unfinished()
        try:
            stored = read_manifest(self._run, self.folder)
        except NotFoundError as error:
            return self._unfinished(error.message, young_s=self._leftovers_young_s())
        except IncompatibleError as error:
            return FolderState("folder.incompatible", f"{error.message} {error.action}", "none")
        except CorruptError as error:
            if error.code in ("corrupt.run", "corrupt.folder"):
                return FolderState("folder.foreign", f"{error.message} {error.action}", "none")
            return self._damaged(error)
        return self._planned(stored, deep=deep)

    @property
    def is_half_removed(self) -> bool:
        """Whether somebody has begun to delete the folder, so that anybody may go on. Reads no data file."""
        if self.is_empty:
            return False
        return self._given_up or self.place_to_hide() in self._known.removed

    @property
    def is_kept_for_others(self) -> bool:
        """Whether the folder is what stays of a removed checkpoint, because others refer to its still files."""
        files = self._names - {fmt.NAME}
        is_rest = bool(files) and all(map(fmt.is_still_name, files))
        return is_rest and self.folder in self._known.needed and self.is_half_removed

    @property
    def is_empty(self) -> bool:
        """Whether the folder has no file, or only the record of a save that was given up, which stays for ever."""
        return not self._names or (self._given_up and len(self._names) == 1)

    def objection(self, epoch: int, *, grace_s: float = 0.0) -> Objection | None:
        """The reason why nobody may delete the folder as the parts of a save that was cut off; None where anybody may.

        Such a save is of an epoch before `epoch`, and left the folder without all its data files. So it can never be
        committed: where a writer lives, he is fenced. With `grace_s`, it also began that long ago. Reads no data file.
        """
        if self._seal is not None:
            return Objection("sealed", "it is sealed, and was never committed; holdfast doctor says more")
        try:
            stored = read_manifest(self._run, self.folder)
        except UNREADABLE as error:
            return Objection("unknown", error.message.removesuffix("."))
        place = stored.manifest.place
        if place in self._known.commits or place in self._known.removed:
            return Objection("superseded", f"{place} is the place of another checkpoint")
        if place.epoch >= epoch:
            return Objection("newest_epoch", f"its epoch, {place.epoch}, is the newest: its save may be under way")
        # A copy into this run has its lease before its manifest, so a look behind that of the manifest finds the lease.
        held = Holds.of(self._run.storage).reasons(place)
        if held:
            return Objection("held", " and ".join(held))
        if not missing_files(self._run.storage, stored):
            return Objection("complete", "it has all its data files; holdfast doctor --finish commits it")
        # A time in the far future is that of a wrong clock, and says nothing.
        if abs(time.time() - stored.manifest.body.created) < grace_s:
            return Objection("young", "its save began within the time of grace")
        return None

    def place_to_hide(self) -> Place | None:
        """The place that must be hidden before files are deleted: that of a seal, or one that is hidden already.

        A process that has found the seal may still commit the checkpoint. None where it is enough to take the name of
        the seal.
        """
        if self._sealed_at is not None:
            return self._sealed_at
        try:
            place = read_manifest(self._run, self.folder).manifest.place
        except UNREADABLE:
            return None
        return place if place in self._known.removed else None

    def _planned(self, stored: StoredManifest, *, deep: bool) -> FolderState | None:
        """The state of a folder with a sound manifest."""
        place = stored.manifest.place
        if place in self._known.removed:
            return self._removal_unfinished()
        if isinstance(self._known.commits.get(place), HoldfastError):
            return None  # it may be the one that was committed: the doctor reports the damaged record by itself
        if place in self._known.commits:
            text = f"Another checkpoint was committed at the place of '{self._path}', {place}. Open it by its own path."
            return FolderState("folder.superseded", text, "none")
        absent = missing_files(self._run.storage, stored)
        if absent:
            left_s = stored.manifest.body.created + IN_PROGRESS_S - time.time()
            young_s = max(left_s if place.epoch == self._known.newest else 0.0, self._leftovers_young_s())
            return self._unfinished(f"'{self._path}' lacks {some(absent)}.", young_s=young_s)
        try:
            seal = encode_seal(stored, check_files(self._run, stored, deep=deep))
        except CorruptError as error:
            return self._damaged(error)
        if self._seal not in (None, seal):
            return FolderState(
                "folder.damaged", f"The seal in '{self._path}' does not match the files there.", self._remedy()
            )
        return self._complete(stored)

    def _complete(self, stored: StoredManifest) -> FolderState:
        place, step = stored.manifest.place, stored.manifest.body.step
        newer = max(self._known.commits, default=None)
        is_newest = place.epoch == self._known.newest and (newer is None or place > newer)
        becomes = "becomes the head, unless a later one is finished too" if is_newest else "appears at its place"
        lacks = "a commit" if self._seal is not None else "a seal and a commit"
        text = f"'{self._path}' (place {place}, step {step}) has all its files, but lacks {lacks}. Finish it: it then"
        return FolderState("folder.complete", f"{text} {becomes}. Nothing else changes.", "finish")

    def _unfinished(self, what: str, *, young_s: float) -> FolderState:
        """The state of a folder that lacks files. For `young_s` seconds more its save may be in progress."""
        if young_s > 0:
            text = f"{what} Its save may be in progress: look again in {ceil(young_s)} s, or remove it by force."
            text = f"{text} {REPEAT_CALL}"
            return FolderState("folder.in_progress", text, "none")
        text = (
            f"{what} Its save never ended, so the checkpoint was never visible. Only the memory of a node may still "
            f"hold it whole (holdfast node): then its keeper finishes it when storage takes it. {REPEAT_CALL} Else "
            "remove it."
        )
        return FolderState("folder.unfinished", text, self._remedy())

    def _damaged(self, error: CorruptError) -> FolderState:
        text = f"{error.message} The checkpoint was not committed. Restore the file to finish it, or remove it."
        return FolderState("folder.damaged", text, self._remedy())

    def _removal_unfinished(self) -> FolderState:
        text = f"The removal of the checkpoint '{self._path}' was interrupted. Remove it to delete the rest."
        return FolderState("folder.removal_unfinished", text, "remove")

    def _remedy(self) -> Remedy:
        # An unreadable seal does not say at which place a process may still commit the checkpoint: a person must judge.
        return "none" if self._seal is not None and self._sealed_at is None else "remove"

    def _read_seal(self) -> bytes | None:
        """Read the file with the name of the seal; None where a deletion has taken it since it was listed."""
        try:
            return self._run.storage.read(records.checkpoint_key(self.folder, SEAL_NAME))
        except NotFoundError:
            self._names.remove(SEAL_NAME)
            return None

    def _sealed_place(self) -> Place | None:
        if self._seal is None or self._given_up:
            return None
        try:
            return records.decode(self._seal, Seal, path=self._path).place
        except (CorruptError, IncompatibleError):
            return None

    def _leftovers_young_s(self) -> float:
        """The longest time for which a writer of the folder's temporary files may still be at work; 0 where there are
        none, or their writers are known to be dead."""
        folder, storage = f"{CHECKPOINTS}/{self.folder}", self._run.storage
        is_young = storage.leftovers(folder) != storage.leftovers(folder, older_than_s=IN_PROGRESS_S)
        return IN_PROGRESS_S if is_young else 0.0
