"""One generation on its way to storage: its files side by side, and when all are there, its commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

from holdfast.errors import FencedError
from holdfast.format.records import FileSeal
from holdfast.keeper.persist import Sealing, commit, file_seal, persist, publish_manifest
from holdfast.node_memory.slots import Slot
from holdfast.run.history import Run
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

#: How long a store may take to answer.
_STORE_TIMEOUT_S: Final = 600.0


class Writing:
    """Makes slots of one generation durable, by the threads of `pool`. Used by one thread, which need not wait.

    Slots join as they are staged. When all that have joined are written, a commit is tried; while files are missing,
    which other nodes write, or ranks of this one have not staged yet, that is tried again, by `join` or `retry`.
    """

    def __init__(self, sealing: Sealing, pool: ThreadPoolExecutor) -> None:
        self.sealing = sealing
        self._pool = pool
        self._stack = ExitStack()
        storage = TimedStore(open_store(sealing.generation.location), timeout_s=_STORE_TIMEOUT_S)
        self._storage = self._stack.enter_context(storage)
        self._slots: dict[str, Slot] = {}
        #: Of each slot, what is sealed of its file, if that was written here.
        self._files: dict[str, Future[FileSeal | None]] = {}
        self._committed: Future[bool] | None = None
        self._run: Future[Run] = pool.submit(self._open)

    @property
    def names(self) -> Iterable[str]:
        """Names of the slots."""
        return self._slots

    @property
    def slots(self) -> Iterable[Slot]:
        """What is being made durable."""
        return self._slots.values()

    @property
    def pending(self) -> Sequence[Future[Any]]:
        """What is to be waited for before there is more to do."""
        return list(self._files.values()) if self._committed is None else [self._committed]

    def join(self, slot: Slot, sealed: Future[None] | None) -> bool:
        """Write this slot too; `sealed` is about to be (None: it is). False, and nothing done, where that has begun, or
        a commit is being tried."""
        if slot.name in self._slots or (self._committed is not None and not self._committed.done()):
            return False
        self._slots[slot.name] = slot
        self._files[slot.name] = self._pool.submit(self._persist, slot, sealed)
        self._committed = None
        return True

    def retry(self, slots: Mapping[Slot, Future[None] | None]) -> None:
        """Try the commit again: by now others may have written the files that were missing. The files of `slots`, each
        with when it is sealed, that were in storage already may have gone since: those are looked at again."""
        self._committed = None
        for slot, sealed in slots.items():
            file = self._files.get(slot.name)
            if file is not None and file.done() and file.exception() is None and file.result() is None:
                self._files[slot.name] = self._pool.submit(self._persist, slot, sealed)

    def is_over(self) -> bool:
        """Begin with the commit when all files are written. Whether that is over too, or something has failed."""
        if self._committed is None and all(file.done() for file in self._files.values()):
            if any(file.exception() for file in self._files.values()):
                return True
            self._committed = self._pool.submit(self._commit)
        return self._committed is not None and self._committed.done()

    def outcome(self) -> bool:
        """Whether it was committed: it is when all nodes have written their files. Raises the first error. Call when
        it is over."""
        for file in self._files.values():
            file.result()
        assert self._committed is not None
        return self._committed.result()

    def close(self) -> None:
        """Let go of the store; nothing is pending any more."""
        self._stack.close()

    def _open(self) -> Run:
        run = Run.open(self._storage)  # first: nothing is written where it is not, or not any more
        if run.run_id != self.sealing.stored.manifest.body.run_id:
            raise _replaced(run)
        generation = self.sealing.generation
        if generation.incarnation:
            run.check_incarnation(generation.place.epoch, generation.incarnation)
        publish_manifest(self._storage, self.sealing)
        return run

    def _commit(self) -> bool:
        # Noted when they were written: while the checkpoint waits for other files, a slot may be given up and refilled.
        written = [seal for file in self._files.values() if (seal := file.result()) is not None]
        return commit(self._run.result(), self.sealing, written) is not None

    def _persist(self, slot: Slot, sealed: Future[None] | None) -> FileSeal | None:
        self._run.result()
        await_seal = (lambda: None) if sealed is None else sealed.result
        return file_seal(slot) if persist(self._storage, self.sealing, slot, await_seal=await_seal) else None


def _replaced(run: Run) -> FencedError:
    return FencedError(
        f"'{run.storage.location}' is not the run that this snapshot was saved into: somebody began another one there.",
        code="fenced.run",
        action="No action needed: that run was removed, and this snapshot with it.",
        path=run.storage.location.url,
    )
