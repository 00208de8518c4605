"""The pace of `Auto`: in simulated jobs it wastes hardly more than the best fixed interval, and it follows changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.goodput.failures import learned_mttf_s
from holdfast.policy.pace import PROFILED_S, Pace, SaveCost, SaveMeter

HOUR_S = 3600.0
#: The number of failures of a simulated job.
NUM_FAILURES = 500


@dataclass(frozen=True)
class Job:
    """A job with steps of `step_s`, whose saves block for `blocked_s`, slow steps down by `slow_down` until they are
    complete after `latency_s`, and whose steps vary by the share `noise`."""

    step_s: float = 8.0
    blocked_s: float = 2.0
    slow_down: float = 0.05
    latency_s: float = 40.0
    noise: float = 0.1
    mttf_s: float = 4 * HOUR_S

    @property
    def cost_s(self) -> float:
        return self.blocked_s + self.slow_down * self.latency_s


def gaps_s(job: Job) -> list[float]:
    """The times between the failures of a job, the same whatever its policy."""
    random = Random(7)
    return [random.expovariate(1 / job.mttf_s) for _ in range(NUM_FAILURES)]


def waste_of_fixed(job: Job, interval_s: float) -> float:
    """The share of its time that `job` loses to saves and to work done again if it saves every `interval_s`."""
    gaps = gaps_s(job)
    return 1 - sum(_durable_work_s(job, interval_s, gap_s) for gap_s in gaps) / sum(gaps)


def _durable_work_s(job: Job, interval_s: float, gap_s: float) -> float:
    """The work in the newest save that is complete when the job fails after `gap_s`."""
    cycle_s = interval_s + job.blocked_s
    num_saves = int((gap_s - job.latency_s - interval_s) // cycle_s) + 1
    slowed_s = job.latency_s * job.slow_down / (1 + job.slow_down)
    return max(num_saves, 0) * interval_s - max(num_saves - 1, 0) * slowed_s


def waste_of_auto(job: Job) -> float:
    """The same if it asks a `Pace`, step by step. Each restart begins with a new one, as a real job does."""
    random, gaps = Random(0), gaps_s(job)
    return 1 - sum(_durable_work_of_auto_s(job, gap_s, random) for gap_s in gaps) / sum(gaps)


def _durable_work_of_auto_s(job: Job, gap_s: float, random: Random) -> float:
    meter, pace = SaveMeter(), Pace(max_overhead=0.5)
    now_s = saved_s = done_s = durable_s = 0.0
    on_way: tuple[float, float] | None = None  # of the save on its way: the time of its completion, and its work
    while now_s < gap_s:
        step_s = job.step_s * random.uniform(1 - job.noise, 1 + job.noise) * (1 + job.slow_down * (on_way is not None))
        now_s += step_s
        done_s += job.step_s
        meter.note_step(step_s, is_saving=on_way is not None)
        if on_way is not None and now_s >= on_way[0]:
            durable_s, on_way = on_way[1], None
            meter.note_save(blocked_s=job.blocked_s, latency_s=job.latency_s)
            pace.choose(meter.cost, step_s=meter.step_s, mttf_s=job.mttf_s, is_settled=meter.is_settled)
        interval_s = pace.choice.interval_s if pace.choice else 0.0 if meter.is_profiled else PROFILED_S
        if on_way is None and now_s - saved_s >= interval_s:
            on_way = now_s + job.latency_s, done_s
            now_s = saved_s = now_s + job.blocked_s
    return durable_s


@pytest.mark.parametrize(
    "job",
    [
        Job(),
        pytest.param(
            Job(step_s=30.0, blocked_s=2.0, slow_down=0.0, latency_s=60.0, mttf_s=8 * HOUR_S), marks=pytest.mark.slow
        ),
        Job(step_s=20.0, blocked_s=20.0, slow_down=0.1, latency_s=200.0, mttf_s=12 * HOUR_S),
        pytest.param(Job(step_s=4.0, noise=0.5, mttf_s=2 * HOUR_S), marks=pytest.mark.slow),
    ],
)
@pytest.mark.few(1)
def test_it_wastes_at_most_a_twentieth_more_than_the_best_fixed_interval(job: Job) -> None:
    best_s = (2 * job.cost_s * job.mttf_s) ** 0.5
    fixed = [waste_of_fixed(job, factor * best_s) for factor in (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)]
    assert min(fixed) not in (fixed[0], fixed[-1])
    assert waste_of_auto(job) <= 1.05 * min(fixed)


@dataclass(frozen=True)
class TieredJob:
    """A job that saves to memory and to storage; saves block, and do nothing else. Of its failures, a share of 23 %
    ends processes alone."""

    step_s: float = 5.0
    memory_s: float = 0.2
    storage_s: float = 20.0
    latency_s: float = 60.0
    mttf_s: float = 3 * HOUR_S


def waste_of_tiers(job: TieredJob, memory_interval_s: float, interval_s: float) -> float:
    """The share of its time that `job` loses if it saves to memory and to storage at these intervals."""
    random, lost_s, total_s = Random(3), 0.0, 0.0
    for _ in range(2 * NUM_FAILURES):
        gap_s = random.expovariate(1 / job.mttf_s)
        now_s = done_s = held_s = durable_s = since_s = 0.0
        loses_process_only = random.random() < 0.23
        on_way: tuple[float, float] | None = None
        last_s = 0.0
        while now_s < gap_s:
            now_s += job.step_s
            done_s += job.step_s
            if on_way is not None and now_s >= on_way[0]:
                durable_s, on_way = on_way[1], None
            if on_way is None and now_s - last_s >= interval_s:
                now_s += job.storage_s
                on_way, held_s, last_s, since_s = (now_s + job.latency_s, done_s), done_s, now_s, now_s
            elif now_s - since_s >= memory_interval_s:
                now_s += job.memory_s
                held_s, since_s = done_s, now_s
        total_s += gap_s
        lost_s += gap_s - (held_s if loses_process_only else durable_s)
    return lost_s / total_s


@pytest.mark.parametrize(
    "job", [TieredJob(), pytest.param(TieredJob(memory_s=1.0, mttf_s=HOUR_S), marks=pytest.mark.slow)]
)
def test_with_saves_to_memory_alone_it_is_near_the_best_pair_of_fixed_intervals(job: TieredJob) -> None:
    pace = Pace(max_overhead=0.5)
    cost, memory_cost = SaveCost(job.storage_s, 0.0, job.latency_s), SaveCost(job.memory_s, 0.0, 0.0)
    pace.choose(cost, memory_cost=memory_cost, step_s=job.step_s, mttf_s=job.mttf_s, is_settled=True)
    choice = pace.choice
    assert choice is not None
    assert choice.memory_interval_s < choice.interval_s / 2
    chosen = waste_of_tiers(job, choice.memory_interval_s, choice.interval_s)
    factors = (0.7, 1.0, 1.4)
    fixed = [
        waste_of_tiers(job, one * choice.memory_interval_s, other * choice.interval_s)
        for one in factors
        for other in factors
    ]
    assert chosen <= 1.05 * min(fixed)
    assert chosen < waste_of_tiers(job, math.inf, choice.interval_s)


class Loop:
    """A loop that measures its saves, and paces them; it fails every four hours."""

    def __init__(self) -> None:
        self.meter, self.pace = SaveMeter(), Pace(max_overhead=0.5)

    def save(self, *, blocked_s: float, slow_s: float = 1.0) -> bool:
        """A save, with ten steps of a second before it and ten of `slow_s` while it is on its way. Returns whether the
        interval changes."""
        for _ in range(10):
            self.meter.note_step(1.0, is_saving=False)
        for _ in range(10):
            self.meter.note_step(slow_s, is_saving=True)
        self.meter.note_save(blocked_s=blocked_s, latency_s=10.0)
        meter = self.meter
        return self.pace.choose(meter.cost, step_s=meter.step_s, mttf_s=4 * HOUR_S, is_settled=meter.is_settled)

    @property
    def interval_s(self) -> float:
        assert self.pace.choice is not None
        return self.pace.choice.interval_s


def test_it_follows_saves_that_become_slower_and_faster_again() -> None:
    loop, intervals_s = Loop(), []
    for blocked_s in (1.0, 16.0, 1.0):
        for _ in range(20):
            loop.save(blocked_s=blocked_s)
        intervals_s.append(loop.interval_s)
    assert intervals_s[1] == pytest.approx(4 * intervals_s[0], rel=0.01)
    assert intervals_s[2] == pytest.approx(intervals_s[0], rel=0.01)


def test_what_wastes_hardly_more_is_kept() -> None:
    loop = Loop()
    for _ in range(15):
        loop.save(blocked_s=2.0)
    before_s = loop.interval_s
    assert not any(loop.save(blocked_s=blocked_s) for blocked_s in (1.8, 2.2) * 20)
    assert loop.interval_s == before_s


def test_one_slow_save_changes_nothing_for_long() -> None:
    loop = Loop()
    for _ in range(5):
        loop.save(blocked_s=1.0)
    assert not loop.save(blocked_s=300.0)


def test_slower_steps_are_a_cost_of_the_save() -> None:
    loop = Loop()
    for _ in range(3):  # before that, nobody knows whether the first step was slow for its own reasons
        loop.save(blocked_s=0.5, slow_s=1.1)
    assert loop.meter.cost.slowed_s == pytest.approx(10 * 0.1)


def test_steps_that_are_slower_by_chance_are_none() -> None:
    random, meter = Random(1), SaveMeter()
    for _ in range(30):
        for number in range(100):
            meter.note_step(random.gauss(1.0, 0.2), is_saving=number >= 50)
        meter.note_save(blocked_s=0.5, latency_s=50.0)
        assert meter.cost.slowed_s < 1.0  # steps that a save does not slow down may differ by 0.2 s * sqrt(50) = 1.4 s


def test_an_evaluation_while_a_save_is_on_its_way_is_not_its_cost() -> None:
    meter = SaveMeter()
    for _ in range(16):
        meter.note_step(1.0, is_saving=False)
    for _ in range(3):
        for step_s in (1.5, 1.1, 60.0, 1.1, 1.1):
            meter.note_step(step_s, is_saving=True)
        meter.note_save(blocked_s=0.2, latency_s=5.0)
    assert meter.cost.slowed_s == pytest.approx(0.5 + 4 * 0.1)


@given(st.floats(0, 1000), st.floats(0.01, 1000), st.floats(0.001, 100), st.floats(60, 1e7), st.floats(0.001, 0.5))
def test_the_interval_keeps_to_its_limits(
    blocked_s: float, latency_s: float, step_s: float, mttf_s: float, max_overhead: float
) -> None:
    pace = Pace(max_overhead=max_overhead)
    assert pace.choose(SaveCost(blocked_s, 0.0, latency_s), step_s=step_s, mttf_s=mttf_s, is_settled=True)
    assert pace.choice is not None
    assert pace.choice.interval_s >= max(latency_s, step_s)
    assert blocked_s / pace.choice.interval_s <= max_overhead * (1 + 1e-9)


def test_ended_jobs_correct_what_was_expected() -> None:
    assert learned_mttf_s(10 * HOUR_S, num_failures=0, observed_s=0.0) == 10 * HOUR_S
    assert learned_mttf_s(10 * HOUR_S, num_failures=0, observed_s=90 * HOUR_S) == 100 * HOUR_S
    # Many failures tell the truth, whatever was expected.
    for expected_s in (1 * HOUR_S, 100 * HOUR_S):
        learned_s = learned_mttf_s(expected_s, num_failures=99, observed_s=500 * HOUR_S)
        assert learned_s == pytest.approx(5 * HOUR_S, rel=0.25)
