"""The saves of one `Checkpointer` that may be under way."""

from __future__ import annotations

from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.memory_tier import MemoryTier
from holdfast.checkpointer.save_errors import kept_on_node
from holdfast.checkpointer.save_log import warn_of_loss, warn_of_undurable
from holdfast.errors import DeadlineError


class SavesUnderWay:
    """The handles of saves that have not ended, as far as their `Checkpointer` knows; and of the last one that has."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []
        self._tier: MemoryTier | None = None

    def add(self, handle: Handle, tier: MemoryTier | None) -> None:
        """Remember a save. `tier` is the memory tier of the `Checkpointer`, if it has one."""
        self._handles.append(handle)
        self._tier = tier

    def wait(self, timeout_s: float, *, may_be_fenced: bool) -> None:
        """Wait until each save has ended, for `timeout_s` each, as `Handle.wait_for_end` does. The error of one that
        has not says which saves are safe on this node."""
        for handle in tuple(self._handles):  # the handler of a signal may save meanwhile
            try:
                handle.wait_for_end(timeout_s, may_be_fenced=may_be_fenced)
            except DeadlineError as error:
                if error is not handle.durable.error:
                    error.details += self._kept_on_node()
                raise

    def wait_before_the_end(self, left_s: float, *, may_be_fenced: bool) -> None:
        """Wait until all saves are durable, at most `left_s`, when the machine is gone."""
        try:
            self.wait(left_s, may_be_fenced=may_be_fenced)
        except DeadlineError as error:
            warn_of_loss(error)

    def give_up(self) -> None:
        """Warn of the saves that are not durable, because an exception has ended training, and nobody waits for
        them."""
        self.forget_ended()
        kept = self._kept_on_node()
        if kept:
            warn_of_undurable(kept)

    def any_goes_on(self) -> bool:
        """Whether a save is under way."""
        return any(not handle.durable.is_over for handle in self._handles)

    def forget_ended(self) -> None:
        """Forget the saves that have become durable or have failed."""
        for handle in [handle for handle in self._handles if handle.durable.is_over]:
            self._handles.remove(handle)

    def _kept_on_node(self) -> tuple[str, ...]:
        """Says of the saves that are staged, and not durable, where they are safe."""
        owed = [each.step for each in self._handles if each.staged.is_done and not each.durable.is_over]
        return kept_on_node(owed, on_disk=set() if self._tier is None else self._tier.stager.steps_on_disk())
