"""``python -m bench engine``: saves that training does not wait for, restores from the memory of the node, saves beside
a loop of Python, and saves in a training loop on all cores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple

from bench.benchmark import Bar, Benchmark, Options
from bench.contenders import BACKGROUND, BESIDE_PYTHON, BESIDE_TRAINING, OURS_SYNC, Registry
from bench.engine_turns import ALONE, BESIDE_WORK, NO_SAVES, NUM_STEPS, PythonLoop, Restores, Saves, TrainingLoop
from bench.markdown import NO_FIGURE, about, cpu, fastest, labels, memory, of_raw, table, text
from bench.runner import Job, Turns, measure
from bench.schema import OURS, RAW, WARM_UP, Part, Result, paired_ratios
from bench.state import LlamaLike

SAVES, RESTORE, PYTHON, LOOP = ("saves", "restore", "python", "loop")
#: With 111 layers, model and optimizer have 4,008 tensors.
NUM_LAYERS = 111


class Measured(NamedTuple):
    """The turns and contenders that a part measures, with a state of `gib`."""

    turns: type[Turns]
    registry: Registry
    gib: float
    world: int = 2


PARTS = {
    SAVES: Measured(Saves, BACKGROUND, 2.0),
    RESTORE: Measured(Restores, {OURS: BACKGROUND[OURS]}, 2.0),
    PYTHON: Measured(PythonLoop, BESIDE_PYTHON, 1.0, world=1),
    LOOP: Measured(TrainingLoop, BESIDE_TRAINING, 0.5),
}


def measure_engine(name: str, options: Options) -> Part:
    part = PARTS[name]
    scenario = options.scenario(name, world=part.world, rounds=7, facts={"work_s": options.scale})
    recipe = LlamaLike(options.nbytes(part.gib), "rows", options.number(NUM_LAYERS))
    return measure(options, Job(scenario, part.turns, recipe, part.registry))


# Figures


def python_slow_down(part: Part, name: str, key: str) -> list[float]:
    """Shares of its rate that the loop of Python lost when it had the rate `key`."""
    before, after, rate = (part.series(name, each) for each in ("before_per_s", "after_per_s", key))
    return [1 - 2 * during / (one + other) for one, other, during in zip(before, after, rate, strict=True)]


def loop_slow_down(part: Part, name: str) -> list[float]:
    """Seconds / seconds of the loop without saves - 1, paired by round."""
    series = part.series(name)
    return [ratio - 1 for ratio in paired_ratios(series, part.series(NO_SAVES))] if series else []


def of_memcpy(part: Part, key: str) -> list[float]:
    """Seconds of a copy of as many bytes / seconds, paired by round."""
    return paired_ratios(part.series(OURS, "memcpy_s"), part.series(OURS, key))


def first_blocked_s(part: Part, name: str) -> float:
    """Seconds that a contender's first save blocked, its set-up included."""
    first = part.taken(name, ALONE)[0]
    assert first.round == WARM_UP
    return max(first.values["blocked_s"])


def bars(part: Part) -> Iterator[Bar]:
    name = part.scenario.name
    if not part.taken(OURS):
        return
    if name == SAVES:
        yield Bar("blocked", 1e3 * part.median(OURS, "blocked_s", measure=BESIDE_WORK), 20, " ms")
        yield Bar("step wait", 1e3 * part.median(OURS, "step_wait_s", measure=BESIDE_WORK), 5, " ms")
        yield Bar("persist, of raw", median(part.shares(OURS, "persist_s", measure=ALONE)), 0.9, at_least=True)
        yield Bar("CPU", 1e9 * part.per_byte(OURS, "cpu_s", measure=ALONE), 0.2, " s/GB")
        yield Bar("extra memory per rank", part.peak_nbytes(OURS) / 2**20, 128, " MiB")
        if part.taken(OURS_SYNC):
            yield Bar("holdfast.save, of raw", median(part.shares(OURS_SYNC, measure=ALONE)), 0.9, at_least=True)
    elif name == RESTORE:
        yield Bar("restore, of memcpy", median(of_memcpy(part, "seconds")), 0.6, at_least=True)
    elif name == PYTHON:
        slow_down = 100 * median(python_slow_down(part, OURS, "persisting_per_s"))
        yield Bar("Python-bound rank slowed down by", slow_down, 5, " %")
    else:
        yield Bar("loop slowed down by", 100 * median(loop_slow_down(part, OURS)), 3, " %")


# Tables


def tables(result: Result) -> Iterator[str]:
    saves, restore, python, loop = map(result.part, PARTS)
    yield from (_saves(saves), f"{about(saves)} {fastest(saves, ALONE)}")
    moved_cpu_s = 1e9 * restore.per_byte(OURS, "moved_cpu_s")
    yield from (_restore(restore), f"{about(restore)} The copy takes {moved_cpu_s:.2f} s of CPU per GB.")
    yield _slow_downs(python, loop)
    yield f"Loop of Python. {about(python)}"
    without_saves = f"{NUM_STEPS} steps without a save take {text(loop.series(NO_SAVES))} s."
    yield f"Training loop. {about(loop)} {without_saves}"


def _saves(part: Part) -> str:
    def ms(key: str) -> Callable[[str], str]:
        return lambda name: text(part.series(name, key, measure=BESIDE_WORK), 1, scale=1e3)

    return table(
        "",
        labels(part.able),
        ("save blocks, ms", ms("blocked_s")),
        ("next step waits, ms", ms("step_wait_s")),
        ("durable after, s", lambda name: text(part.series(name, measure=ALONE))),
        ("of raw", lambda name: of_raw(part, name, ALONE)),
        ("CPU, s/GB", lambda name: cpu(part, name, ALONE)),
        ("memory per rank, MB", lambda name: NO_FIGURE if name == RAW else memory(part, name)),
        ("first save blocks, s", lambda name: NO_FIGURE if name == RAW else f"{first_blocked_s(part, name):.2f}"),
    )


def _restore(part: Part) -> str:
    def of_copy(key: str) -> str:
        return {"memcpy_s": "1", "load_s": NO_FIGURE}.get(key) or text(of_memcpy(part, key))

    rows = {
        "restore from node memory": "seconds",
        "copy of each tensor, with its digests, and no more": "moved_s",
        "memcpy of as many bytes": "memcpy_s",
        "load from storage, cold caches": "load_s",
    }
    seconds = ("s", lambda key: text(part.series(OURS, key)))
    return table("after SIGKILL of all ranks", rows, seconds, ("of memcpy", of_copy))


def _slow_downs(python: Part, loop: Part) -> str:
    def percent(key: str) -> Callable[[str], str]:
        return lambda name: text(python_slow_down(python, name, key), 1, scale=100)

    def lag_s(name: str) -> str:
        return text([after - end for after, end in zip(loop.series(name, "durable_s"), loop.series(name), strict=True)])

    # Those beside Python first, as they are there.
    names = {each.name: each.name for part in (python, loop) for each in part.able}
    return table(
        "slowed down by, %",
        names,
        ("loop of Python, while persisting", percent("persisting_per_s")),
        ("with the copy", percent("saving_per_s")),
        ("training loop, all cores busy", lambda name: text(loop_slow_down(loop, name), 1, scale=100)),
        ("durable after its end, s", lag_s),
    )


ENGINE = Benchmark("engine", {name: partial(measure_engine, name) for name in PARTS}, tables, bars)
