"""``python -m bench engine``: saves that training does not wait for, restores from memory, and what both cost.

Four parts: saves, restores from the memory of the node, saves beside a loop of Python, and saves in a training loop on
all cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from bench.benchmark import Bar, Benchmark, Options, judged
from bench.contenders import BACKGROUND, OURS, OURS_SYNC, select
from bench.engine_turns import ALONE, BESIDE_WORK, NO_SAVES, PythonLoop, Restores, Saves, TrainingLoop
from bench.environment import in_words
from bench.errors import SetupError
from bench.markdown import (
    NO_FIGURE,
    cpu,
    figures,
    labels,
    memory,
    raw_in_words,
    reasons,
    samples_link,
    shares,
    table,
    text,
    verdicts,
)
from bench.runner import Job, Turns, measure
from bench.schema import RAW, WARM_UP, Part, Result, paired_ratios
from bench.state import LlamaLike
from bench.ways import GENERATIONS

SAVES, RESTORE, PYTHON, LOOP = ("saves", "restore", "python", "loop")
#: With 111 layers, model and optimizer have 4,008 tensors.
NUM_LAYERS = 111

#: The sizes that the bars hold for, and the bars.
MIN_ROUNDS, MIN_WORLD, MIN_TENSORS = 7, 2, 3_000
MIN_NBYTES, MIN_PYTHON_NBYTES, MIN_LOOP_NBYTES = 2_000_000_000, 1_000_000_000, 500_000_000
BLOCKED_MS, STEP_WAIT_MS = 20.0, 5.0
SHARE_OF_RAW, SHARE_OF_MEMCPY = 0.9, 0.6
CPU_S_PER_GB = 0.2
MEMORY_MIB = 128.0
PYTHON_SLOW_DOWN, LOOP_SLOW_DOWN = 0.05, 0.03


class Measured(NamedTuple):
    """What is measured in a part: a state of `gib`, of which `copies` are on the device at once. `timed` are facts in
    seconds, and shorter at a smaller scale."""

    turns: type[Turns]
    gib: float
    copies: int
    world: int | None = None
    facts: Mapping[str, Any] = {}
    timed: Mapping[str, float] = {}


PARTS = {
    # Two runs keep their head until after their next save.
    SAVES: Measured(Saves, 2.0, 5, facts={"generations": GENERATIONS}, timed={"work_s": 1.0}),
    RESTORE: Measured(Restores, 2.0, 1),
    # Two runs, and the save under way.
    PYTHON: Measured(PythonLoop, 1.0, 3, world=1, timed={"calm_s": 1.0}),
    LOOP: Measured(TrainingLoop, 0.5, 3, facts={"steps": 10, "every": 10, "tokens": 512}),
}


def measure_engine(name: str, options: Options) -> Part:
    """One part."""
    part = PARTS[name]
    names, absent = select(options.contenders, BACKGROUND)
    names = tuple(each for each in part.turns.registry if each in names or part.turns is Restores)
    if not set(names) - {RAW}:
        raise SetupError(
            f"None of the contenders saves in the background. Choose from {', '.join(part.turns.registry)}."
        )
    rounds = options.rounds or MIN_ROUNDS
    job = Job(
        name=name,
        turns=part.turns,
        recipe=LlamaLike(options.nbytes(part.gib), "rows", options.number(NUM_LAYERS)),
        world=part.world or options.world or MIN_WORLD,
        rounds=rounds,
        contenders=names,
        # Those that die leave all that they saved.
        copies=part.copies + rounds * part.turns.mortal,
        in_memory=True,
        facts={**part.facts} | {key: options.scale * seconds for key, seconds in part.timed.items()},
    )
    return measure(job, options, absent=absent if name == SAVES else {})


# Figures


def python_slow_down(part: Part, name: str, key: str) -> list[float]:
    """What share of its rate the loop of Python lost: with the rate `key`, while all was saved or only written."""
    before, after, rate = (part.series(name, each) for each in ("before_per_s", "after_per_s", key))
    calm = [(one + other) / 2 for one, other in zip(before, after, strict=True)]
    return [1 - ratio for ratio in paired_ratios(rate, calm)]


def loop_slow_down(part: Part, name: str) -> list[float]:
    """Seconds / seconds of the loop without saves - 1, paired by round."""
    series = part.series(name)
    return [ratio - 1 for ratio in paired_ratios(series, part.series(NO_SAVES))] if series else []


def of_memcpy(part: Part, key: str) -> list[float]:
    """Seconds of a copy of as many bytes / seconds, paired by round."""
    return paired_ratios(_restores(part, "memcpy_s"), _restores(part, key))


def bars(result: Result) -> Iterator[Bar]:
    """The bars that hold for the parts of `result`, with their medians."""
    part = result.find(SAVES)
    if part and _is_full(part, world=MIN_WORLD, nbytes=MIN_NBYTES) and part.scenario.state.num_tensors >= MIN_TENSORS:
        found = {each.name for each in part.able}
        if OURS in found:
            blocked_s, step_wait_s = (
                median(part.series(OURS, key, measure=BESIDE_WORK)) for key in ("blocked_s", "step_wait_s")
            )
            persist_share = median(part.shares(OURS, "persist_s", measure=ALONE))
            peak_nbytes = part.peak_nbytes(OURS, ALONE, BESIDE_WORK)
            yield judged("blocked", 1e3 * blocked_s, BLOCKED_MS, " ms")
            yield judged("step wait", 1e3 * step_wait_s, STEP_WAIT_MS, " ms")
            yield judged("persist, of raw", persist_share, SHARE_OF_RAW, at_least=True)
            yield judged("CPU", part.cpu_s_per_gb(OURS, measure=ALONE), CPU_S_PER_GB, " s/GB")
            yield judged("extra memory per rank", peak_nbytes / 2**20, MEMORY_MIB, " MiB")
        if OURS_SYNC in found:
            share = median(part.shares(OURS_SYNC, measure=ALONE))
            yield judged("holdfast.save, of raw", share, SHARE_OF_RAW, at_least=True)
    part = result.find(RESTORE)
    if part and _is_full(part, world=MIN_WORLD, nbytes=MIN_NBYTES):
        yield judged("restore, of memcpy", median(of_memcpy(part, "seconds")), SHARE_OF_MEMCPY, at_least=True)
    part = result.find(PYTHON)
    if part and _is_full(part, world=1, nbytes=MIN_PYTHON_NBYTES) and part.series(OURS):
        slow_down = median(python_slow_down(part, OURS, "persisting_per_s"))
        yield judged("Python-bound rank slowed down by", 100 * slow_down, 100 * PYTHON_SLOW_DOWN, " %")
    part = result.find(LOOP)
    if part and _is_full(part, world=MIN_WORLD, nbytes=MIN_LOOP_NBYTES) and part.series(OURS):
        yield judged("loop slowed down by", 100 * median(loop_slow_down(part, OURS)), 100 * LOOP_SLOW_DOWN, " %")


def first_blocked_s(part: Part, name: str) -> float:
    """How long the first save of a contender blocked, its set-up included."""
    first = next(each for each in part.samples if (each.contender, each.measure) == (name, ALONE))
    assert first.round == WARM_UP
    return max(first.values["blocked_s"])


def _is_full(part: Part, *, world: int, nbytes: int) -> bool:
    scenario = part.scenario
    return scenario.rounds >= MIN_ROUNDS and scenario.world >= world and scenario.state.nbytes >= nbytes


def _restores(part: Part, key: str) -> list[float]:
    """A figure of each restore, whether the ranks died when their save was staged or durable."""
    of = sum if key == "moved_cpu_s" else max
    return [of(sample.values[key]) for sample in sorted(part.samples, key=lambda sample: sample.round)]


# Tables


def render_engine(result: Result) -> str:
    """The figures of `result` as Markdown: of each part that was measured."""
    saves, restore, python, loop = map(result.find, PARTS)
    machines = "; ".join(dict.fromkeys(f"{in_words(part.environment)}, {part.date[:10]}" for part in result.parts))
    packages = "".join(f", {name} {version}" for name, version in (saves.packages if saves else {}).items())
    paragraphs = [
        *(_saves(saves) if saves else ()),
        *(_restore(restore) if restore else ()),
        *([_slow_downs(python, loop)] if python or loop else ()),
        *([_about_python(python)] if python else ()),
        *([_about_loop(loop)] if loop else ()),
        *verdicts(bars(result), "for holdfast"),
        f"{machines}{packages}. {samples_link(result.name)}.",
    ]
    return "\n\n".join(paragraphs)


def _saves(part: Part) -> tuple[str, str]:
    def peak(name: str) -> str:
        return NO_FIGURE if name == RAW else memory(part, name, ALONE, BESIDE_WORK)

    lines = table(
        "",
        labels(part),
        [
            figures("save blocks, ms", part, "blocked_s", 1, measure=BESIDE_WORK, scale=1e3),
            figures("next step waits, ms", part, "step_wait_s", 1, measure=BESIDE_WORK, scale=1e3),
            figures("durable after, s", part, measure=ALONE),
            shares(part, ALONE),
            ("CPU, s/GB", lambda name: cpu(part, name, ALONE)),
            ("memory per rank, MB", peak),
        ],
    )
    scenario = part.scenario
    first = ", ".join(f"{name} {first_blocked_s(part, name):.2f}" for name in labels(part) if name != RAW)
    synced = "; ".join(f"{contender.name}: {contender.durable}" for contender in part.able)
    persisted = text(part.shares(OURS, "persist_s", measure=ALONE))
    persisting = f" (holdfast, from the end of the copy: {persisted})" if OURS in labels(part) else ""
    how = (
        f"{scenario.state.nbytes / 1e9:.2f} GB ({scenario.state.num_tensors:,} tensors), {scenario.world} ranks, "
        f"medians of {scenario.rounds} interleaved rounds (lowest to highest) after a warm-up. Blocked: the call of "
        f"save, beside {scenario.facts['work_s']:g} s of work per step. The next step waits as long as it takes more "
        "than one without a save. Durable, shares and CPU (of all processes) are of saves beside which ranks do "
        f"nothing. Of raw: raw seconds / seconds, paired by round{persisting}; raw limit: best of "
        f"{raw_in_words(part)} ({part.raw_way(ALONE)}). Memory is the proportional set size of all processes beyond "
        f"what there was before a contender's first save; holdfast has {scenario.facts['generations']} generations of "
        f"the state in the memory of the node beside it. What durable means: {synced}. The first save of each blocked "
        f"for, s: {first}. Every contender's last save is loaded and compared with what was saved.{reasons(part)}"
    )
    return lines, how


def _restore(part: Part) -> tuple[str, str]:
    rows = {
        "seconds": "restore from node memory (verified)",
        "moved_s": "copy of each tensor, with its digests, and no more",
        "memcpy_s": "memcpy of as many bytes",
        "load_s": "load from storage, cold caches (verified)",
    }

    def share(key: str) -> str:
        return {"memcpy_s": "1", "load_s": NO_FIGURE}.get(key) or text(of_memcpy(part, key))

    lines = table(
        "after SIGKILL of all ranks", rows, [("s", lambda key: text(_restores(part, key))), ("of memcpy", share)]
    )
    scenario = part.scenario
    moved_cpu_s = median(_restores(part, "moved_cpu_s")) / (scenario.state.nbytes / 1e9)
    how = (
        f"{scenario.state.nbytes / 1e9:.2f} GB, {scenario.world} ranks, medians of {scenario.rounds} rounds (lowest "
        "to highest). In each, ranks that have saved are killed, and new ones have everything but the state when the "
        "clock starts. The memcpy is of one block from touched memory to touched memory, by all ranks at once, best of "
        f"three, and so is the copy of each tensor; with digests it takes {moved_cpu_s:.2f} s of CPU per GB, "
        "of a save as of a restore. Every state is compared with what was saved."
    )
    return lines, how


def _slow_downs(python: Part | None, loop: Part | None) -> str:
    def percent(part: Part | None, slow_down: Callable[[Part, str], list[float]]) -> Callable[[str], str]:
        return lambda name: text(slow_down(part, name) if part else [], 1, scale=100)

    # Those beside Python first, as they are there.
    names = dict.fromkeys(each.name for part in (python, loop) if part for each in part.able)
    persisting, saving = (partial(python_slow_down, key=key) for key in ("persisting_per_s", "saving_per_s"))
    return table(
        "slowed down by, %",
        {name: name for name in names},
        [
            ("loop of Python, while persisting", percent(python, persisting)),
            ("with the copy", percent(python, saving)),
            ("training loop, all cores busy", percent(loop, loop_slow_down)),
        ],
    )


def _about_python(part: Part) -> str:
    return (
        f"Python: one rank counts beside a save of {part.scenario.state.nbytes / 1e9:.2f} GB, with a core to spare; "
        f"its rate against that just before and after, medians of {part.scenario.rounds} rounds."
    )


def _about_loop(part: Part) -> str:
    facts, state = part.scenario.facts, part.scenario.state

    def lag_s(name: str) -> float:
        durable, ended = part.series(name, "durable_s"), part.series(name)
        return median(late - end for late, end in zip(durable, ended, strict=True))

    lags = ", ".join(f"{each.name} {lag_s(each.name):.2f}" for each in part.able)
    return (
        f"Training loop: {part.scenario.world} ranks with the arithmetic of {facts['tokens']} tokens each per step, "
        f"{facts['steps']} steps in {text(part.series(NO_SAVES))} s without saves, and with a save of "
        f"{state.nbytes / 1e9:.2f} GB every {facts['every']} steps; medians of {part.scenario.rounds} interleaved "
        f"rounds. `{RAW}` only writes as many bytes. The last save was durable after the end of the loop, s: {lags}."
    )


ENGINE = Benchmark("engine", {name: partial(measure_engine, name) for name in PARTS}, render_engine, bars)
