"""``python -m bench history``: the cost of commands, loads and saves in runs of 10, 1,000 and 10,000 checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial

import torch

import holdfast
from bench.benchmark import Bar, Benchmark, Options
from bench.markdown import about, ours, table
from bench.runner import command, grown_run, in_turns, timed
from bench.schema import OURS, Part, Result
from bench.ways import opened

LENGTHS = (10, 1_000, 10_000)
#: ``holdfast ls`` of the longest history, in processor seconds: others depend on what else runs.
LS_BAR_S = 1.0


def measure_history(length: int, options: Options) -> Part:
    """Grow a run and use it: a load of the head, the save after it, a search for the oldest step, two commands."""
    steps, state = itertools.count(length + 1), {"w": torch.zeros(1024)}
    with grown_run(state, length, options) as grown:
        root = grown()
        holdfast.load(root, state)

        def use() -> dict[str, float]:
            listed = command("ls", root)
            return {
                **timed(lambda: holdfast.load(root, state), "load_s"),
                **timed(lambda: holdfast.save(root, state, next(steps)), "save_s"),
                **timed(lambda: opened(root).find(step=1), "find_s"),
                "ls_s": listed["seconds"],
                "ls_cpu_s": listed["cpu_s"],
                "doctor_s": command("doctor", root)["seconds"],
            }

        scenario = options.scenario(str(length), rounds=5, facts={"num_checkpoints": length})
        return in_turns(scenario, {OURS: use}, options)


def bars(part: Part) -> Iterator[Bar]:
    if part.scenario.name == str(LENGTHS[-1]):
        yield Bar(f"ls of {LENGTHS[-1]:,} checkpoints", part.median(OURS, "ls_cpu_s"), LS_BAR_S, " s")


def tables(result: Result) -> Iterator[str]:
    yield table(
        "checkpoints",
        {f"{part.scenario.facts['num_checkpoints']:,}": part for part in result.parts},
        ("load of the head, ms", ours("load_s", digits=0, scale=1e3)),
        ("save, ms", ours("save_s", digits=0, scale=1e3)),
        ("find a step, ms", ours("find_s", digits=0, scale=1e3)),
        ("`ls`, s (of CPU)", lambda part: f"{part.median(OURS, 'ls_s'):.2f} ({part.median(OURS, 'ls_cpu_s'):.2f})"),
        ("`doctor`, s", ours("doctor_s")),
    )
    yield about(result.parts[-1])


PARTS = {str(length): partial(measure_history, length) for length in LENGTHS}
HISTORY = Benchmark("history", PARTS, tables, bars)
