"""The share of a job's time that saves and failures cost.

The model is the classic one of Young and Daly for several tiers whose saves overlap with training. A save of a tier
costs the job some seconds; a failure costs the work since the newest save that survives it, and the time until the job
runs again. Each failure is served by the nearest tier that survives it, so

    waste = sum over tiers of  cost / interval  +  rate * (interval / 2 + latency + restore + detection).

`latency` is there because a save is of no use until it is complete: the work that is lost is between `latency` and
`latency + interval`. Bursts of failures hardly change the result, and it is about 10 % too high at the best intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from holdfast.goodput.failures import Loss


@dataclass(frozen=True)
class TierCost:
    """A tier that saves go to, and what one save costs.

    It survives failures up to `survives`. A save holds training up for `stall_s`, and slows it down by the share
    `slow_down` until it is complete after `latency_s`. A restore takes `restore_s`.
    """

    name: str
    survives: Loss
    stall_s: float
    latency_s: float
    restore_s: float
    slow_down: float = 0.0

    @property
    def cost_s(self) -> float:
        """Seconds of training that one save costs."""
        return self.stall_s + self.slow_down * self.latency_s


@dataclass(frozen=True)
class Failures:
    """The failures of a job: one in `mttf_s` seconds on average, of which each `Loss` has its share in `shares`. It
    takes `detection_s` from a failure to the restore: to notice it, to start the processes, and to meet."""

    mttf_s: float
    shares: tuple[float, float, float]
    detection_s: float

    def rates(self, tiers: Sequence[TierCost]) -> list[float]:
        """The failures per second that each of `tiers` serves: those that it is the first to survive."""
        ends = [tier.survives + 1 for tier in tiers]
        served = (sum(self.shares[begin:end]) for begin, end in pairwise([0, *ends]))
        return [share / self.mttf_s for share in served]


@dataclass(frozen=True)
class Waste:
    """The shares of a job's time that are lost: to saves that hold training up or slow it down, to work that is done
    again, to restores, and to the time until a restore begins."""

    stall: float
    slow_down: float
    redone: float
    restore: float
    detection: float

    @property
    def total(self) -> float:
        """All of them together."""
        return self.stall + self.slow_down + self.redone + self.restore + self.detection


def waste(tiers: Sequence[TierCost], intervals_s: Sequence[float], failures: Failures) -> Waste:
    """The waste of a job that saves to each of `tiers` (nearest first) at its interval; an interval may be infinite."""
    rows = list(zip(tiers, intervals_s, failures.rates(tiers), strict=True))
    redone = [rate * (interval_s / 2 + tier.latency_s) for tier, interval_s, rate in rows if rate]
    return Waste(
        stall=sum(tier.stall_s / interval_s for tier, interval_s, _ in rows),
        slow_down=sum(tier.slow_down * tier.latency_s / interval_s for tier, interval_s, _ in rows),
        redone=sum(redone),
        restore=sum(rate * tier.restore_s for tier, _, rate in rows),
        detection=sum(rate * failures.detection_s for _, _, rate in rows),
    )


def best_intervals(
    tiers: Sequence[TierCost], failures: Failures, *, floors_s: Sequence[float], max_overhead: float = math.inf
) -> list[float]:
    """The interval of each tier (nearest first), in seconds, at which the waste is least; infinite for a tier that
    serves no failure.

    No interval is shorter than that of a nearer tier or than its own floor, and all saves together cost at most the
    share `max_overhead` of the job's time. Without these limits the interval is ``sqrt(2 * cost / rate)``.
    """
    costs = [tier.cost_s for tier in tiers]
    rates = failures.rates(tiers)

    def found(stretch: float) -> list[float]:
        return _rising(costs, rates, floors_s, stretch)

    def is_paid(stretch: float) -> bool:
        return overhead(tiers, found(stretch)) <= max_overhead

    if is_paid(1.0):
        return found(1.0)
    # Within a budget the best intervals are those of saves that cost more: all grow by one factor.
    low, high = 1.0, 2.0
    while not is_paid(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_paid(middle) else (middle, high)
    return found(high)


def overhead(tiers: Sequence[TierCost], intervals_s: Sequence[float]) -> float:
    """The share of the time that saves to `tiers` at these intervals cost."""
    return sum(tier.cost_s / interval_s for tier, interval_s in zip(tiers, intervals_s, strict=True) if tier.cost_s)


def _rising(costs: Sequence[float], rates: Sequence[float], floors_s: Sequence[float], stretch: float) -> list[float]:
    """The best intervals of which none is shorter than the one before it: neighbors that would fall share one."""
    pools: list[_Pool] = []
    for cost, rate, floor_s in zip(costs, rates, floors_s, strict=True):
        pool = _Pool(cost, rate, floor_s, 1)
        while pools and pools[-1].interval_s(stretch) > pool.interval_s(stretch):
            pool = pools.pop().with_next(pool)
        pools.append(pool)
    return [pool.interval_s(stretch) for pool in pools for _ in range(pool.num_tiers)]


@dataclass(frozen=True)
class _Pool:
    """Neighboring tiers that save at one interval."""

    cost: float
    rate: float
    floor_s: float
    num_tiers: int

    def interval_s(self, stretch: float) -> float:
        if not self.rate:
            return math.inf
        return max(stretch * math.sqrt(2 * self.cost / self.rate), self.floor_s)

    def with_next(self, other: _Pool) -> _Pool:
        floor_s = max(self.floor_s, other.floor_s)
        return _Pool(self.cost + other.cost, self.rate + other.rate, floor_s, self.num_tiers + other.num_tiers)


def in_steps(
    tiers: Sequence[TierCost],
    intervals_s: Sequence[float],
    failures: Failures,
    *,
    step_s: float,
    floors_s: Sequence[float],
    max_overhead: float = math.inf,
) -> list[int | None]:
    """The intervals as numbers of steps of `step_s`, each a multiple of the one before it and none shorter than its
    floor, with the least waste of all that lie around `intervals_s` and cost at most `max_overhead`, as these do; None
    for a tier that never saves."""
    rows = zip(tiers, intervals_s, floors_s, strict=True)
    saving = [(tier, interval_s, floor_s) for tier, interval_s, floor_s in rows if math.isfinite(interval_s)]
    choices: list[list[int]] = [[]]
    for _, interval_s, floor_s in saving:
        choices = [
            [*chosen, each]
            for chosen in choices
            for each in _around(interval_s / step_s, floor_s / step_s, unit=chosen[-1] if chosen else 1)
        ]
    kept = [tier for tier, _, _ in saving]

    def seconds(chosen: Sequence[int]) -> list[float]:
        return [each * step_s for each in chosen]

    def wasted(chosen: Sequence[int]) -> float:
        return waste(kept, seconds(chosen), failures).total

    paid = [chosen for chosen in choices if overhead(kept, seconds(chosen)) <= max_overhead * (1 + 1e-9)]
    best: list[int] = min(paid, key=wasted)
    left = iter(best)
    return [next(left) if math.isfinite(interval_s) else None for interval_s in intervals_s]


def _around(steps: float, least: float, *, unit: int) -> set[int]:
    """The multiples of `unit` just below and above `steps`, of which none is below `least`."""
    lowest = max(math.ceil(least / unit - 1e-9), 1)
    return {max(times, lowest) * unit for times in (math.floor(steps / unit), math.ceil(steps / unit))}


def age_s(tier: TierCost, interval_s: float, share: float) -> float:
    """The age of the newest save in a tier that the given share of all failures do not exceed: the work that is lost,
    in seconds. Failures come at any moment of an interval alike."""
    return tier.latency_s + share * interval_s
