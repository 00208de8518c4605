"""``python -m bench step``: the time that `Checkpointer.step` takes in a training loop when no save is due."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from bench.benchmark import Bar, Benchmark, Options
from bench.costs import scratch
from bench.markdown import about, table
from bench.runner import in_ranks, in_turns, timed
from bench.schema import OURS, Part, Result

WORLD, NUM_STEPS = 2, 10_000
BAR_US = 20.0
EVERY_STEPS, ALL_POLICIES = "every-steps", "all-policies"
_LABELS = {EVERY_STEPS: "`EverySteps`", ALL_POLICIES: "`EverySteps`, `EveryTime`, `OnMetric` and `OnRequest`"}


def measure_steps(policies: str, options: Options) -> Part:
    """Calls of `step` on two ranks at once; the first one's time counts."""
    with scratch(options.folder) as folder:
        return in_ranks(WORLD, time_steps, policies, folder, options)


def time_steps(policies: str, folder: Path, options: Options) -> Part:
    """Samples of so many calls each."""
    policy: holdfast.SavePolicy = holdfast.EverySteps(10**12)
    if policies == ALL_POLICIES:
        policy = policy | holdfast.EveryTime(1e6) | holdfast.OnMetric("accuracy") | holdfast.OnRequest()
    numbers, num_steps = itertools.count(), options.number(NUM_STEPS)

    def calls() -> None:
        for _ in range(num_steps):
            checkpointer.step(next(numbers), metrics={"loss": 1.0})

    scenario = options.scenario(policies, world=WORLD, rounds=15, facts={"num_steps": num_steps})
    with holdfast.Checkpointer(folder, {"w": torch.zeros(1)}, memory=None, save=policy) as checkpointer:
        part = in_turns(scenario, {OURS: partial(timed, calls)}, options)
        dist.barrier()
    return part


def us_per_step(part: Part) -> float:
    return 1e6 * part.median(OURS) / int(part.scenario.facts["num_steps"])


def bars(part: Part) -> Iterator[Bar]:
    yield Bar(f"a step, {part.scenario.name}", us_per_step(part), BAR_US, " µs")


def tables(result: Result) -> Iterator[str]:
    rows = {label: result.part(name) for name, label in _LABELS.items()}
    yield table("policies", rows, ("a call of `step`, µs", lambda part: f"{us_per_step(part):.1f}"))
    yield about(result.parts[-1])


STEP = Benchmark("step", {name: partial(measure_steps, name) for name in _LABELS}, tables, bars)
