"""The saves of a `Checkpointer` that have not ended."""

from __future__ import annotations

from holdfast.checkpointer.handle import Handle


class OpenSaves:
    """The saves whose ends a `Checkpointer` may have to wait for."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []

    def add(self, handle: Handle) -> None:
        """Add a save that was begun."""
        self._handles.append(handle)

    def wait(self, timeout_s: float, *, may_be_fenced: bool) -> None:
        """Return when all saves are durable, or stay in memory. Raises the error of one that failed."""
        for handle in tuple(self._handles):  # the handler of a signal may save meanwhile
            handle.wait_for_end(timeout_s, may_be_fenced=may_be_fenced)

    def are_under_way(self) -> bool:
        """Whether any save has not ended yet."""
        return any(not handle.durable.is_over for handle in self._handles)

    def forget_ended(self) -> None:
        """Forget the saves that have become durable or have failed."""
        for handle in [handle for handle in self._handles if handle.durable.is_over]:
            self._handles.remove(handle)
