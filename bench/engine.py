"""``python -m bench engine``: saves that training does not wait for, restores from the memory of the node, saves beside
a loop of Python, and saves in a training loop on all cores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from bench.benchmark import Bar, Benchmark, Options, judged, verdicts
from bench.contenders import BACKGROUND, OURS, OURS_SYNC, select
from bench.engine_turns import ALONE, BESIDE_WORK, MEASURES, NO_SAVES, PythonLoop, Restores, Saves, TrainingLoop
from bench.markdown import NO_FIGURE, cpu, labels, memory, of_raw, reasons, samples_link, table, text
from bench.runner import Job, Turns, measure
from bench.schema import RAW, WARM_UP, BenchError, Part, Result, Scenario, paired_ratios
from bench.state import LlamaLike
from bench.ways import GENERATIONS

SAVES, RESTORE, PYTHON, LOOP = ("saves", "restore", "python", "loop")
#: With 111 layers, model and optimizer have 4,008 tensors.
NUM_LAYERS = 111

#: The bars hold from so many rounds, ranks and tensors on, and from so many GB as a state has GiB at full size.
MIN_ROUNDS, MIN_WORLD, MIN_TENSORS = 7, 2, 3_000


class Measured(NamedTuple):
    """What is measured in a part: a state of `gib`, of which `copies` are on the device at once. `timed` are facts in
    seconds, and shorter at a smaller scale."""

    turns: type[Turns]
    gib: float
    copies: int
    world: int = 0
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
    part = PARTS[name]
    names, absent = select(options.contenders, BACKGROUND)
    names = tuple(each for each in part.turns.registry if each in names or part.turns is Restores)
    if not set(names) - {RAW}:
        known = ", ".join(part.turns.registry)
        raise BenchError(f"None of the contenders saves in the background. Choose from {known}.")
    rounds = options.rounds or MIN_ROUNDS
    facts = {**part.facts, **{key: options.scale * seconds for key, seconds in part.timed.items()}}
    job = Job(
        scenario=Scenario(name=name, world=part.world or options.world or MIN_WORLD, rounds=rounds, facts=facts),
        turns=part.turns,
        recipe=LlamaLike(options.nbytes(part.gib), "rows", options.number(NUM_LAYERS)),
        contenders=names,
        # Those that die leave all that they saved.
        copies=part.copies + rounds * part.turns.mortal,
    )
    return measure(options, job, absent=absent if name == SAVES else {})


# Figures


def python_slow_down(part: Part, name: str, key: str) -> list[float]:
    """Shares of its rate that the loop of Python lost when it had the rate `key`."""
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
    """Seconds that a contender's first save blocked, its set-up included."""
    first = part.taken(name, ALONE)[0]
    assert first.round == WARM_UP
    return max(first.values["blocked_s"])


def _full(result: Result, name: str, contender: str) -> Part | None:
    """The part `name`, if it is of full size and `contender` took part."""
    part, full = result.find(name), PARTS[name]
    if part is None or contender not in {sample.contender for sample in part.samples}:
        return None
    scenario, state = part.scenario, part.scenario.state
    enough = state.nbytes >= full.gib * 1e9 and state.num_tensors >= MIN_TENSORS and scenario.rounds >= MIN_ROUNDS
    return part if enough and scenario.world >= (full.world or MIN_WORLD) else None


def _restores(part: Part, key: str) -> list[float]:
    """A figure of each restore, after a staged or a durable save."""
    of = sum if key == "moved_cpu_s" else max
    return [of(sample.values[key]) for sample in sorted(part.samples, key=lambda sample: sample.round)]


# Tables


