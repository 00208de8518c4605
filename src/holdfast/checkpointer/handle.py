"""What becomes of one save, to look at and to wait for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from holdfast.errors import DeadlineError, HoldfastError, StorageError
from holdfast.format.records import Place
from holdfast.latch import Latch
from holdfast.phases import LOG


class Stage:
    """One thing that happens to a snapshot: at some time it has, or it has failed. Safe for several threads."""

    def __init__(self, what: str, *, begun_s: float, on_done: Callable[[], None] = lambda: None) -> None:
        self._what = what
        self._on_done = on_done
        self._begun_s = begun_s
        self._over = Latch()
        #: Why it failed; None while it has not.
        self.error: HoldfastError | None = None
        #: Why it is not done yet, where that was tried in vain; it is tried again.
        self.trouble = ""
        #: Seconds from the call of `save` on, and bytes of this rank, once it is done.
        self.seconds: float | None = None
        self.nbytes = 0

    @property
    def is_over(self) -> bool:
        """Whether it is done or has failed."""
        return self._over.is_set

    @property
    def is_done(self) -> bool:
        """Whether it is done."""
        return self._over.is_set and self.error is None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when it is done. Raises why it failed, and `DeadlineError` after `timeout_s`; with None it waits as
        long as that takes, which is for ever while storage is full, say (`trouble` says why)."""
        if not self._over.wait(timeout_s):
            raise DeadlineError(
                f"{self._what} was not done within {timeout_s} s.",
                code="timeout.save",
                action="Wait longer, or look at the log of the keeper.",
                details=last_try(self.trouble),
            )
        if self.error is not None:
            raise self.error

    def end(self, error: HoldfastError | None = None, *, nbytes: int = 0) -> None:
        """Note that it is done, or why it failed. The first note counts."""
        if not self._over.is_set:
            self.error, self.nbytes = error, nbytes
            self.seconds = time.perf_counter() - self._begun_s
            self._over.set()
            if error is None:
                self._on_done()


class Handle:
    """One save. `staged`: this rank's part is copied to the memory of its node, where it survives this process.
    `durable`: the checkpoint, of all ranks, is in storage and committed.

    `place` is its place in the run's history, once all ranks have agreed on it, which they have when it is staged; None
    where it was `skipped`, because slots were not free yet.
    ``blocked_s`` is how long `save` took on this rank.
    """

    def __init__(self, step: int) -> None:
        begun_s = time.perf_counter()
        self.step = step
        self.place: Place | None = None
        self.skipped = False
        self.blocked_s = 0.0
        self.staged = Stage(f"the copy of step {step}", begun_s=begun_s)
        self.durable = Stage(f"the checkpoint of step {step}", begun_s=begun_s, on_done=self._tell)
        #: Whether the log says when it is durable: once per save, on the first rank.
        self.is_told = False

    @property
    def trouble(self) -> str:
        """Why it is not durable yet, where that was tried in vain; it is tried again."""
        return self.durable.trouble

    def skip(self, full: Sequence[int], why: str) -> None:
        """Note that the ranks in `full` had no slot for it, and `why` the last try to free one failed, if one did."""
        self.skipped = True
        names = ", ".join(map(str, full[:8])) + (", ..." if len(full) > 8 else "")
        self.fail(
            StorageError(
                f"step {self.step} was skipped: the snapshots of rank {names} are not durable yet.",
                code="storage.slow",
                action="Save less often, keep more generations, or give when_full='wait'.",
                step=self.step,
                retryable=True,
                details=last_try(why),
            )
        )

    def fail(self, error: HoldfastError) -> None:
        """Note that nothing will come of it."""
        self.durable.end(error)  # first: who hears of the other finds both
        self.staged.end(error)

    def _tell(self) -> None:
        if self.is_told:
            LOG.info(
                "saved step %d at %s: blocked for %.3f s, durable after %.2f s",
                self.step,
                self.place,
                self.blocked_s,
                self.durable.seconds,
            )

    def __repr__(self) -> str:
        if self.skipped:
            return f"<Handle step {self.step}: skipped>"
        told = f"{_told(self.staged, 'staged')}, {_told(self.durable, 'durable')}"
        return f"<Handle step {self.step} at {self.place}: {told}>"


def last_try(trouble: str) -> tuple[str, ...]:
    """The details of an error about something that is not durable yet; `trouble` says why the last try failed."""
    return (f"The last try to make a snapshot durable failed: {trouble}",) if trouble else ()


def _told(stage: Stage, word: str) -> str:
    if stage.error is not None:
        return f"not {word}: {stage.error.code}"
    return word if stage.is_over else f"not {word} yet"
