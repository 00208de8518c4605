"""A way to save and load a state, and a save that may still be under way when its call returns."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.state import Memory, State
from holdfast.checkpointer.handle import Handle


class Pending:
    """A save on this rank after its call. This base class is for a save that ended when its call returned."""

    #: Seconds from the end of the copy until it was durable, where the contender tells them; when it is over.
    persist_s: float | None = None

    def is_copied(self) -> bool:
        """Whether nothing of the state is needed any more."""
        return True

    def is_over(self) -> bool:
        """Whether it is durable, as far as the contender makes it so."""
        return True

    def wait(self) -> None:
        """Return when it is over; raises why it failed."""


class Futures(Pending):
    """A save with a future for its end, and another one for the copy where that goes on in the background."""

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


class Staged(Pending):
    """A save of `holdfast.Checkpointer`."""

    def __init__(self, handle: Handle) -> None:
        self._handle = handle

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
        staged_s, durable_s = self._handle.staged.seconds, self._handle.durable.seconds
        assert staged_s is not None
        assert durable_s is not None
        self.persist_s = durable_s - staged_s


class Way:
    """The operations of a contender on `state`, all collective; each way has `load`, and `save` or `begin`."""

    def __init__(self, state: State) -> None:
        self.state = state
        #: What is saved, and loaded in place.
        self.memory: Memory = state

    def save(self, folder: Path) -> None:
        """Save into `folder`: an empty one, or the one of all its saves. Returns when this rank's part is durable."""
        self.begin(folder).wait()

    def begin(self, folder: Path) -> Pending:
        """Save into `folder`, or begin to; what training waits for is the time of this call."""
        self.save(folder)
        return Pending()

    def load(self, folder: Path) -> None:
        """Load the last save, which went into `folder`, into the same memory."""
        raise NotImplementedError

    def unlocked(self) -> AbstractContextManager[None]:
        """A ``with`` block in which the state may change, entered when it has been copied."""
        return nullcontext()

    def ready(self) -> None:
        """Have again what was given up by `rest`, as if there had been none."""

    def rest(self) -> None:
        """Give up memory that others need, until `ready`."""

    def close(self) -> None:
        """Let go of everything, when all that was begun is over."""
