"""The part of a policy that the number of a step decides, on every rank alike."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.policy.when import EverySteps, SavePolicy


class StepSchedule:
    """The steps that a save follows whatever happens: those of `EverySteps`, and the `last` of the loop."""

    def __init__(self, policies: Iterable[SavePolicy]) -> None:
        self._every = tuple(each for each in policies if isinstance(each, EverySteps))
        #: The last step of the loop; None while it is unknown.
        self.last: int | None = None

    def reason(self, step: int) -> str | None:
        """The reason for a save after `step`; None if there is none."""
        for each in self._every:
            if each.is_due(step):
                return f"every {each.num_steps:,} steps" if each.num_steps > 1 else "every step"
        return "the last step" if step == self.last else None

    def next_after(self, step: int) -> int | None:
        """The first step after `step` that a save follows; None if there is none."""
        due = [(step // each.num_steps + 1) * each.num_steps for each in self._every]
        if self.last is not None and self.last > step:
            due.append(self.last)
        return min(due, default=None)
