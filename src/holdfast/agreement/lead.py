"""The number of steps by which a proposal looks ahead."""

from __future__ import annotations

import math
from typing import Final

#: While the time of a step is unknown.
_FIRST_STEPS: Final = 2
#: The share of a new measurement in an average.
_NEW: Final = 0.25
#: The expected time to a verdict, and the time of a step, are multiplied by this.
_MARGIN: Final = 1.5


class Lead:
    """Learns how far ahead all ranks can agree on a step: as many steps as they make in the time of an agreement.

    `latency_s` is the first guess of that time, and never undercut.
    """

    def __init__(self, latency_s: float) -> None:
        self._least_s = self._latency_s = latency_s
        self._step_s: float | None = None

    @property
    def steps(self) -> int:
        """The number of steps by which a proposal should look ahead."""
        if self._step_s is None:
            return _FIRST_STEPS
        # A step that is under way on other ranks can still be promised, so one is enough where steps take long.
        return math.ceil(_MARGIN * self._latency_s / self._step_s)

    def note_step(self, step_s: float) -> None:
        """A step took `step_s`."""
        step_s = max(step_s, 1e-6)
        self._step_s = step_s if self._step_s is None else self._step_s + _NEW * (step_s - self._step_s)

    def note_verdict(self, latency_s: float) -> None:
        """The last agreement took `latency_s`."""
        self._latency_s = max(self._least_s, self._latency_s + _NEW * (latency_s - self._latency_s))

    def note_refusal(self) -> None:
        """The last proposal did not find all ranks in time."""
        self._latency_s *= 2
