"""The writing of one generation to storage: its files in parallel, and when all are there, its commit.

This node has a file in a slot of its memory, or on its disk; both kinds are written alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, Protocol

from holdfast.errors import FencedError
from holdfast.format.records import SEAL_NAME, FileSeal
from holdfast.keeper.persist import Sealing, commit, copy_from_disk, persist, publish_manifest, seal_on_disk
from holdfast.node_disk.disk_folder import DiskPart
from holdfast.node_memory.slots import Slot
from holdfast.run.complete import check_can_commit
from holdfast.run.history import Run
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

#: Time limit for a store to answer, and to do so at first.
_STORE_TIMEOUT_S: Final = 600.0
_FIRST_ANSWER_S: Final = 30.0


class KeptFiles(Protocol):
    """Data files that this node has in one place, and that storage is to get."""

    @property
    def name(self) -> str:
        """The name of that place, which no other one of the keeper has."""

    def write(self, storage: TimedStore, sealing: Sealing) -> tuple[FileSeal, ...]:
        """Write the files to storage, durably. Returns the checkpoint's seal's entries for those that storage did not
        have yet. Raises `StorageError` when the store fails."""

    def seals(self, sealing: Sealing) -> tuple[FileSeal, ...]:
        """The seal's entries for all of the files, after `write`."""

    def lacks_some(self, seals: Sequence[FileSeal]) -> bool:
        """Whether storage had some of the files already, as `seals` lacks them."""


@dataclass(frozen=True)
class StagedFiles:
    """The data files in a slot. `sealed` is done when the slot is sealed (None: it is sealed)."""

    slot: Slot
    sealed: Future[None] | None = None

    @property
    def name(self) -> str:
        """The name of the slot."""
        return self.slot.name

    def write(self, storage: TimedStore, sealing: Sealing) -> tuple[FileSeal, ...]:
        """As `KeptFiles.write`; waits until the slot is sealed."""
        return persist(storage, sealing, self.slot, await_seal=self._await_seal)

    def seals(self, sealing: Sealing) -> tuple[FileSeal, ...]:
        """As `KeptFiles.seals`; waits until the slot is sealed."""
        self._await_seal()
        return sealing.file_seals(self.slot)

    def lacks_some(self, seals: Sequence[FileSeal]) -> bool:
        """As `KeptFiles.lacks_some`."""
        contents = self.slot.record.contents
        return contents is None or len(seals) < len(contents.files)

    def _await_seal(self) -> None:
        if self.sealed is not None:
            self.sealed.result()


@dataclass(frozen=True)
class DiskFile:
    """Data file `number` of a checkpoint, on the disk of the node."""

    part: DiskPart
    number: int

    @property
    def name(self) -> str:
        """The path of the file."""
        return self.part.path(self.number)

    def write(self, storage: TimedStore, sealing: Sealing) -> tuple[FileSeal, ...]:
        """As `KeptFiles.write`. Raises `CorruptError`, tier ``node disk``, where the file is damaged."""
        seal = copy_from_disk(storage, sealing, self.part, self.number)
        return () if seal is None else (seal,)

    def seals(self, sealing: Sealing) -> tuple[FileSeal, ...]:
        """As `KeptFiles.seals`. Raises as `write`."""
        return (seal_on_disk(sealing, self.part, self.number),)

    def lacks_some(self, seals: Sequence[FileSeal]) -> bool:
        """As `KeptFiles.lacks_some`."""
        return not seals


