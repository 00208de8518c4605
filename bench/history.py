"""``python -m bench history``: the cost of commands, loads and saves in runs of 10, 1,000 and 10,000 checkpoints."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Iterator
from functools import partial
from statistics import median

import torch

import holdfast
from bench.benchmark import Bar, Benchmark, Options, judged
from bench.costs import scratch
from bench.markdown import table
from bench.runner import command, in_turns, timed
from bench.schema import Part, Result, Scenario, measured
from bench.ways import opened

LENGTHS = (10, 1_000, 10_000)
#: ``holdfast ls`` of the longest history, in processor seconds: others depend on what else runs.
LS_BAR_S = 1.0
OURS = "holdfast"
FIGURES = ("load_s", "save_s", "find_s", "ls_s", "ls_cpu_s", "doctor_s")


def measure_history(length: int, options: Options) -> Part:
    """Grow a run and use it: a load of the head, the save after it, a search for the oldest step, two commands."""
    rounds, steps = options.rounds or 5, itertools.count(length + 1)
    state: dict[str, object] = {"w": torch.zeros(1024)}
    with scratch(options.memory) as memory, scratch(options.folder) as folder:
        for step in range(1, length + 1):
            holdfast.save(memory, state, step)  # where no save waits for a disk
        root = shutil.copytree(memory, folder / "run")
        os.sync()  # else the first fsync of a save has to wait for all that was written
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

        samples = in_turns(range(1, rounds + 1), {OURS: use})
    scenario = Scenario(name=str(length), rounds=rounds, facts={"num_checkpoints": length})
    return measured(scenario, samples, options.folder)


def bars(result: Result) -> Iterator[Bar]:
    if longest := result.find(str(LENGTHS[-1])):
        cpu_s = median(longest.series(OURS, "ls_cpu_s"))
        yield judged(f"ls of {LENGTHS[-1]:,} checkpoints", cpu_s, LS_BAR_S, " s")


def render_history(result: Result) -> str:
    def row(part: Part) -> tuple[str, ...]:
        load_s, save_s, find_s, ls_s, ls_cpu_s, doctor_s = (median(part.series(OURS, key)) for key in FIGURES)
        in_ms = (f"{1e3 * seconds:.0f}" for seconds in (load_s, save_s, find_s))
        return (
            f"{part.scenario.facts['num_checkpoints']:,}",
            *in_ms,
            f"{ls_s:.2f} ({ls_cpu_s:.2f})",
            f"{doctor_s:.2f}",
        )

    titles = ("checkpoints", "load of the head, ms", "save, ms", "find a step, ms", "`ls`, s (of CPU)", "`doctor`, s")
    last = result.parts[-1]
    how = f"A state of 4 KiB, one process, medians of {last.scenario.rounds}. `python -m bench history`; "
    return f"{table(titles, *map(row, result.parts))}\n\n{how}{last.environment.in_words()}."


PARTS = {str(length): partial(measure_history, length) for length in LENGTHS}
HISTORY = Benchmark("history", PARTS, render_history, bars)
