"""A save that may still be under way when its call returns."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from bench.errors import BenchError
from holdfast.checkpointer.handle import Handle


class Pending(Protocol):
    """What becomes of a save on this rank."""

    @property
    def persist_s(self) -> float | None:
        """Seconds from the end of the copy until it was durable, where the contender tells them; when it is over."""

    def is_copied(self) -> bool:
        """Whether nothing of the state is needed any more."""

    def is_over(self) -> bool:
        """Whether it is durable, as far as the contender makes it so."""

    def wait(self) -> None:
        """Return when it is over; raises why it failed."""


class Over:
    """A save that was over when its call returned."""

    persist_s: float | None = None

    def is_copied(self) -> bool:
        """It is."""
        return True

    def is_over(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """Return at once."""


class Futures:
    """A save with a future for its end, and another one for the copy where that goes on in the background."""

    persist_s: float | None = None

    def __init__(self, ended: Future[Any], copied: Future[Any] | None = None) -> None:
        self._ended = ended
        self._copied = copied

    def is_copied(self) -> bool:
        """Whether the copy is done."""
        return self._copied is None or self._copied.done()

    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._ended.done()

    def wait(self) -> None:
        """Return when it has ended."""
        self._ended.result()

    def wait_copied(self) -> None:
        """Return when the copy is done."""
        if self._copied is not None:
            self._copied.result()


class Staged:
    """A save of `holdfast.Checkpointer`."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

    @property
    def persist_s(self) -> float | None:
        """Seconds from staged to durable on this rank."""
        staged_s, durable_s = self._handle.staged.seconds, self._handle.durable.seconds
        assert staged_s is not None
        assert durable_s is not None
        return durable_s - staged_s

    def is_copied(self) -> bool:
        """Whether it is staged."""
        return self._handle.staged.is_over

    def is_over(self) -> bool:
        """Whether it is durable, or failed."""
        return self._handle.durable.is_over

    def wait(self) -> None:
        """Return when it is durable: of all ranks, committed. BenchError where it went to storage at once, for want of
        memory: then it is not what is measured."""
        self._handle.durable.wait()
        if self._handle.place is None:
            raise BenchError("holdfast did not save into memory: there is too little of it.")