class Writing:
    """The writing of one generation's files, by the threads of `pool`. Only one thread uses it, and asks `is_over`
    instead of waiting.

    Files join as their slots are staged. When all joined files are written, it tries to commit. While files are
    missing, because other nodes write them or ranks of this node have not staged them yet, `join` or `retry` make it
    try again.
    """

    def __init__(self, sealing: Sealing, pool: ThreadPoolExecutor) -> None:
        self.sealing = sealing
        self._pool = pool
        self._stack = ExitStack()
        storage = TimedStore(open_store(sealing.generation.location), timeout_s=_STORE_TIMEOUT_S)
        self._storage = self._stack.enter_context(storage)
        self._joined: dict[str, KeptFiles] = {}
        #: By slot name, the seal's entries for the slot's files, without those that storage had already.
        self._files: dict[str, Future[tuple[FileSeal, ...]]] = {}
        #: Of a signed checkpoint, the entries for all files of each slot, by slot name: whoever may write to storage
        #: could have made a file that was there already, so its own header must not say what is signed.
        self._signed: dict[str, tuple[FileSeal, ...]] = {}
        self._committed: Future[bool] | None = None
        #: The seal of the committed checkpoint, if it may have a part on a disk of the node.
        self.seal: bytes | None = None
        self._run: Future[Run] = pool.submit(self._open)

    @property
    def names(self) -> Iterable[str]:
        """The names of the joined files."""
        return self._joined

    @property
    def slots(self) -> Iterable[Slot]:
        """The slots of the joined files that lie in memory."""
        return [file.slot for file in self._joined.values() if isinstance(file, StagedFiles)]

    @property
    def pending(self) -> Sequence[Future[Any]]:
        """The futures to wait for before there is more to do."""
        return list(self._files.values()) if self._committed is None else [self._committed]

    def join(self, file: KeptFiles) -> bool:
        """Write this file too. Returns False, and does nothing, where it has joined already or a commit is being
        tried."""
        if file.name in self._joined or (self._committed is not None and not self._committed.done()):
            return False
        self._joined[file.name] = file
        self._files[file.name] = self._pool.submit(self._write, file)
        self._committed = None
        return True

    def retry(self, files: Iterable[KeptFiles]) -> None:
        """Make `is_over` try the commit again: by now other nodes may have written the missing files. Where storage
        already had one of `files`, it may be gone by now: this writes it again if so."""
        self._committed = None
        for file in files:
            written = self._files.get(file.name)
            if (
                written is not None
                and written.done()
                and written.exception() is None
                and file.lacks_some(written.result())
            ):
                self._files[file.name] = self._pool.submit(self._write, file)

    def referenced_nbytes(self, slot: Slot) -> int:
        """The bytes of the data files in `slot`, if they are of this generation, that this left to an earlier
        checkpoint."""
        contents = slot.record.contents
        if contents is None or contents.checkpoint_id != self.sealing.generation.checkpoint_id:
            return 0
        names = {self.sealing.stored.manifest.file_name(each.file) for each in contents.files}
        written = [file.result() for file in self._files.values() if file.done() and file.exception() is None]
        return sum(seal.nbytes for seals in written for seal in seals if seal.is_referenced and seal.name in names)

    def is_over(self) -> bool:
        """Start the commit once all files are written. Returns whether the commit is over too, or a file has failed."""
        if self._committed is None and all(file.done() for file in self._files.values()):
            if any(file.exception() for file in self._files.values()):
                return True
            self._committed = self._pool.submit(self._commit)
        return self._committed is not None and self._committed.done()

    def outcome(self) -> bool:
        """Whether the generation was committed, which happens once all nodes have written their files. Raises the first
        error. Call it only when `is_over`."""
        for file in self._files.values():
            file.result()
        assert self._committed is not None
        return self._committed.result()

    def give_up(self) -> None:
        """Begin no further request, and repeat none."""
        self._storage.limit.give_up()

    def close(self) -> None:
        """Close the store. Call it only when nothing is pending."""
        self._stack.close()

    def _open(self) -> Run:
        # A store that does not answer is reported soon, although its files may take long.
        with TimedStore(open_store(self.sealing.generation.location), timeout_s=_FIRST_ANSWER_S) as storage:
            run = Run.open(storage)  # first, so that nothing is written where the run does not exist (any more)
            if run.run_id != self.sealing.stored.manifest.body.run_id:
                raise _replaced(run)
            generation = self.sealing.generation
            if generation.incarnation:
                run.check_incarnation(generation.place.epoch, generation.incarnation)
            check_can_commit(run, self.sealing.stored)  # it may have lain on a disk for days
        publish_manifest(self._storage, self.sealing)
        return Run(self._storage, run.marker)

    def _commit(self) -> bool:
        # Uses the seals noted at the time of writing: while the checkpoint waits for other files, a slot may be given
        # up and refilled.
        written = [seal for file in self._files.values() for seal in file.result()]
        signed = [seal for seals in self._signed.values() for seal in seals]
        run = self._run.result()
        if commit(run, self.sealing, [*written, *signed]) is None:
            return False
        if self.sealing.generation.disk:
            self.seal = run.storage.read(self.sealing.stored.key(SEAL_NAME))
        return True

    def _write(self, file: KeptFiles) -> tuple[FileSeal, ...]:
        self._run.result()
        stored = file.write(self._storage, self.sealing)
        if self.sealing.stored.is_signed:
            self._signed[file.name] = file.seals(self.sealing)
        return stored


def _replaced(run: Run) -> FencedError:
    return FencedError(
        f"'{run.storage.location}' is not the run that this snapshot was saved into: another run was begun there.",
        code="fenced.run",
        action="No action needed: that run was removed, so holdfast gives the snapshot up.",
        path=run.storage.location.url,
    )
