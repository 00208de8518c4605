"""The writing of one generation to storage: its files in parallel, and when all are there, its commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

from holdfast.errors import FencedError
from holdfast.format.records import FileSeal
from holdfast.keeper.persist import Sealing, commit, persist, publish_manifest
from holdfast.node_memory.slots import Slot
from holdfast.run.history import Run
from holdfast.store.timed import TimedStore
from holdfast.store.urls import open_store

#: Time limit for a store to answer, and to do so at first.
_STORE_TIMEOUT_S: Final = 600.0
_FIRST_ANSWER_S: Final = 30.0


class Writing:
    """The writing of one generation's slots, by the threads of `pool`. Only one thread uses it, and asks `is_over`
    instead of waiting.

    Slots join as they are staged. When all joined slots are written, it tries to commit. While files are missing,
    because other nodes write them or ranks of this node have not staged them yet, `join` or `retry` make it try again.
    """

    def __init__(self, sealing: Sealing, pool: ThreadPoolExecutor) -> None:
        self.sealing = sealing
        self._pool = pool
        self._stack = ExitStack()
        storage = TimedStore(open_store(sealing.generation.location), timeout_s=_STORE_TIMEOUT_S)
        self._storage = self._stack.enter_context(storage)
        self._slots: dict[str, Slot] = {}
        #: By slot name, the seal's entries for the slot's files, without those that storage had already.
        self._files: dict[str, Future[tuple[FileSeal, ...]]] = {}
        #: Of a signed checkpoint, the entries for all files of each slot, by slot name: whoever may write to storage
        #: could have made a file that was there already, so its own header must not say what is signed.
        self._signed: dict[str, tuple[FileSeal, ...]] = {}
        self._committed: Future[bool] | None = None
        self._run: Future[Run] = pool.submit(self._open)

    @property
    def names(self) -> Iterable[str]:
        """The names of the joined slots."""
        return self._slots

    @property
    def slots(self) -> Iterable[Slot]:
        """The joined slots."""
        return self._slots.values()

    @property
    def pending(self) -> Sequence[Future[Any]]:
        """The futures to wait for before there is more to do."""
        return list(self._files.values()) if self._committed is None else [self._committed]

    def join(self, slot: Slot, sealed: Future[None] | None) -> bool:
        """Write this slot too. `sealed` is done when the slot is sealed (None: it is sealed). Returns False, and does
        nothing, where the slot has joined already or a commit is being tried."""
        if slot.name in self._slots or (self._committed is not None and not self._committed.done()):
            return False
        self._slots[slot.name] = slot
        self._files[slot.name] = self._pool.submit(self._persist, slot, sealed)
        self._committed = None
        return True

    def retry(self, slots: Mapping[Slot, Future[None] | None]) -> None:
        """Make `is_over` try the commit again: by now other nodes may have written the missing files. Where storage
        already had a file of one of `slots`, that file may be gone by now: this writes it again if so. Each of `slots`
        comes with the future that is done when it is sealed."""
        self._committed = None
        for slot, sealed in slots.items():
            file = self._files.get(slot.name)
            if file is not None and file.done() and file.exception() is None and _lacks_some(slot, file.result()):
                self._files[slot.name] = self._pool.submit(self._persist, slot, sealed)

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
        signed = [seal for seals in self._signed.values() for seal in seals]
        return commit(self._run.result(), self.sealing, [*written, *signed]) is not None

    def _persist(self, slot: Slot, sealed: Future[None] | None) -> tuple[FileSeal, ...]:
        self._run.result()
        await_seal: Callable[[], None] = (lambda: None) if sealed is None else sealed.result
        stored = persist(self._storage, self.sealing, slot, await_seal=await_seal)
        if self.sealing.stored.is_signed:
            await_seal()
            self._signed[slot.name] = self.sealing.file_seals(slot)
        return stored


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
