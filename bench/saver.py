"""A way to save a live state for which training may not have to wait."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from bench.pending import Pending


class Saver(ABC):
    """One contender of ``bench engine``. All methods are collective; where one does nothing, there is nothing to do."""

    @abstractmethod
    def begin(self, folder: Path) -> Pending:
        """Save into `folder`, or begin to; what training waits for is the time of this call."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Load the last save, which went into `folder`, into the same memory."""

    def unlocked(self) -> AbstractContextManager[None]:
        """A ``with`` block in which the state may change, entered when it has been copied."""
        return nullcontext()

    def ready(self) -> None:  # noqa: B027 - nothing is right for most
        """Have again what was given up by `rest`, as if there had been none."""

    def rest(self) -> None:  # noqa: B027 - nothing is right for most
        """Give up memory that others need, until `ready`."""

    def close(self) -> None:  # noqa: B027 - nothing is right for most
        """Let go of everything, when all that was begun is over."""
