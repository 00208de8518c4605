"""``python -m bench step``: the time that `Checkpointer.step` takes in a training loop when no save is due."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import ClassVar

import torch.distributed as dist

import holdfast
from bench.benchmark import Bar, Benchmark, Options, judged
from bench.markdown import table
from bench.runner import Found, Job, Turns, measure, timed
from bench.schema import Part, Result, Scenario
from bench.state import ManySmall
from bench.ways import Site

NUM_STEPS = 10_000
BAR_US = 20.0
OURS = "holdfast"
EVERY_STEPS, ALL_POLICIES = "every-steps", "all-policies"
_LABELS = {EVERY_STEPS: "`EverySteps`", ALL_POLICIES: "`EverySteps`, `EveryTime`, `OnMetric` and `OnRequest`"}


class Steps(Turns):
    """Calls of `step` on all ranks at once, so many in a turn. The slowest rank's time counts."""

    registry: ClassVar = {}

    def __init__(self, job: Job, site: Site) -> None:
        super().__init__(job, site)
        policy: holdfast.SavePolicy = holdfast.EverySteps(10**12)
        if job.scenario.name == ALL_POLICIES:
            policy = policy | holdfast.EveryTime(1e6) | holdfast.OnMetric("accuracy") | holdfast.OnRequest()
        self._checkpointer = holdfast.Checkpointer(site.folder / "run", site.state.tree, memory=None, save=policy)
        self._numbers = itertools.count()

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, Found]]:
        def calls() -> None:
            for _ in range(self.job.scenario.facts["num_steps"]):
                self._checkpointer.step(next(self._numbers), metrics={"loss": 1.0})

        dist.barrier()
        yield measure, timed(calls)
        if number == self.job.scenario.rounds:
            self._checkpointer.close()


def measure_steps(policies: str, options: Options) -> Part:
    facts = {"num_steps": options.number(NUM_STEPS)}
    scenario = Scenario(name=policies, world=2, rounds=options.rounds or 15, facts=facts)
    recipe = ManySmall(num_tensors=1, min_nbytes=1)
    return measure(options, Job(scenario=scenario, turns=Steps, recipe=recipe, contenders=(OURS,), copies=0))


def _us_per_step(part: Part) -> float:
    return 1e6 * median(part.series(OURS)) / int(str(part.scenario.facts["num_steps"]))


def bars(result: Result) -> Iterator[Bar]:
    for part in result.parts:
        yield judged(f"a step, {part.scenario.name}", _us_per_step(part), BAR_US, " µs")


def render_steps(result: Result) -> str:
    rows = ((label, f"{_us_per_step(result.part(name)):.1f}") for name, label in _LABELS.items())
    last = result.parts[-1]
    how = (
        f"No save is due; two ranks, medians of {last.scenario.rounds} rounds of {last.scenario.facts['num_steps']:,} "
        f"calls. `python -m bench step`; {last.environment.in_words()}."
    )
    return f"{table(('policies', 'a call of `step`, µs'), *rows)}\n\n{how}"


STEP = Benchmark("step", {name: partial(measure_steps, name) for name in _LABELS}, render_steps, bars)
