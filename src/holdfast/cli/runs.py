"""The head of a run, as commands describe it."""

from __future__ import annotations

import msgspec

from holdfast.errors import CorruptError
from holdfast.run.history import Run


class RunHead(msgspec.Struct, frozen=True):
    """The head of a run.

    `place` and `step` are null where nothing is committed, or where its record cannot be read: then `damage` is the
    code of the error.
    """

    place: str | None = None
    step: int | None = None
    damage: str | None = None

    @staticmethod
    def of(run: Run) -> RunHead:
        """The current head of `run`."""
        try:
            head = run.head()
        except CorruptError as error:
            return RunHead(damage=error.code)
        return RunHead() if head is None else RunHead(str(head.place), head.step)

    def __str__(self) -> str:
        if self.damage is not None:
            return f"unreadable ({self.damage})"
        return "nothing yet" if self.place is None else f"step {self.step} at {self.place}"
