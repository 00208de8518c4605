"""The part of a policy that the number of a step decides, on every rank alike."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.policy.when import EverySteps, SavePolicy
from holdfast.policy.wish import Wish, stronger


class StepSchedule:
    """The steps that a save follows whatever happens: those of `EverySteps`, and the `last` of the loop."""

    def __init__(self, policies: Iterable[SavePolicy]) -> None:
        self._every = tuple(each for each in policies if isinstance(each, EverySteps))
        #: The last step of the loop; None while it is unknown.
        self.last: int | None = None

    def wish(self, step: int) -> Wish | None:
        """The wish for a save after `step`; None if there is none."""
        found = Wish("the last step") if step == self.last else None
        for each in self._every:
            if each.is_due(step):
                reason = f"every {each.num_steps:,} steps" if each.num_steps > 1 else "every step"
                found = stronger(Wish(reason, each.memory_only), found)
        return found

    def next_after(self, step: int, *, memory_only: bool) -> int | None:
        """The first step after `step` that a save follows which grants a wish, one for a save to memory alone if it has
        `memory_only`; None if there is none."""
        granting = [each for each in self._every if memory_only or not each.memory_only]
        due = [(step // each.num_steps + 1) * each.num_steps for each in granting]
        if self.last is not None and self.last > step:
            due.append(self.last)
        return min(due, default=None)
