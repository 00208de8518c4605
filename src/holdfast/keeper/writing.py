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
from holdfast.keeper.persist import Sealing, commit, copy_from_disk, persist, publish_manifest
from holdfast.node_disk.disk_folder import DiskPart
from holdfast.node_memory.slots import Slot
from holdfast.run.history import Run
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

#: Time limit for a store to answer, and to do so at first.
_STORE_TIMEOUT_S: Final = 600.0
_FIRST_ANSWER_S: Final = 30.0


class KeptFile(Protocol):
    """A data file that this node has, and that storage is to get."""

    @property
    def name(self) -> str:
        """A name that no other file of the keeper has."""

    def write(self, storage: TimedStore, sealing: Sealing) -> tuple[FileSeal, ...]:
        """Write the file to storage, durably, and return its entry in the checkpoint's seal; None where storage has it
        already. Raises `StorageError` when the store fails."""

    def lacks_some(self, seals: Sequence[FileSeal]) -> bool:
        """Whether storage had some of the bytes already, as `seals` lacks them."""


@dataclass(frozen=True)
class StagedFile:
    """A data file in a slot. `sealed` is done when the slot is sealed (None: it is sealed)."""

    slot: Slot
    sealed: Future[None] | None = None

    @property
    def name(self) -> str:
        """The name of the slot."""
        return self.slot.name

    def write(self, storage: TimedStore, sealing: Sealing) -> tuple[FileSeal, ...]:
        """As `KeptFile.write`; waits until the slot is sealed."""
        await_seal = (lambda: None) if self.sealed is None else self.sealed.result
        return persist(storage, sealing, self.slot, await_seal=await_seal)

    def lacks_some(self, seals: Sequence[FileSeal]) -> bool:
        """As `KeptFile.lacks_some`."""
        return _lacks_some(self.slot, seals)


@dataclass(frozen=True)
class DiskFile:
    """Data file `number` of a checkpoint, on the disk of the node."""

    part: DiskPart
    number: int

    @property
    def name(self) -> str:
        """The path of the file."""
        return self.part.store.path(self.part.key(str(self.number)))

    def write(self, storage: TimedStore, sealing: Sealing) -> tuple[FileSeal, ...]:
        """As `KeptFile.write`. Raises `CorruptError` where the file is damaged."""
        seal = copy_from_disk(storage, sealing, self.part, self.number)
        return () if seal is None else (seal,)

    def lacks_some(self, seals: Sequence[FileSeal]) -> bool:
        """As `KeptFile.lacks_some`."""
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
        self._joined: dict[str, KeptFile] = {}
        #: By slot name, the seal's entries for the slot's files, without those that storage had already.
        self._files: dict[str, Future[tuple[FileSeal, ...]]] = {}
        self._committed: Future[bool] | None = None
        #: The seal of the committed checkpoint, if any of the joined files lies on the disk of the node.
        self.seal: bytes | None = None
        self._run: Future[Run] = pool.submit(self._open)

    @property
    def names(self) -> Iterable[str]:
        """The names of the joined files."""
        return self._joined

    @property
    def slots(self) -> Iterable[Slot]:
        """The slots of the joined files that lie in memory."""
        return [file.slot for file in self._joined.values() if isinstance(file, StagedFile)]

    @property
    def pending(self) -> Sequence[Future[Any]]:
        """The futures to wait for before there is more to do."""
        return list(self._files.values()) if self._committed is None else [self._committed]

    def join(self, file: KeptFile) -> bool:
        """Write this file too. Returns False, and does nothing, where it has joined already or a commit is being
        tried."""
        if file.name in self._joined or (self._committed is not None and not self._committed.done()):
            return False
        self._joined[file.name] = file
        self._files[file.name] = self._pool.submit(self._write, file)
        self._committed = None
        return True

    def retry(self, files: Iterable[KeptFile]) -> None:
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
        """The bytes of the files of `slot` that this left to an earlier checkpoint."""
        file = self._files.get(slot.name)
        seals = () if file is None or not file.done() or file.exception() else file.result()
        return sum(seal.nbytes for seal in seals if seal.is_referenced)

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
        publish_manifest(self._storage, self.sealing)
        return Run(self._storage, run.marker)

    def _commit(self) -> bool:
        # Uses the seals noted at the time of writing: while the checkpoint waits for other files, a slot may be given
        # up and refilled.
        written = [seal for file in self._files.values() for seal in file.result()]
        run = self._run.result()
        if commit(run, self.sealing, written) is None:
            return False
        if any(isinstance(file, DiskFile) for file in self._joined.values()):
            self.seal = run.storage.read(self.sealing.stored.key(SEAL_NAME))
        return True

    def _write(self, file: KeptFile) -> tuple[FileSeal, ...]:
        self._run.result()
        return file.write(self._storage, self.sealing)


def _lacks_some(slot: Slot, seals: Sequence[FileSeal]) -> bool:
    """Whether storage had some file of `slot` already, as `seals` lacks it."""
    contents = slot.record.contents
    return contents is None or len(seals) < len(contents.files)


def _replaced(run: Run) -> FencedError:
    return FencedError(
        f"'{run.storage.location}' is not the run that this snapshot was saved into: another run was begun there.",
        code="fenced.run",
        action="No action needed: that run was removed, so holdfast gives the snapshot up.",
        path=run.storage.location.url,
    )
