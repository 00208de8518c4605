"""``python -m bench step``: the time that `Checkpointer.step` takes in a training loop when no save is due."""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

import holdfast
from bench.benchmark import Bar, Benchmark, Options, judged
from bench.costs import scratch
from bench.markdown import table
from bench.runner import HOST, TORCH_THREADS, in_turns, timed
from bench.schema import Part, Result, Sample, Scenario, measured

WORLD, NUM_STEPS = 2, 10_000
BAR_US = 20.0
OURS = "holdfast"
EVERY_STEPS, ALL_POLICIES = "every-steps", "all-policies"
_LABELS = {EVERY_STEPS: "`EverySteps`", ALL_POLICIES: "`EverySteps`, `EveryTime`, `OnMetric` and `OnRequest`"}


def measure_steps(policies: str, options: Options) -> Part:
    """Calls of `step` on two ranks at once; the first one's time counts."""
    rounds, num_steps = options.rounds or 15, options.number(NUM_STEPS)
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    spawning = multiprocessing.get_context("spawn")
    with scratch(options.folder) as folder, ProcessPoolExecutor(WORLD, spawning) as pool:
        arguments = (store.port, policies, num_steps, rounds, folder)
        ranks = [pool.submit(time_steps, rank, *arguments) for rank in range(WORLD)]
        first, *_ = [rank.result() for rank in ranks]
    scenario = Scenario(name=policies, world=WORLD, rounds=rounds, facts={"num_steps": num_steps})
    return measured(scenario, first, options.folder)


def time_steps(rank: int, port: int, policies: str, num_steps: int, rounds: int, folder: Path) -> tuple[Sample, ...]:
    """Samples of so many calls each, after one sample that is not counted."""
    torch.set_num_threads(TORCH_THREADS)
    dist.init_process_group("gloo", store=dist.TCPStore(HOST, port), rank=rank, world_size=WORLD)
    policy: holdfast.SavePolicy = holdfast.EverySteps(10**12)
    if policies == ALL_POLICIES:
        policy = policy | holdfast.EveryTime(1e6) | holdfast.OnMetric("accuracy") | holdfast.OnRequest()
    numbers = itertools.count()
    checkpointer = holdfast.Checkpointer(folder, {"w": torch.zeros(1)}, memory=None, save=policy)

    def calls() -> None:
        for _ in range(num_steps):
            checkpointer.step(next(numbers), metrics={"loss": 1.0})

    calls()
    samples = in_turns(range(1, rounds + 1), {OURS: partial(timed, calls)})
    dist.barrier()
    checkpointer.close()
    dist.destroy_process_group()
    return samples


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
