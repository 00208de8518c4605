"""A simulation of a job that saves to several tiers and fails: the model's formulas are tested against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

from holdfast.goodput.failures import DAY_S
from holdfast.goodput.waste import Failures, TierCost


def poisson(random: Random, mttf_s: float) -> float:
    """A time to the next failure, whenever the last one was."""
    return random.expovariate(1 / mttf_s)


def bursty(random: Random, mttf_s: float) -> float:
    """A time to the next failure of a Weibull process of shape 0.73, as in InfiniteHBD's trace: failures come in
    bursts."""
    return random.weibullvariate(mttf_s / math.gamma(1 + 1 / 0.73), 0.73)


def simulated_waste(
    tiers: Sequence[TierCost],
    intervals_s: Sequence[float],
    failures: Failures,
    *,
    seed: int,
    days: float = 120.0,
    gap: Callable[[Random, float], float] = poisson,
) -> float:
    """The share of the time that such a job loses, event by event."""
    random = Random(seed)
    end_s, now_s, work_s = days * DAY_S, 0.0, 0.0
    while now_s < end_s:
        failure_s = now_s + gap(random, failures.mttf_s)
        loss = random.choices(range(3), failures.shares)[0]
        serving = next(number for number, tier in enumerate(tiers) if tier.survives >= loss)
        done_s, saved_s = _trained(tiers, intervals_s, failure_s - now_s, serving)
        work_s += saved_s
        assert saved_s <= done_s
        now_s = failure_s + failures.detection_s + tiers[serving].restore_s
    return 1 - work_s / now_s


def _trained(
    tiers: Sequence[TierCost], intervals_s: Sequence[float], available_s: float, serving: int
) -> tuple[float, float]:
    """The seconds of work that a job does in the time to its failure, and those of the newest save of the tier
    `serving` that is complete by then. Intervals are seconds of the clock, and begin anew after a restore."""
    due = [*intervals_s]
    now_s = done_s = saved_s = 0.0
    begun: list[tuple[float, float]] = []  # for each save of the serving tier: the time of its completion, and its work
    while (next_s := min(due)) < available_s:
        done_s += max(next_s - now_s, 0.0)
        now_s = max(now_s, next_s)
        for number, tier in enumerate(tiers):
            if due[number] <= next_s:
                due[number] = next_s + intervals_s[number]
                now_s += tier.cost_s
                if number == serving:
                    begun.append((next_s + tier.latency_s, done_s))
    done_s += max(available_s - now_s, 0.0)
    saved_s = max((work for complete_s, work in begun if complete_s <= available_s), default=0.0)
    return done_s, saved_s
