"""The copy of a run, checkpoint by checkpoint. At every moment the target is a valid run, whose head is all there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from holdfast.copying.checkpoint_copy import CheckpointCopy, SourceCheckpoint, copy_pool
from holdfast.copying.copy_order import EpochStep, copy_order
from holdfast.copying.copy_target import CopyTarget
from holdfast.copying.source_listing import SourceListing
from holdfast.errors import ConfigurationError, CorruptError, NotFoundError, StorageError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format.records import CHECKPOINTS, SEAL_NAME, Commit, Place, Seal
from holdfast.format.tombstones import Abandoned
from holdfast.io.buffers import BufferPool
from holdfast.run.complete import is_abandoned
from holdfast.run.history import Run
from holdfast.run.leases import ReadLease, lease_on
from holdfast.store.base import Store
from holdfast.store.only_writer import only_writer

_log = logging.getLogger(__name__)

#: Longest wait for the lease of a checkpoint in the target.
_PATIENCE_S: Final = 60.0

#: Shows the progress of one checkpoint's copy: gets a text and the bytes in all, and gives a function to advance it by.
Shown: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass
class CopyOutcome:
    """The checkpoints that a copy has brought, found, or left out; see `holdfast.reports.CopyReport`."""

    copied: list[Place] = field(default_factory=list)
    present: list[Place] = field(default_factory=list)
    removed: list[Place] = field(default_factory=list)
    vanished: list[Place] = field(default_factory=list)
    damaged: list[Place] = field(default_factory=list)
    num_kept: int = 0
    written_nbytes: int = 0


class RunCopy:
    """The copy of the run `source`, or of the checkpoint at `only`, into the store `target`."""

    def __init__(
        self, source: Run, target: Store, *, only: Place | None, read_back: bool, skip_damaged: bool, shown: Shown
    ) -> None:
        self._source = source
        self._only = only
        self._read_back = read_back
        self._skip_damaged = skip_damaged
        self._shown = shown
        self._target = CopyTarget(source, target)
        self.outcome = CopyOutcome()

    def run(self) -> CopyOutcome:
        """Copy everything that the target lacks. Blocks until all of it is durable."""
        listing = SourceListing.of(self._source, self._only)
        with ExitStack() as stack:
            # The newest checkpoint is copied last, and must still be there then.
            self._lease(listing.head, stack)
            self._target.check(listing, self._only)
            target = self._target.begin()
            stack.enter_context(only_writer(target.storage.location.folder, "copies into"))
            steps = self._steps(listing)
            pool = stack.enter_context(copy_pool(self._source.storage, target.storage))
            num_places, begun = sum(isinstance(step, Place) for step in steps), 0
            for step in steps:
                if isinstance(step, EpochStep):
                    target.add_epoch(step.number, step.origin)
                else:
                    begun += 1
                    title = f"copying {step}, {begun} of {num_places}"
                    self._take(step, pool, title, is_pinned=step in listing.pinned)
        return self.outcome

    def target_head(self) -> Commit | None:
        """The head of the target."""
        return self._target.run.head()

    def _steps(self, listing: SourceListing) -> list[EpochStep | Place]:
        """The epochs and places to bring, in order. A place that the caller named is among them also where the target
        has it, since the target may have lost files of it."""
        target = self._target
        wanted = listing.wanted(self._only)
        self.outcome.removed = sorted(wanted & target.removed)
        if self._only is None:
            self.outcome.present = sorted(wanted & target.places)
            wanted -= target.places
        epochs = listing.new_epochs(self._source, target.epochs, self._only)
        newest = max(listing.epochs) if self._only is None else self._only.epoch
        return list(copy_order(newest, wanted - target.removed, epochs))

    def _take(self, place: Place, pool: BufferPool, title: str, *, is_pinned: bool) -> None:
        """Copy the checkpoint at `place`; or note why it is left out, where it was deleted meanwhile or is damaged."""
        is_new = place not in self._target.places
        try:
            with ExitStack() as stack:
                self._lease(place, stack)
                stack.enter_context(self._kept_parts(place))
                is_there = self._copy(self._source.commit(place), pool, title, is_pinned=is_pinned and is_new)
        except (CorruptError, NotFoundError, StorageError) as error:
            if self._source.is_removed(place):
                _log.warning("checkpoint %s of '%s' was deleted before it was copied", place, self._source_url)
                self.outcome.vanished.append(place)
            elif isinstance(error, StorageError):
                raise
            elif self._skip_damaged:
                _log.warning("checkpoint %s is not copied: %s", place, error.message)
                self.outcome.damaged.append(place)
            else:
                raise self._damaged(place, error) from error
        else:
            outcome = self.outcome
            (outcome.removed if not is_there else outcome.copied if is_new else outcome.present).append(place)

    def _copy(self, commit: Commit, pool: BufferPool, title: str, *, is_pinned: bool) -> bool:
        """Copy one checkpoint: the manifest, the data, the seal, the commit. Each is durable before the next. Returns
        False where somebody has given the checkpoint up in the target, as unfinished."""
        target, folder = self._target, commit.checkpoint
        source = SourceCheckpoint.read(self._source, commit)
        found = frozenset(target.storage.list(f"{CHECKPOINTS}/{folder}"))
        seal_key = source.stored.key(SEAL_NAME)
        if SEAL_NAME in found and not self._may_seal(seal_key, source.seal):
            return False
        try:
            self._begin(source.stored.key(fmt.NAME), source.stored.data, folder, found)
            with self._shown(title, commit.nbytes) as advance:
                work = CheckpointCopy(source, target.storage, read_back=self._read_back, advance=advance)
                files = work.write(pool, found)
        except (CorruptError, NotFoundError):
            is_left_out = self._skip_damaged or self._source.is_removed(commit.place)
            # Of a checkpoint that was removed from the target, still files may be there that others refer to.
            if is_left_out and SEAL_NAME not in found and not target.run.is_removed(commit.place):
                self._discard(folder)
            raise
        self.outcome.num_kept += files.num_kept
        self.outcome.written_nbytes += files.written_nbytes
        target.add(seal_key, source.seal, unlike=lambda _: self._other_seal(seal_key))
        # Nobody gives up a sealed checkpoint, so what is there now stays.
        there = frozenset(target.storage.list(f"{CHECKPOINTS}/{folder}"))
        lost = {fmt.NAME, *source.stored.manifest.file_names} - there
        if lost:
            raise _given_up_meanwhile(commit.place, target.storage.path(source.stored.key(min(lost))))
        if is_pinned:
            target.add_pin(commit.place)
        target.add_commit(commit.place, source.commit)
        return True

    def _may_seal(self, key: str, seal: bytes) -> bool:
        """Whether the target's checkpoint, of which something has the name of the seal, was not given up there. Deletes
        a seal that is damaged."""
        storage = self._target.storage
        found = storage.read(key)
        if is_abandoned(found):
            if self._only is None:
                return False
            raise self._other_seal(key)
        if found != seal:
            try:
                records.decode(found, Seal, path=storage.path(key))
            except CorruptError:
                storage.delete(key)
            else:
                raise self._other_seal(key)
        return True

    def _begin(self, key: str, manifest: bytes, folder: str, found: frozenset[str]) -> None:
        """Create the manifest. Deletes a damaged one, and what a killed copy left."""
        storage = self._target.storage
        for name in storage.leftovers(f"{CHECKPOINTS}/{folder}"):
            storage.delete(records.checkpoint_key(folder, name))
        if fmt.NAME in found and storage.read(key) != manifest:
            storage.delete(key)
        storage.create(key, manifest)

    def _discard(self, folder: str) -> None:
        """Delete the files of a checkpoint that cannot be copied whole; the manifest last.

        In a store without locks, another call may copy the same checkpoint. So this takes the name of the seal until
        all is deleted, and deletes nothing where that call was first.
        """
        storage, seal_key = self._target.storage, records.checkpoint_key(folder, SEAL_NAME)
        if not storage.create(seal_key, records.encode(Abandoned(checkpoint=folder))):
            return
        names = {*storage.list(f"{CHECKPOINTS}/{folder}")} - {SEAL_NAME}
        for name in sorted(names, key=lambda name: name == fmt.NAME):
            storage.delete(records.checkpoint_key(folder, name))
        storage.delete(seal_key)

    def _lease(self, place: Place, stack: ExitStack) -> None:
        """Keep the source's checkpoint at `place` from being deleted, until `stack` ends."""
        lease = lease_on(self._source.storage, place)
        if lease is not None:
            stack.callback(lease.end)

    @contextmanager
    def _kept_parts(self, place: Place) -> Iterator[None]:
        """Keep the target's parts of the checkpoint at `place` from deletions, which take them for those of a save that
        was cut off when there is a newer epoch. The lease exists before the manifest: who sees one finds the other."""
        storage = self._target.storage
        is_newest = place.epoch == max(self._target.epochs, default=place.epoch)
        if is_newest or place in self._target.places:
            yield
            return
        lease = ReadLease(storage, place, after_s=0.0)
        lease.await_record(_PATIENCE_S)
        try:
            yield
        finally:
            lease.end()

    @property
    def _source_url(self) -> str:
        return self._source.storage.location.url

    def _damaged(self, place: Place, error: CorruptError | NotFoundError) -> CorruptError:
        return CorruptError(
            f"checkpoint {place} of '{self._source_url}' is not copied: {error.message}",
            code=error.code if isinstance(error, CorruptError) else "corrupt.incomplete",
            action="Restore the file from another copy of the run, or copy all other checkpoints with --skip-damaged "
            "(skip_damaged=True). What has been copied stays, and the next call goes on.",
            path=error.path,
            step=error.step,
        )

    def _other_seal(self, key: str) -> ConfigurationError:
        path = self._target.storage.path(key)
        return ConfigurationError(
            f"the checkpoint is not copied: it was given up there as unfinished, or is another one ('{path}').",
            code="config.diverged",
            action="Copy into a new folder.",
            path=path,
        )


def _given_up_meanwhile(place: Place, path: str) -> StorageError:
    return StorageError(
        f"checkpoint {place} lost files while it was copied ('{path}'): another call copies into the same run, and "
        "gave it up.",
        code="storage.vanished",
        action="Repeat the copy, with one call at a time.",
        path=path,
    )
