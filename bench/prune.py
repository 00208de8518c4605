"""``python -m bench prune``: the steps of a training loop while 1,000 checkpoints are deleted in the background."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles

import torch

import holdfast
from bench.benchmark import Bar, Benchmark, Options, judged
from bench.costs import scratch
from bench.markdown import table, whereabouts
from bench.runner import TORCH_THREADS, in_turns
from bench.schema import Part, Result, Scenario, measured

NUM_DELETED = 1_000
BAR_MS = 5.0
OURS, PART = "holdfast", "deletion"
QUIET, BUSY = "quiet", "busy"
#: Products of matrices in a step, so that it takes some milliseconds.
_NUM_PRODUCTS, _WIDTH = 40, 192
#: The steps after which the loop looks whether all is deleted; no step is measured meanwhile.
_LOOK_STEPS = 100
_SCHEDULE = Path("/proc/thread-self/schedstat")


def measure_prune(options: Options) -> Part:
    """A loop while ``keep=KeepLast(1)`` deletes a whole history, and as many steps without deletions."""
    torch.set_num_threads(TORCH_THREADS)
    rounds, num_deleted = options.rounds or 1, options.number(NUM_DELETED, least=3)
    state: dict[str, object] = {"w": torch.zeros(1024)}
    with scratch(options.memory) as memory, scratch(options.folder) as folder:
        for step in range(1, num_deleted + 1):
            holdfast.save(memory / "run", state, step)  # where no save waits for a disk

        def use() -> dict[str, float]:
            root = shutil.copytree(memory / "run", folder / "run")
            os.sync()  # else the first fsync has to wait for all that was written
            found = loops(root, state, num_deleted)
            shutil.rmtree(root)
            return found

        samples = in_turns(range(1, rounds + 1), {OURS: use})
    scenario = Scenario(name=PART, rounds=rounds, facts={"num_deleted": num_deleted})
    return measured(scenario, samples, options.folder)


def loops(root: Path, state: dict[str, object], num_deleted: int) -> dict[str, float]:
    """The longest steps, and those that one step in a thousand exceeds, without and with deletions."""
    with holdfast.Checkpointer(root, state, memory=None, keep=holdfast.KeepLast(1)) as checkpointer:
        checkpointer.restore()
        steps(_LOOK_STEPS)
        begun_s = time.perf_counter()
        checkpointer.save(num_deleted + 1)
        busy: list[float] = []
        while len(list((root / "checkpoints").iterdir())) > 1:
            busy += steps(_LOOK_STEPS)
        deleting_s = time.perf_counter() - begun_s
        quiet = steps(len(busy))
    times = {QUIET: quiet, BUSY: busy}
    longest = {f"{name}_max_s": max(seconds) for name, seconds in times.items()}
    rare = {f"{name}_rare_s": quantiles(seconds, n=1000)[-1] for name, seconds in times.items()}
    middle = {f"{name}_s": median(seconds) for name, seconds in times.items()}
    return {**longest, **rare, **middle, "deleting_s": deleting_s}


def steps(number: int) -> list[float]:
    """The seconds of so many steps, without those in which the loop could run and other programs had the processors."""
    found = []
    weight, values = torch.eye(_WIDTH), torch.ones(_WIDTH, _WIDTH)
    for _ in range(number):
        queued_s, start_s = _queued_s(), time.perf_counter()
        for _ in range(_NUM_PRODUCTS):
            values = torch.mm(weight, values)
        seconds = time.perf_counter() - start_s
        found.append(seconds - (_queued_s() - queued_s))
    return found


def _queued_s() -> float:
    """The seconds for which this thread has waited for a processor."""
    return int(_SCHEDULE.read_text().split()[1]) / 1e9


def _ms(part: Part, key: str) -> float:
    return 1e3 * median(part.series(OURS, key))


def _delay_ms(part: Part) -> float:
    """By how much the longest step is longer while checkpoints are deleted: the median of the rounds."""
    pairs = zip(part.series(OURS, "busy_max_s"), part.series(OURS, "quiet_max_s"), strict=True)
    return 1e3 * median(busy - quiet for busy, quiet in pairs)


def bars(result: Result) -> Iterator[Bar]:
    for part in result.parts:
        what = f"the longest step is longer while {part.scenario.facts['num_deleted']:,} checkpoints are deleted, by"
        yield judged(what, _delay_ms(part), BAR_MS, " ms")


def render_prune(result: Result) -> str:
    part = result.parts[-1]
    names = {QUIET: "nothing", BUSY: f"{part.scenario.facts['num_deleted']:,} checkpoints"}
    keys = ("{}_s", "{}_rare_s", "{}_max_s")
    rows = ((label, *(f"{_ms(part, key.format(name)):.2f}" for key in keys)) for name, label in names.items())
    titles = ("deleted meanwhile", "step, ms: median", "one in a thousand exceeds", "longest")
    how = (
        f"Without the time for which other programs had the processors. The deletion took "
        f"{median(part.series(OURS, 'deleting_s')):.0f} s. One process. "
    )
    return "\n\n".join([table(titles, *rows), how + whereabouts("prune", part)])


PRUNE = Benchmark("prune", {PART: measure_prune}, render_prune, bars)
