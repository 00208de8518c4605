"""The pace of the policy `Auto`: how often to save, from what saves cost and how often the job fails. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from holdfast.goodput.failures import LLAMA3_SHARES, Loss
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
    """Measures the cost of saves for a loop, from the times of its steps and saves. It has no clock."""

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
    def has_measured(self) -> bool:
        """Whether a save was measured."""
        return bool(self._samples)

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
    with it. Between two saves follow saves to memory alone, every `memory_interval_s` (infinite: none), which cost
    `memory_cost` (None: unknown)."""

    interval_s: float
    cost: SaveCost
    mttf_s: float
    wasted: float
    memory_interval_s: float = math.inf
    memory_cost: SaveCost | None = None


class _Tiers(NamedTuple):
    """The tiers that saves go to, and the shortest interval of each; and how often each is needed."""

    costs: list[TierCost]
    floors_s: list[float]
    failures: Failures

    @staticmethod
    def of(cost: SaveCost, memory_cost: SaveCost | None, *, step_s: float, mttf_s: float) -> _Tiers:
        """Storage, whose saves cost `cost`; and before it memory, if there are saves to memory alone. Saves to memory
        alone survive the failures that end processes only. The times of a restore and of detection depend on no
        interval."""
        costs = [TierCost("saves", Loss.JOB, cost.blocked_s + cost.slowed_s, cost.latency_s, restore_s=0.0)]
        shares = (0.0, 0.0, 1.0)
        if memory_cost is not None:
            memory_s = memory_cost.blocked_s + memory_cost.slowed_s
            costs.insert(0, TierCost("memory", Loss.PROCESS, memory_s, memory_cost.latency_s, restore_s=0.0))
            shares = LLAMA3_SHARES
        floors_s = [max(step_s, tier.latency_s, 1e-3) for tier in costs]
        return _Tiers(costs, floors_s, Failures(mttf_s, shares, detection_s=0.0))

    def wasted(self, intervals_s: Sequence[float]) -> float:
        """The share of time that is lost at these intervals."""
        return waste(self.costs, intervals_s, self.failures).total

    def are_allowed(self, intervals_s: Sequence[float], *, max_overhead: float) -> bool:
        """Whether intervals break no limit by more than 5 %."""
        margin = 1 + LEAST_GAIN
        are_long = all(each * margin >= floor_s for each, floor_s in zip(intervals_s, self.floors_s, strict=True))
        return are_long and overhead(self.costs, intervals_s) <= max_overhead * margin


class Pace:
    """Chooses the interval between saves that wastes the least time, while all saves together cost at most the share
    `max_overhead` of it; and where saves to memory alone pay, the interval between those too."""

    def __init__(self, *, max_overhead: float) -> None:
        #: The present choice; None before the first one.
        self.choice: Choice | None = None
        self._max_overhead = max_overhead

    def choose(
        self,
        cost: SaveCost,
        *,
        memory_cost: SaveCost | None = None,
        step_s: float,
        mttf_s: float,
        is_settled: bool,
    ) -> bool:
        """Choose for saves of `cost`, saves to memory alone of `memory_cost` (None: it is unknown, or there are none),
        steps of `step_s`, and a job that fails once in `mttf_s` seconds on average. A gain of less than 5 % changes
        nothing, once the costs are `is_settled`. Returns whether it is a gain of 5 %."""

        def tiers(with_memory: SaveCost | None) -> _Tiers:
            return _Tiers.of(cost, with_memory, step_s=step_s, mttf_s=mttf_s)

        def best(with_memory: SaveCost | None) -> Choice:
            costs, floors_s, failures = found = tiers(with_memory)
            found_s = best_intervals(costs, failures, floors_s=floors_s, max_overhead=self._max_overhead)
            memory_s = math.inf if with_memory is None else found_s[0]
            return Choice(found_s[-1], cost, mttf_s, found.wasted(found_s), memory_s, memory_cost)

        choices = [best(None), *([] if memory_cost is None else [best(memory_cost)])]
        new, old = min(choices, key=lambda choice: choice.wasted), self.choice
        uses_memory = old is not None and math.isfinite(old.memory_interval_s)
        is_gain = old is None or self._gains(new, old, tiers(memory_cost if uses_memory else None))
        if is_gain or not is_settled:
            self.choice = new
        return is_gain

    def _gains(self, new: Choice, old: Choice, tiers: _Tiers) -> bool:
        """Whether the `new` choice wastes 5 % less than the `old` one, whose intervals are those of `tiers`, does
        now."""
        intervals_s = [old.memory_interval_s, old.interval_s][-len(tiers.costs) :]
        is_allowed = tiers.are_allowed(intervals_s, max_overhead=self._max_overhead)
        return not is_allowed or new.wasted < (1 - LEAST_GAIN) * tiers.wasted(intervals_s)
