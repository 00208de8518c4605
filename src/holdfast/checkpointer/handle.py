"""The handle of one save: it shows the save's progress and waits for its end."""

from __future__ import annotations

import time

from holdfast.calls import CALLBACKS, refuse_nested
from holdfast.checkpointer.events import (
    ProtectionDelayed,
    SaveBegun,
    SaveCommitted,
    SaveDelayed,
    SaveEvent,
    SaveFailed,
    SaveHeld,
    SaveMemoryReady,
    SavePlaced,
    SaveProtected,
    SaveReturned,
    SaveSkipped,
    SaveStaged,
    SaveUnprotected,
    SaveUnwatched,
)
from holdfast.checkpointer.save_errors import held_in_memory, last_try, unless_known, unprotected
from holdfast.errors import DeadlineError, FencedError, HoldfastError
from holdfast.format.records import Place
from holdfast.latch import Latch
from holdfast.options import check_timeout


class Stage:
    """One stage of a save, which succeeds or fails at some time. Safe for several threads."""

    def __init__(self, what: str, *, begun_s: float, aim: str = "make a snapshot durable") -> None:
        self._what = what
        self._aim = aim
        self._begun_s = begun_s
        self._over = Latch()
        #: The error with which it failed; None if it has not failed.
        self.error: HoldfastError | None = None
        #: Why the last try failed, if one did; the keeper tries again.
        self.trouble = ""
        #: Seconds from the call of `save` until it was over; and this rank's bytes, once it is done.
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
        """Return when it is done. Raises its error if it failed, and `DeadlineError` after `timeout_s`. With None this
        waits without a limit, for ever if storage stays full, say (`trouble` says why).

        Raises `ConfigurationError`, code ``config.nested``, if it is not over and the calling thread is inside a call
        of the library, which may hold what the save needs in order to go on."""
        if timeout_s is not None:
            check_timeout(timeout_s)
        if not self._over.is_set:
            refuse_nested("the wait for a save", allowed=CALLBACKS)
        self.wait_inside(timeout_s)

    def wait_inside(self, timeout_s: float | None = None) -> None:
        """As `wait`, for a call of the library that the save does not depend on."""
        if not self._over.wait(timeout_s):
            raise DeadlineError(
                f"{self._what} was not finished within {timeout_s} s.",
                code="timeout.save",
                action=unless_known(self.trouble, "Wait longer, or read the log of the keeper."),
                details=last_try(self.trouble, aim=self._aim),
            )
        if self.error is not None:
            raise self.error

    def __repr__(self) -> str:
        state = "not over yet" if not self.is_over else "done" if self.error is None else f"failed: {self.error.code}"
        return f"<Stage {self._what!r}: {state}>"

    def end(self, error: HoldfastError | None = None, *, nbytes: int = 0) -> None:
        """Record that it is done, or has failed with `error`. Only the first call counts."""
        if not self._over.is_set:
            self.error, self.nbytes = error, nbytes
            self.seconds = time.perf_counter() - self._begun_s
            self._over.set()


class Handle:
    """One save. `staged` is done when this rank's part is copied to the memory of its node, where it survives this
    process. `protected` is done when every file of the checkpoint has its copies on other nodes
    (``Memory(protect=...)``), where it survives the loss of nodes; else it has an error that says why it is not.
    `durable` is done when the checkpoint of all ranks is in storage and committed. A save with `memory_only` ends when
    it is `held` in memory; its `durable` then has the error ``config.memory_only``.

    `place` is the checkpoint's place in the run's history. It is None until all ranks have agreed on it, which they
    have when the save is staged, and stays None if the save was `skipped`, because no slot was free.
    `trouble` says why the last try to make it durable failed.
    ``blocked_s`` is the time that the call of `save` took on this rank, and ``memory_wait_s`` the part of it for which
    the memory of the node was not ready, as at a first save that comes soon after the start.
    """

    def __init__(self, step: int, *, memory_only: bool = False) -> None:
        begun_s = time.perf_counter()
        self.step = step
        self.memory_only = memory_only
        self.place: Place | None = None
        self.skipped = self.held = False
        self.blocked_s = self.memory_wait_s = 0.0
        self.staged = Stage(f"the copy of step {step}", begun_s=begun_s)
        self.protected = Stage(f"the protection of step {step}", begun_s=begun_s, aim="protect a snapshot")
        self.durable = Stage(f"the checkpoint of step {step}", begun_s=begun_s)

    @property
    def trouble(self) -> str:
        """Why the last try to make the save durable failed, if one did; the keeper tries again."""
        return self.durable.trouble

    def hear(self, event: SaveEvent) -> None:
        """Record an event of the save. The save's `SaveMachine` calls it as a listener; only the first end counts."""
        match event:
            case SaveMemoryReady():
                self.memory_wait_s = event.waited_s
            case SavePlaced():
                self.place = event.place
            case SaveReturned():
                self.blocked_s = event.blocked_s
            case SaveStaged():
                self.staged.end(nbytes=event.nbytes)
            case SaveProtected() | ProtectionDelayed() | SaveUnprotected():
                self._hear_of_protection(event)
            case SaveBegun(tier="storage"):
                self.protected.end(unprotected(event.step))
            case SaveDelayed():
                self.durable.trouble = event.trouble
            case SaveCommitted():
                self.durable.trouble = ""
                self.durable.end(nbytes=event.nbytes)
            case SaveHeld():
                self.held = True
                self.durable.end(held_in_memory(event.step))
            case SaveSkipped() | SaveUnwatched() | SaveFailed():
                self.skipped = isinstance(event, SaveSkipped)
                self.protected.end(event.error)
                self.durable.end(event.error)  # first, so that a thread that waits for `staged` finds both
                self.staged.end(event.error)

    def _hear_of_protection(self, event: SaveProtected | ProtectionDelayed | SaveUnprotected) -> None:
        if isinstance(event, ProtectionDelayed):
            self.protected.trouble = event.trouble
        else:
            self.protected.end(event.error if isinstance(event, SaveUnprotected) else None)

    def wait_for_end(self, timeout_s: float, *, may_be_fenced: bool = False) -> None:
        """Return when the save has ended: when it is durable or `held`. Raises its error if it failed, and
        `DeadlineError` after `timeout_s`. For calls of the library. `may_be_fenced`: the job takes turns with others,
        so a save that another job's came before is no error; the log has told of it."""
        try:
            self.durable.wait_inside(timeout_s)
        except HoldfastError as error:
            is_expected = self.held or (may_be_fenced and isinstance(error, FencedError))
            if not is_expected or error is not self.durable.error:
                raise

    def __repr__(self) -> str:
        if self.skipped:
            return f"<Handle step {self.step}: skipped>"
        if self.held:
            return f"<Handle step {self.step} at {self.place}: held in memory>"
        told = f"{_told(self.staged, 'staged')}, {_told(self.durable, 'durable')}"
        return f"<Handle step {self.step} at {self.place}: {told}>"


def _told(stage: Stage, word: str) -> str:
    if stage.error is not None:
        return f"not {word}: {stage.error.code}"
    return word if stage.is_over else f"not {word} yet"
