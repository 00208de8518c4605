"""Advice on how often to save to each tier, with its reasons, its price, and what each change would buy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from holdfast.goodput.failures import DAY_S, Loss
from holdfast.goodput.waste import Failures, TierCost, Waste, age_s, best_intervals, in_steps, waste

#: The copies of a node's memory on other nodes that a change may add: seconds of GEMINI's kind of transfer.
PEERS = TierCost("peers", Loss.NODE, stall_s=0.3, latency_s=5.0, restore_s=60.0)
#: The seconds of a fast detection of failures, with the start of new processes.
FAST_DETECTION_S = 10.0
#: The share of overhead in CheckFreq's rule.
_CHECKFREQ_OVERHEAD = 0.035
_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class TierAdvice:
    """The advice for one tier: save every `interval_s` seconds (None: never), which are `steps` steps if the time of a
    step is known. `reason` says which limit sets it.

    `rate` is the number of failures per day that the tier serves. Half of these lose at most `half_age_s` seconds of
    work, and 99 % at most `most_age_s`. `nbytes_per_day` is what its saves write, if the size of a save is known.
    """

    name: str
    interval_s: float | None
    steps: int | None
    reason: str
    rate: float
    half_age_s: float | None
    most_age_s: float | None
    nbytes_per_day: int | None


@dataclass(frozen=True)
class Alternative:
    """Another choice, and the waste of the job with it."""

    what: str
    waste: float


@dataclass(frozen=True)
class Advice:
    """The advice for a job: the tiers, nearest first, and the waste at these intervals.

    `around` has the waste at the advised intervals times a factor each. `changes` are changes of the system, each with
    its best intervals; `rules` are other ways to choose intervals on this system. `cost_per_day` is the price of the
    waste, if that of the job is known.
    """

    mttf_s: float
    tiers: tuple[TierAdvice, ...]
    waste: Waste
    around: tuple[tuple[float, float], ...]
    changes: tuple[Alternative, ...]
    rules: tuple[Alternative, ...]
    cost_per_day: float | None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of intervals: the seconds of a step (None: unknown), the share of the time that all saves together
    may cost, and how many saves to a tier may be on their way at once."""

    step_s: float | None = None
    max_overhead: float = math.inf
    in_flight: int = 1

    def floors_s(self, tiers: Sequence[TierCost]) -> list[float]:
        """The shortest interval of each tier: a step, and the time that a save takes to complete."""
        return [max(self.shortest_s, tier.latency_s / self.in_flight) for tier in tiers]

    @property
    def shortest_s(self) -> float:
        """The shortest interval of any tier: a step; a second where the time of a step is unknown."""
        return 1.0 if self.step_s is None else self.step_s


def advise(
    tiers: Sequence[TierCost],
    failures: Failures,
    limits: Limits,
    *,
    nbytes: int | None = None,
    cost_per_hour: float | None = None,
) -> Advice:
    """Advise on the intervals of `tiers`, nearest first, of which the last survives every failure.

    `nbytes` is the size of a save of the job, `cost_per_hour` the price of the job.
    """
    intervals_s, steps = _intervals(tiers, failures, limits)
    lost = waste(tiers, intervals_s, failures)
    around = ((factor, waste(tiers, [factor * each for each in intervals_s], failures).total) for factor in _FACTORS)
    return Advice(
        mttf_s=failures.mttf_s,
        tiers=tuple(_advice_of(tiers, intervals_s, steps, failures, limits, nbytes)),
        waste=lost,
        around=tuple(around),
        changes=tuple(_changes(tiers, failures, limits)),
        rules=tuple(_rules(tiers, failures, limits)),
        cost_per_day=None if cost_per_hour is None else 24 * cost_per_hour * lost.total,
    )


def _intervals(
    tiers: Sequence[TierCost], failures: Failures, limits: Limits
) -> tuple[list[float], Sequence[int | None]]:
    """The best intervals in seconds, and in steps."""
    floors_s = limits.floors_s(tiers)
    found = best_intervals(tiers, failures, floors_s=floors_s, max_overhead=limits.max_overhead)
    if limits.step_s is None:
        return found, [None] * len(found)
    steps = in_steps(tiers, found, failures, step_s=limits.step_s, floors_s=floors_s, max_overhead=limits.max_overhead)
    return [math.inf if each is None else each * limits.step_s for each in steps], steps


