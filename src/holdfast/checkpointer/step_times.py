"""The times of the steps of a training loop, with and without a save under way."""

from __future__ import annotations

import time
from statistics import median
from typing import Final

from holdfast.checkpointer.events import StepsTimed

#: Most steps that one event is about.
_MOST: Final = 1000
#: On the first rank, an event comes after this share of the time since the first step, in seconds between these limits.
#: If the job is killed, hardly more of its time is unknown, and a day of its events takes some 2 MB.
_SHARE: Final = 0.005
_LEAST_S: Final = 0.1
_MOST_S: Final = 20.0


class StepTimes:
    """Collects the times of steps, each from the end of one call of `Checkpointer.step` to the next call."""

    def __init__(self) -> None:
        #: Whether events come after some time, too. They do on one rank, since one tells how the job goes.
        self.is_reported_often = False
        self._quiet: list[float] = []
        self._saving: list[float] = []
        self._begun_s: float | None = None
        self._is_saving = False
        self._step = 0
        #: The end of the last step, of the last one that an event told of, and of the first one.
        self._ended_s = self._told_s = 0.0
        self._first_s: float | None = None

    @property
    def is_full(self) -> bool:
        """Whether it is time for an event about the steps so far."""
        if self.is_reported_often and self._first_s is not None:
            patience_s = min(max(_SHARE * (self._ended_s - self._first_s), _LEAST_S), _MOST_S)
            if self._ended_s - self._told_s >= patience_s:
                return True
        return len(self._quiet) + len(self._saving) >= _MOST

    def begin(self, *, is_saving: bool) -> None:
        """A step begins; `is_saving`: a save is under way. (It may end within the step, but none begins there.)"""
        self._is_saving = is_saving
        self._begun_s = time.perf_counter()

    def forget_begin(self) -> None:
        """Another step begins, nobody knows when."""
        self._begun_s = None

    def end(self, step: int) -> bool:
        """`step` has ended. Returns whether it is known when it began."""
        self._ended_s = time.perf_counter()
        if self._first_s is None:
            self._first_s = self._told_s = self._ended_s
        if self._begun_s is None:
            return False
        (self._saving if self._is_saving else self._quiet).append(self._ended_s - self._begun_s)
        self._step = step
        return True

    def take(self) -> StepsTimed | None:
        """An event about the steps since the last one; None if there were none."""
        quiet, saving = self._quiet, self._saving
        if not quiet and not saving:
            return None
        self._quiet, self._saving = [], []
        self._told_s = self._ended_s
        return StepsTimed(self._step, len(quiet), _median(quiet), len(saving), _median(saving), sum(quiet), sum(saving))


def _median(seconds: list[float]) -> float:
    return median(seconds) if seconds else 0.0
