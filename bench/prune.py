"""``python -m bench prune``: the steps of a training loop while 1,000 checkpoints are deleted in the background."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, quantiles

import torch

import holdfast
from bench.benchmark import Bar, Benchmark, Options
from bench.markdown import about, ours, table
from bench.runner import TORCH_THREADS, grown_run, in_turns
from bench.schema import OURS, Part, Result

NUM_DELETED = 1_000
BAR_MS = 5.0
PART = "deletion"
QUIET, BUSY = "quiet", "busy"
#: Products of matrices in a step, so that it takes some milliseconds.
_NUM_PRODUCTS, _WIDTH = 40, 192
#: The steps after which the loop looks whether all is deleted; no step is measured meanwhile.
_LOOK_STEPS = 100
_SCHEDULE = Path("/proc/thread-self/schedstat")


def measure_prune(options: Options) -> Part:
    """A loop while ``keep=KeepLast(1)`` deletes a whole history, and as many steps without deletions."""
    torch.set_num_threads(TORCH_THREADS)
    num_deleted, state = options.number(NUM_DELETED, least=3), {"w": torch.zeros(1024)}
    with grown_run(state, num_deleted, options) as grown:

        def use() -> dict[str, float]:
            root = grown()
            found = loops(root, state, num_deleted)
            shutil.rmtree(root)
            return found

        scenario = options.scenario(PART, rounds=1, facts={"num_deleted": num_deleted})
        return in_turns(scenario, {OURS: use}, options)


def loops(root: Path, state: dict[str, torch.Tensor], num_deleted: int) -> dict[str, float]:
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


def _delay_ms(part: Part) -> float:
    """By how much the longest step is longer while checkpoints are deleted: the median of the rounds."""
    pairs = zip(part.series(OURS, "busy_max_s"), part.series(OURS, "quiet_max_s"), strict=True)
    return 1e3 * median(busy - quiet for busy, quiet in pairs)


def bars(part: Part) -> Iterator[Bar]:
    what = f"the longest step is longer while {part.scenario.facts['num_deleted']:,} checkpoints are deleted, by"
    yield Bar(what, _delay_ms(part), BAR_MS, " ms")


def tables(result: Result) -> Iterator[str]:
    (part,) = result.parts

    def ms(key: str) -> Callable[[str], str]:
        return lambda name: ours(f"{name}_{key}", scale=1e3)(part)

    yield table(
        "deleted meanwhile",
        {"nothing": QUIET, f"{part.scenario.facts['num_deleted']:,} checkpoints": BUSY},
        ("step, ms: median", ms("s")),
        ("one in a thousand exceeds", ms("rare_s")),
        ("longest", ms("max_s")),
    )
    yield f"{about(part)} The deletion took {part.median(OURS, 'deleting_s'):.0f} s."


PRUNE = Benchmark("prune", {PART: measure_prune}, tables, bars)