def _advice_of(
    tiers: Sequence[TierCost],
    intervals_s: Sequence[float],
    steps: Sequence[int | None],
    failures: Failures,
    limits: Limits,
    nbytes: int | None,
) -> Iterator[TierAdvice]:
    reasons = _reasons(tiers, failures, limits)
    rows = zip(tiers, intervals_s, steps, failures.rates(tiers), reasons, strict=True)
    for tier, interval_s, in_steps_, rate, reason in rows:
        saves = math.isfinite(interval_s)
        yield TierAdvice(
            name=tier.name,
            interval_s=interval_s if saves else None,
            steps=in_steps_,
            reason=reason,
            rate=rate * DAY_S,
            half_age_s=age_s(tier, interval_s, 0.5) if saves else None,
            most_age_s=age_s(tier, interval_s, 0.99) if saves else None,
            nbytes_per_day=round(nbytes * DAY_S / interval_s) if nbytes is not None and saves else None,
        )


def _reasons(tiers: Sequence[TierCost], failures: Failures, limits: Limits) -> Iterator[str]:
    """The limit that sets the interval of each tier."""
    floors_s = limits.floors_s(tiers)
    free = best_intervals(tiers, failures, floors_s=[0.0] * len(tiers))
    bounded = best_intervals(tiers, failures, floors_s=floors_s)
    paid = best_intervals(tiers, failures, floors_s=floors_s, max_overhead=limits.max_overhead)
    for tier, rate, free_s, bounded_s, paid_s in zip(tiers, failures.rates(tiers), free, bounded, paid, strict=True):
        if not rate:
            yield "no failure needs it"
        elif paid_s > bounded_s:
            yield "the budget for saves"
        elif bounded_s > free_s and tier.latency_s / limits.in_flight > limits.shortest_s:
            yield "a save takes so long to complete"
        elif bounded_s > free_s:
            yield f"no interval is shorter than {'a second' if limits.step_s is None else 'a step'}"
        elif not math.isclose(math.sqrt(2 * tier.cost_s / rate), free_s, rel_tol=1e-9):
            yield "no interval is shorter than that of a nearer tier"
        else:
            yield "the least waste"


def _changes(tiers: Sequence[TierCost], failures: Failures, limits: Limits) -> Iterator[Alternative]:
    def changed(what: str, tiers: Sequence[TierCost], failures: Failures = failures) -> Alternative:
        intervals_s, _ = _intervals(tiers, failures, limits)
        return Alternative(what, waste(tiers, intervals_s, failures).total)

    last = tiers[-1]
    if all(tier.survives != Loss.NODE for tier in tiers):
        nearer = [tier for tier in tiers if tier.survives < Loss.NODE]
        yield changed("copies in the memory of other nodes", [*nearer, PEERS, last])
    fast = replace(last, latency_s=last.latency_s / 2, restore_s=last.restore_s / 2)
    yield changed("twice the bandwidth to storage", [*tiers[:-1], fast])
    half = [replace(tier, stall_s=tier.stall_s / 2, slow_down=tier.slow_down / 2) for tier in tiers]
    yield changed("saves that cost half as much", half)
    if failures.detection_s > FAST_DETECTION_S:
        yield changed(
            f"detection and restart in {FAST_DETECTION_S:.0f} s",
            tiers,
            replace(failures, detection_s=FAST_DETECTION_S),
        )


def _rules(tiers: Sequence[TierCost], failures: Failures, limits: Limits) -> Iterator[Alternative]:
    """Other ways to choose the interval of the last tier, with the advice for the others."""
    last, before = tiers[-1], _intervals(tiers, failures, limits)[0][:-1]

    def ruled(what: str, interval_s: float) -> Alternative:
        return Alternative(what, waste(tiers, [*before, interval_s], failures).total)

    checkfreq_s = max(last.cost_s / _CHECKFREQ_OVERHEAD, last.latency_s, limits.shortest_s)
    yield ruled("CheckFreq's rule: as often as 3.5 % of overhead allow", checkfreq_s)
    yield ruled("every 30 minutes", 1800.0)
    yield ruled("every 3 hours", 10_800.0)
