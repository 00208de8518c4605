"""The times of the steps of a training loop, with and without a save under way."""

from __future__ import annotations

import time
from statistics import median
from typing import Final

from holdfast.checkpointer.events import StepsTimed

#: Most steps that one event is about.
_MOST: Final = 1000


class StepTimes:
    """Collects the times of steps, each from the end of one call of `Checkpointer.step` to the next call."""

    def __init__(self) -> None:
        self._quiet: list[float] = []
        self._saving: list[float] = []
        self._begun_s: float | None = None
        self._is_saving = False
        self._step = 0

    @property
    def is_full(self) -> bool:
        """Whether it is time for an event about the steps so far."""
        return len(self._quiet) + len(self._saving) >= _MOST

    def begin(self, *, is_saving: bool) -> None:
        """A step begins; `is_saving`: a save is under way. (It may end within the step, but none begins there.)"""
        self._is_saving = is_saving
        self._begun_s = time.perf_counter()

    def end(self, step: int) -> None:
        """`step` has ended."""
        if self._begun_s is not None:
            (self._saving if self._is_saving else self._quiet).append(time.perf_counter() - self._begun_s)
            self._step = step

    def take(self) -> StepsTimed | None:
        """An event about the steps since the last one; None if there were none."""
        quiet, saving = self._quiet, self._saving
        if not quiet and not saving:
            return None
        self._quiet, self._saving = [], []
        return StepsTimed(self._step, len(quiet), _median(quiet), len(saving), _median(saving))


def _median(seconds: list[float]) -> float:
    return median(seconds) if seconds else 0.0