def render_engine(result: Result) -> str:
    saves, restore, python, loop = map(result.part, PARTS)
    machines = "; ".join(dict.fromkeys(f"{part.environment.in_words()}, {part.date[:10]}" for part in result.parts))
    packages = "".join(f", {name} {version}" for name, version in saves.packages.items())
    where = f"{machines}{packages}. {samples_link(result.name)}."
    paragraphs = (*_saves(saves), *_restore(restore), *_slow_downs(python, loop))
    return "\n\n".join([*paragraphs, *verdicts(bars(result), "for holdfast"), where])


def _saves(part: Part) -> tuple[str, str]:
    waits = ("save blocks, ms", "next step waits, ms")
    titles = ("", *waits, "durable after, s", "of raw", "CPU, s/GB", "memory per rank, MB")
    rows = (
        (
            label,
            *(text(part.series(name, key, measure=BESIDE_WORK), 1, scale=1e3) for key in ("blocked_s", "step_wait_s")),
            text(part.series(name, measure=ALONE)),
            of_raw(part, name, ALONE),
            cpu(part, name, ALONE),
            NO_FIGURE if name == RAW else memory(part, name, *MEASURES),
        )
        for name, label in labels(part).items()
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
        f"{part.raw_in_words()} ({part.raw_way(ALONE)}). Memory is the proportional set size of all processes beyond "
        f"what there was before a contender's first save; holdfast has {scenario.facts['generations']} generations of "
        f"the state in the memory of the node beside it. What durable means: {synced}. The first save of each blocked "
        f"for, s: {first}. Every contender's last save is loaded and compared with what was saved.{reasons(part)}"
    )
    return table(titles, *rows), how


def _restore(part: Part) -> tuple[str, str]:
    rows = (
        ("restore from node memory (verified)", "seconds", text(of_memcpy(part, "seconds"))),
        ("copy of each tensor, with its digests, and no more", "moved_s", text(of_memcpy(part, "moved_s"))),
        ("memcpy of as many bytes", "memcpy_s", "1"),
        ("load from storage, cold caches (verified)", "load_s", NO_FIGURE),
    )
    titles = ("after SIGKILL of all ranks", "s", "of memcpy")
    lines = table(titles, *((label, text(_restores(part, key)), share) for label, key, share in rows))
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


def _slow_downs(python: Part, loop: Part) -> tuple[str, str, str]:
    def percent(series: list[float]) -> str:
        return text(series, 1, scale=100)

    def lag_s(name: str) -> float:
        ends = zip(loop.series(name, "durable_s"), loop.series(name), strict=True)
        return median(durable_s - end_s for durable_s, end_s in ends)

    # Those beside Python first, as they are there.
    names = dict.fromkeys(each.name for part in (python, loop) for each in part.able)
    beside = ("loop of Python, while persisting", "with the copy", "training loop, all cores busy")
    rows = (
        (
            name,
            *(percent(python_slow_down(python, name, key)) for key in ("persisting_per_s", "saving_per_s")),
            percent(loop_slow_down(loop, name)),
        )
        for name in names
    )
    beside_python = (
        f"Python: one rank counts beside a save of {python.scenario.state.nbytes / 1e9:.2f} GB, with a core to "
        f"spare; its rate against that just before and after, medians of {python.scenario.rounds} rounds."
    )
    scenario, facts = loop.scenario, loop.scenario.facts
    beside_training = (
        f"Training loop: {scenario.world} ranks with the arithmetic of {facts['tokens']} tokens each per step, "
        f"{facts['steps']} steps in {text(loop.series(NO_SAVES))} s without saves, and with a save of "
        f"{scenario.state.nbytes / 1e9:.2f} GB every {facts['every']} steps; medians of {scenario.rounds} "
        f"interleaved rounds. `{RAW}` only writes as many bytes. The last save was durable after the end of the "
        f"loop, s: {', '.join(f'{each.name} {lag_s(each.name):.2f}' for each in loop.able)}."
    )
    return table(("slowed down by, %", *beside), *rows), beside_python, beside_training


ENGINE = Benchmark("engine", {name: partial(measure_engine, name) for name in PARTS}, render_engine, bars)
