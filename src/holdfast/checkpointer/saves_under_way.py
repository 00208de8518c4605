"""The saves of one `Checkpointer` that may be under way."""

from __future__ import annotations

from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.save_log import warn_of_loss
from holdfast.errors import DeadlineError


class SavesUnderWay:
    """The handles of saves that have not ended, as far as their `Checkpointer` knows; and of the last one that has."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []

    def add(self, handle: Handle) -> None:
        """Remember a save."""
        self._handles.append(handle)

    def wait(self, timeout_s: float, *, may_be_fenced: bool) -> None:
        """Wait until each save has ended, for `timeout_s` each, as `Handle.wait_for_end` does."""
        for handle in tuple(self._handles):  # the handler of a signal may save meanwhile
            handle.wait_for_end(timeout_s, may_be_fenced=may_be_fenced)

    def wait_before_the_end(self, left_s: float, *, may_be_fenced: bool) -> None:
        """Wait until all saves are durable, at most `left_s`, when the machine is gone."""
        try:
            self.wait(left_s, may_be_fenced=may_be_fenced)
        except DeadlineError as error:
            warn_of_loss(error)

    def any_goes_on(self) -> bool:
        """Whether a save is under way."""
        return any(not handle.durable.is_over for handle in self._handles)

    def forget_ended(self) -> None:
        """Forget the saves that have become durable or have failed."""
        for handle in [handle for handle in self._handles if handle.durable.is_over]:
            self._handles.remove(handle)
