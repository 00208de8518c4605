"""``python -m bench engine``: saves that training does not wait for, restores from memory, and what both cost.

Four parts: saves, restores from the memory of the node, saves beside a loop of Python, and saves in a training loop on
all cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from bench.benchmark import Bar, Benchmark, Options, judged, verdicts
from bench.contenders import BACKGROUND, OURS, OURS_SYNC, select
from bench.engine_turns import ALONE, BESIDE_WORK, MEASURES, NO_SAVES, PythonLoop, Restores, Saves, TrainingLoop
from bench.environment import in_words
from bench.errors import SetupError
from bench.markdown import cpu, figures, labels, memory, raw_in_words, reasons, samples_link, shares, table, text
from bench.runner import Job, Turns, measure
from bench.schema import RAW, WARM_UP, Part, Result, Scenario, paired_ratios
from bench.state import LlamaLike
from bench.ways import GENERATIONS

SAVES, RESTORE, PYTHON, LOOP = ("saves", "restore", "python", "loop")
#: With 111 layers, model and optimizer have 4,008 tensors.
NUM_LAYERS = 111

#: The bars hold for as many rounds, ranks and tensors, at least, and for parts of their full size.
MIN_ROUNDS, MIN_WORLD, MIN_TENSORS = 7, 2, 3_000


class Measured(NamedTuple):
    """What is measured in a part: a state of `gib`, of which `copies` are on the device at once. `timed` are facts in
    seconds, and shorter at a smaller scale. The bars hold from `full_nbytes` on."""

    turns: type[Turns]
    gib: float
    full_nbytes: int
    copies: int
    world: int = 0
    facts: Mapping[str, Any] = {}
    timed: Mapping[str, float] = {}


PARTS = {
    # Two runs keep their head until after their next save.
    SAVES: Measured(Saves, 2.0, 2_000_000_000, 5, facts={"generations": GENERATIONS}, timed={"work_s": 1.0}),
    RESTORE: Measured(Restores, 2.0, 2_000_000_000, 1),
    # Two runs, and the save under way.
    PYTHON: Measured(PythonLoop, 1.0, 1_000_000_000, 3, world=1, timed={"calm_s": 1.0}),
    LOOP: Measured(TrainingLoop, 0.5, 500_000_000, 3, facts={"steps": 10, "every": 10, "tokens": 512}),
}


def measure_engine(name: str, options: Options) -> Part:
    part = PARTS[name]
    names, absent = select(options.contenders, BACKGROUND)
    names = tuple(each for each in part.turns.registry if each in names or part.turns is Restores)
    if not set(names) - {RAW}:
        raise SetupError(
            f"None of the contenders saves in the background. Choose from {', '.join(part.turns.registry)}."
        )
    rounds = options.rounds or MIN_ROUNDS
    facts = {**part.facts} | {key: options.scale * seconds for key, seconds in part.timed.items()}
    job = Job(
        scenario=Scenario(name=name, world=part.world or options.world or MIN_WORLD, rounds=rounds, facts=facts),
        turns=part.turns,
        recipe=LlamaLike(options.nbytes(part.gib), "rows", options.number(NUM_LAYERS)),
        contenders=names,
        # Those that die leave all that they saved.
        copies=part.copies + rounds * part.turns.mortal,
        in_memory=True,
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
    if part := _full(result, SAVES, OURS):
        persisted, peak_nbytes = part.shares(OURS, "persist_s", measure=ALONE), part.peak_nbytes(OURS, *MEASURES)
        yield judged("blocked", 1e3 * median(part.series(OURS, "blocked_s", measure=BESIDE_WORK)), 20, " ms")
        yield judged("step wait", 1e3 * median(part.series(OURS, "step_wait_s", measure=BESIDE_WORK)), 5, " ms")
        yield judged("persist, of raw", median(persisted), 0.9, at_least=True)
        yield judged("CPU", part.cpu_s_per_gb(OURS, measure=ALONE), 0.2, " s/GB")
        yield judged("extra memory per rank", peak_nbytes / 2**20, 128, " MiB")
    if part := _full(result, SAVES, OURS_SYNC):
        yield judged("holdfast.save, of raw", median(part.shares(OURS_SYNC, measure=ALONE)), 0.9, at_least=True)
    if part := _full(result, RESTORE, OURS):
        yield judged("restore, of memcpy", median(of_memcpy(part, "seconds")), 0.6, at_least=True)
    if part := _full(result, PYTHON, OURS):
        slow_down = 100 * median(python_slow_down(part, OURS, "persisting_per_s"))
        yield judged("Python-bound rank slowed down by", slow_down, 5, " %")
    if part := _full(result, LOOP, OURS):
        yield judged("loop slowed down by", 100 * median(loop_slow_down(part, OURS)), 3, " %")


def first_blocked_s(part: Part, name: str) -> float:
    """How long the first save of a contender blocked, its set-up included."""
    first = next(each for each in part.samples if (each.contender, each.measure) == (name, ALONE))
    assert first.round == WARM_UP
    return max(first.values["blocked_s"])


def _full(result: Result, name: str, contender: str) -> Part | None:
    """The part `name`, if it is of full size and `contender` took part."""
    part, full = result.find(name), PARTS[name]
    if part is None or contender not in {sample.contender for sample in part.samples}:
        return None
    scenario, state = part.scenario, part.scenario.state
    enough = state.nbytes >= full.full_nbytes and state.num_tensors >= MIN_TENSORS and scenario.rounds >= MIN_ROUNDS
    return part if enough and scenario.world >= (full.world or MIN_WORLD) else None


def _restores(part: Part, key: str) -> list[float]:
    """A figure of each restore, whether the ranks died when their save was staged or durable."""
    of = sum if key == "moved_cpu_s" else max
    return [of(sample.values[key]) for sample in sorted(part.samples, key=lambda sample: sample.round)]


# Tables


def render_engine(result: Result) -> str:
    saves, restore, python, loop = map(result.find, PARTS)
    machines = "; ".join(dict.fromkeys(f"{in_words(part.environment)}, {part.date[:10]}" for part in result.parts))
    packages = "".join(f", {name} {version}" for name, version in (saves.packages if saves else {}).items())
    paragraphs = [
        *(_saves(saves) if saves else ()),
        *(_restore(restore) if restore else ()),
        *(_slow_downs(python, loop) if python or loop else ()),
        *verdicts(bars(result), "for holdfast"),
        f"{machines}{packages}. {samples_link(result.name)}.",
    ]
    return "\n\n".join(paragraphs)


def _saves(part: Part) -> tuple[str, str]:
    def peak(name: str) -> str:
        return "-" if name == RAW else memory(part, name, *MEASURES)

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
        return "1" if key == "memcpy_s" else text([] if key == "load_s" else of_memcpy(part, key))

    def seconds(key: str) -> str:
        return text(_restores(part, key))

    lines = table("after SIGKILL of all ranks", rows, [("s", seconds), ("of memcpy", share)])
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


def _slow_downs(python: Part | None, loop: Part | None) -> Iterator[str]:
    def percent(part: Part | None, slow_down: Callable[[Part, str], list[float]]) -> Callable[[str], str]:
        return lambda name: text(slow_down(part, name) if part else [], 1, scale=100)

    # Those beside Python first, as they are there.
    names = dict.fromkeys(each.name for part in (python, loop) if part for each in part.able)
    persisting, saving = (partial(python_slow_down, key=key) for key in ("persisting_per_s", "saving_per_s"))
    columns = [
        ("loop of Python, while persisting", percent(python, persisting)),
        ("with the copy", percent(python, saving)),
        ("training loop, all cores busy", percent(loop, loop_slow_down)),
    ]
    yield table("slowed down by, %", {name: name for name in names}, columns)
    if python:
        yield (
            f"Python: one rank counts beside a save of {python.scenario.state.nbytes / 1e9:.2f} GB, with a core to "
            f"spare; its rate against that just before and after, medians of {python.scenario.rounds} rounds."
        )
    if loop:
        scenario, facts, durable_s = loop.scenario, loop.scenario.facts, partial(loop.series, key="durable_s")
        lags = {
            name: median(late - end for late, end in zip(durable_s(name), loop.series(name), strict=True))
            for name in labels(loop)
        }
        yield (
            f"Training loop: {scenario.world} ranks with the arithmetic of {facts['tokens']} tokens each per step, "
            f"{facts['steps']} steps in {text(loop.series(NO_SAVES))} s without saves, and with a save of "
            f"{scenario.state.nbytes / 1e9:.2f} GB every {facts['every']} steps; medians of {scenario.rounds} "
            f"interleaved rounds. `{RAW}` only writes as many bytes. The last save was durable after the end of the "
            f"loop, s: {', '.join(f'{name} {lag_s:.2f}' for name, lag_s in lags.items())}."
        )


ENGINE = Benchmark("engine", {name: partial(measure_engine, name) for name in PARTS}, render_engine, bars)
