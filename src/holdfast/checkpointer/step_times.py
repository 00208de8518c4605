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
        self._step = 0

    @property
    def is_full(self) -> bool:
        """Whether it is time for an event about the steps so far."""
        return len(self._quiet) + len(self._saving) >= _MOST

    def begin(self) -> None:
        """A step begins."""
        self._begun_s = time.perf_counter()

    def end(self, step: int, *, is_saving: bool) -> None:
        """`step` has ended; `is_saving`: a save was under way."""
        if self._begun_s is not None:
            (self._saving if is_saving else self._quiet).append(time.perf_counter() - self._begun_s)
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
