"""The pace of the policy `Auto`: how often to save, from what saves cost and how often the job fails. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from holdfast.goodput.failures import Loss
from holdfast.goodput.waste import Failures, TierCost, best_intervals, overhead, waste

#: The first save follows after so many steps, which tell how long a step takes, or after so long.
PROFILED_STEPS: Final = 16
PROFILED_S: Final = 300.0
#: A new interval has to save this share of the present waste.
LEAST_GAIN: Final = 0.05
#: So many of the newest steps and saves count.
_NUM_STEPS: Final = 256
_NUM_SAVES: Final = 15
#: So many saves tell whether the first step after one is slow because of it.
_LEAST_FIRSTS: Final = 3
#: For values of a normal distribution: the standard error of their median times the root of their number, and their
#: standard deviation, in standard deviations and in median absolute deviations.
_ERROR_OF_MEDIAN: Final = 1.2533
_DEVIATION: Final = 1.4826


class SaveCost(NamedTuple):
    """The cost of one save: seconds that it holds training up, seconds that it takes from later steps, and the time
    until it is complete."""

    blocked_s: float
    slowed_s: float
    latency_s: float


class _Sample(NamedTuple):
    """The measurements of one save. The first step after its begin took `first_s` longer than usual, and the median of
    the `num_rest` others `rest_s`."""

    blocked_s: float
    first_s: float
    rest_s: float
    num_rest: int
    latency_s: float


class SaveMeter:
    """Measures what saves cost a loop. It is told of each step and each save, and has no clock."""

    def __init__(self) -> None:
        #: The seconds of steps without a save, and of those since the save began that is on its way.
        self._usual_s = deque[float](maxlen=_NUM_STEPS)
        self._slowed_s: list[float] = []
        self._samples = deque[_Sample](maxlen=_NUM_SAVES)

    @property
    def is_profiled(self) -> bool:
        """Whether enough steps without a save were seen."""
        return len(self._usual_s) >= PROFILED_STEPS

    @property
    def is_settled(self) -> bool:
        """Whether so many saves were measured that another one hardly changes their cost."""
        return len(self._samples) == _NUM_SAVES

    @property
    def step_s(self) -> float:
        """The seconds of a step without a save; 0 if none was seen."""
        return median(self._usual_s or [0.0])

    def note_step(self, step_s: float, *, is_saving: bool) -> None:
        """A step took `step_s`, not counting the call of a save. `is_saving`: a save was on its way in it."""
        (self._slowed_s if is_saving else self._usual_s).append(step_s)

    def note_end(self) -> None:
        """The save on its way ended without a checkpoint, and tells nothing."""
        self._slowed_s.clear()

    def note_save(self, *, blocked_s: float, latency_s: float) -> None:
        """The save on its way is complete: it held training up for `blocked_s`, and took `latency_s`."""
        usual_s = self.step_s
        # The first step waits for the rest of the copy. Of the others the median counts: an evaluation among them is
        # not the save's fault.
        first_s, *rest = self._slowed_s if self._slowed_s and self._usual_s else [usual_s]
        rest_s = median(rest or [usual_s])
        self._samples.append(_Sample(blocked_s, first_s - usual_s, rest_s - usual_s, len(rest), latency_s))
        self._slowed_s.clear()

    @property
    def cost(self) -> SaveCost:
        """The cost of a save, from the newest ones. Steps that may be slower by chance alone count as not slower."""
        blocked_s, first_s, rest_s, num_rest, latency_s = map(median, zip(*self._samples, strict=True))
        error_s = _ERROR_OF_MEDIAN * _deviation(self._usual_s)
        counts = [1 / max(sum(sample.num_rest for sample in self._samples), 1), 1 / max(len(self._usual_s), 1)]
        # Whether the first step after a save was slow for its own reasons, such as an evaluation, only others can tell.
        is_known = len(self._samples) >= _LEAST_FIRSTS
        of_first_s = max(first_s - error_s / math.sqrt(len(self._samples)), 0.0) if is_known else 0.0
        of_rest_s = max(rest_s - error_s * math.sqrt(sum(counts)), 0.0)
        return SaveCost(blocked_s, of_first_s + num_rest * of_rest_s, latency_s)


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation of most `values`, whatever a few outliers are."""
    middle = median(values or [0.0])
    return _DEVIATION * median([abs(value - middle) for value in values] or [0.0])


class Choice(NamedTuple):
    """A choice of the interval between saves, with what it was made from. `wasted` is the share of time that is lost
    with it."""

    interval_s: float
    cost: SaveCost
    mttf_s: float
    wasted: float


class Pace:
    """Chooses the interval between saves that wastes the least time, while all saves together cost at most the share
    `max_overhead` of it."""

    def __init__(self, *, max_overhead: float) -> None:
        #: The present choice; None before the first one.
        self.choice: Choice | None = None
        self._max_overhead = max_overhead

    def choose(self, cost: SaveCost, *, step_s: float, mttf_s: float, is_settled: bool) -> bool:
        """Choose for saves of `cost`, steps of `step_s`, and a job that fails once in `mttf_s` seconds on average. A
        gain of less than 5 % changes nothing, once the cost `is_settled`. Returns whether it is a gain of 5 %."""
        # One kind of save survives every failure. The times of a restore and of detection depend on no interval.
        tier = TierCost("saves", Loss.JOB, cost.blocked_s + cost.slowed_s, cost.latency_s, restore_s=0.0)
        failures = Failures(mttf_s, (0.0, 0.0, 1.0), detection_s=0.0)
        floor_s = max(step_s, cost.latency_s, 1e-3)
        (best_s,) = best_intervals([tier], failures, floors_s=[floor_s], max_overhead=self._max_overhead)
        best = Choice(best_s, cost, mttf_s, waste([tier], [best_s], failures).total)
        is_gain = self.choice is None or self._gains(best, tier, failures, self.choice.interval_s, floor_s=floor_s)
        if is_gain or not is_settled:
            self.choice = best
        return is_gain

    def _gains(self, best: Choice, tier: TierCost, failures: Failures, now_s: float, *, floor_s: float) -> bool:
        """Whether the `best` choice wastes 5 % less than the present interval, which may break a limit by 5 %."""
        margin = 1 + LEAST_GAIN
        is_allowed = now_s * margin >= floor_s and overhead([tier], [now_s]) <= self._max_overhead * margin
        return not is_allowed or best.wasted < (1 - LEAST_GAIN) * waste([tier], [now_s], failures).total
