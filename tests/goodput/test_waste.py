"""The waste of a job, and the intervals at which it is least: against published figures, a simulation, and a search."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from random import Random
from statistics import mean

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.goodput.failures import PRESETS, Loss
from holdfast.goodput.waste import Failures, TierCost, age_s, best_intervals, in_steps, overhead, waste
from tests.goodput.simulation import bursty, poisson, simulated_waste

MEMORY = TierCost("memory", Loss.PROCESS, 0.05, 0.1, 10.0)
PEERS = TierCost("peers", Loss.NODE, 0.3, 5.0, 60.0)
DURABLE = TierCost("durable", Loss.JOB, 3.0, 180.0, 300.0)
LLAMA3 = Failures(PRESETS["llama3"].mttf_s(2048), (0.23, 0.75, 0.02), 60.0)
SMALL = replace(LLAMA3, mttf_s=7.9 * 3600)


def best(tiers: list[TierCost], failures: Failures) -> list[float]:
    return best_intervals(tiers, failures, floors_s=[0.0] * len(tiers))


def test_llama_3_failed_every_three_hours() -> None:
    assert LLAMA3.mttf_s / 3600 == pytest.approx(3.09, abs=0.005)


@pytest.mark.parametrize(
    ("tiers", "failures", "intervals_s", "wasted"),
    [
        ([MEMORY, PEERS, DURABLE], LLAMA3, [70, 94, 1827], 0.022),
        ([MEMORY, DURABLE], LLAMA3, [70, 294], 0.061),
        ([DURABLE], LLAMA3, [258], 0.072),
        ([MEMORY, PEERS, DURABLE], SMALL, [111, 151, 2921], 0.011),
        ([MEMORY, DURABLE], SMALL, [111, 471], 0.029),
        ([DURABLE], SMALL, [413], 0.034),
    ],
)
def test_the_worked_examples_of_the_literature_come_out(
    tiers: list[TierCost], failures: Failures, intervals_s: list[float], wasted: float
) -> None:
    found = best(tiers, failures)
    assert found == pytest.approx(intervals_s, rel=0.01)
    assert waste(tiers, found, failures).total == pytest.approx(wasted, abs=0.0005)


@pytest.mark.parametrize("gap", [poisson, bursty])
@pytest.mark.parametrize("tiers", [[MEMORY, PEERS, DURABLE], [MEMORY, DURABLE], [DURABLE]])
def test_a_simulation_loses_what_the_model_says(tiers: list[TierCost], gap: Callable[[Random, float], float]) -> None:
    found = best(tiers, LLAMA3)
    simulated = mean(simulated_waste(tiers, found, LLAMA3, seed=seed, gap=gap) for seed in range(4))
    assert simulated == pytest.approx(waste(tiers, found, LLAMA3).total, rel=0.1)


@pytest.mark.slow
def test_no_interval_of_a_grid_loses_much_less_in_a_simulation() -> None:
    tiers = [MEMORY, DURABLE]
    found = best(tiers, LLAMA3)

    def simulated(factors: Sequence[float]) -> float:
        intervals_s = [factor * each for factor, each in zip(factors, found, strict=True)]
        return mean(simulated_waste(tiers, intervals_s, LLAMA3, seed=seed, days=40) for seed in range(3))

    grid = [simulated(factors) for factors in product((0.25, 0.5, 1.0, 2.0, 4.0), repeat=2)]
    assert simulated((1.0, 1.0)) <= 1.05 * min(grid)


def test_checkfreqs_rule_that_is_blind_to_failures_loses_more() -> None:
    # 400 nodes that fail every 25.8 h: the rule saves six times as often as it should.
    failures, tier = Failures(25.8 * 3600, (0.0, 0.0, 1.0), 60.0), TierCost("durable", Loss.JOB, 3.0, 120.0, 180.0)
    (found,) = best([tier], failures)
    assert found == pytest.approx(746, rel=0.01)
    blind_s = max(tier.latency_s, tier.cost_s / 0.035)
    ours, blind = (simulated_waste([tier], [each], failures, seed=1, days=700) for each in (found, blind_s))
    assert ours == pytest.approx(0.0116, rel=0.1)
    assert blind == pytest.approx(0.0287, rel=0.1)


seconds = st.floats(0.01, 1000)
shares = st.lists(st.floats(0.01, 1), min_size=3, max_size=3).map(lambda each: tuple(one / sum(each) for one in each))
failures = st.builds(Failures, st.floats(600, 1e7), shares, st.floats(0, 1000))


@st.composite
def tiers(draw: st.DrawFn) -> list[TierCost]:
    survived = sorted({*draw(st.sets(st.sampled_from(list(Loss)))), Loss.JOB})
    slow_downs = st.floats(0, 0.1)
    return [
        TierCost(loss.name, loss, draw(seconds), draw(seconds), draw(seconds), draw(slow_downs)) for loss in survived
    ]


@given(tiers(), failures, st.data())
def test_no_other_intervals_within_the_limits_waste_less(
    tiers: list[TierCost], failures: Failures, data: st.DataObject
) -> None:
    floors_s = [data.draw(st.floats(0.1, 1000)) for _ in tiers]
    budget = data.draw(st.floats(1e-4, 1))
    found = best_intervals(tiers, failures, floors_s=floors_s, max_overhead=budget)
    other = [data.draw(st.floats(0.1, 1e5)) for _ in tiers]
    other = [max(pair) for pair in zip(sorted(other), floors_s, strict=True)]

    assert overhead(tiers, found) <= budget * (1 + 1e-6)
    assert found == sorted(found)
    assert all(each >= floor_s for each, floor_s in zip(found, floors_s, strict=True))
    assume(other == sorted(other) and overhead(tiers, other) <= budget)
    assert waste(tiers, found, failures).total <= waste(tiers, other, failures).total * (1 + 1e-6)


@given(tiers(), failures, st.floats(0.01, 500), st.floats(1e-4, 1))
def test_intervals_in_steps_are_multiples_of_the_nearer_ones(
    tiers: list[TierCost], failures: Failures, step_s: float, budget: float
) -> None:
    floors_s = [max(step_s, tier.latency_s) for tier in tiers]
    intervals_s = best_intervals(tiers, failures, floors_s=floors_s, max_overhead=budget)
    steps = in_steps(tiers, intervals_s, failures, step_s=step_s, floors_s=floors_s, max_overhead=budget)
    assert None not in steps
    counts = [each for each in steps if each is not None]
    assert counts[0] >= 1
    assert all(far % near == 0 for near, far in pairwise(counts))
    assert overhead(tiers, [each * step_s for each in counts]) <= budget * (1 + 1e-6)
    for each, interval_s, floor_s in zip(counts, intervals_s, floors_s, strict=True):
        assert each * step_s >= floor_s * (1 - 1e-9)
        assert each * step_s <= 2 * interval_s + len(tiers) * counts[0] * step_s


def test_a_tier_that_no_failure_needs_is_never_saved_to() -> None:
    failures = replace(LLAMA3, shares=(1.0, 0.0, 0.0))
    assert best([MEMORY, DURABLE], failures)[1] == math.inf
    assert best([MEMORY, PEERS, DURABLE], replace(LLAMA3, shares=(0.1, 0.9, 0.0)))[2] == math.inf
    assert in_steps([MEMORY, DURABLE], [70.0, math.inf], failures, step_s=7.0, floors_s=[7.0, 180.0]) == [10, None]


def test_half_of_all_failures_lose_at_most_half_an_interval_and_the_time_of_a_save() -> None:
    assert age_s(DURABLE, 1800.0, 0.5) == 180.0 + 900.0
