"""``python -m bench exchange``: checkpoints of other systems, to a run and back, beside the tools of these systems; and
a folder of Hugging Face, loaded onto a model of FSDP2.

Caches are cold before each turn, and what the first one of each contender wrote is compared, tensor by tensor. The raw
limit of a conversion copies a file of as many bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

from bench.benchmark import Bar, Benchmark, Options
from bench.converters import (
    CONVERSIONS,
    NUM_RANKS,
    PLAIN,
    RAW_COPIES,
    SAVED,
    Converter,
    ReadTensor,
    save_inputs,
    write_inputs,
)
from bench.costs import Watch, give_back, io_nbytes, scratch, settle
from bench.hub import HubLike
from bench.hub_loads import HUB_LOADING, STOCK, HubLoads
from bench.markdown import about, labels, memory, of_raw, table, text
from bench.runner import Job, in_ranks, measure, measured, require_same
from bench.schema import OURS, RAW, WARM_UP, Part, Result, Sample, StateSize, paired_ratios, rotated
from bench.state import as_bytes, content, digest

#: Weights and two moments.
GIB, ROUNDS = 3.75, 5
LOAD = "hf-load"
SHARE_BAR, MOVED_BAR, MEMORY_BAR_MIB = 0.7, 1.02, 512


def measure_conversion(name: str, options: Options) -> Part:
    """Conversions in one process, which is new for each part."""
    conversion = CONVERSIONS[name]
    recipe = HubLike(options.nbytes(GIB), conversion.model_only)
    with scratch(options.folder) as folder:
        able = (each for name, each in conversion.entrants.items() if name not in conversion.absent)
        names = frozenset(each.source for each in able)
        if names & SAVED:
            in_ranks(NUM_RANKS, save_inputs, folder, recipe, names)
        more = [recipe._replace(model_only=True)] if conversion.weights_twice else []
        in_ranks(1, write_inputs, folder, recipe, names, *more)
        return in_ranks(1, take_turns, name, folder, recipe, options)


def take_turns(name: str, folder: Path, recipe: HubLike, options: Options) -> Part:
    """The samples of all contenders."""
    conversion, wanted = CONVERSIONS[name], options.contenders
    able = {each: kind for each, kind in conversion.entrants.items() if each not in conversion.absent}
    entrants = {each: kind for each, kind in able.items() if not wanted or each in wanted}
    every = RAW_COPIES | entrants
    size = StateSize((folder / PLAIN).stat().st_size, len(recipe.contents()))
    scenario = options.scenario(name, title=conversion.title, rounds=ROUNDS, state=size)
    samples = [
        Sample(each, number, {key: (value,) for key, value in take(each, every[each], number, folder, recipe).items()})
        for number in range(WARM_UP, scenario.rounds + 1)
        for each in rotated(tuple(every), number)
    ]
    return measured(
        scenario,
        samples,
        options,
        contenders=conversion.about(),
        not_possible=conversion.absent,
        packages={kind.package: version(kind.package) for kind in entrants.values() if kind.package},
    )


def take(name: str, converter: Converter, number: int, folder: Path, recipe: HubLike) -> dict[str, float]:
    """One conversion, from a cold cache. The warm-up is watched for its memory, and compared."""
    with scratch(folder) as place:
        settle(folder)
        give_back()
        watch = Watch() if number == WARM_UP else None
        try:
            before, start_s = io_nbytes(), time.monotonic()
            converter.run(folder, place / "target")
            found = {"seconds": time.monotonic() - start_s}
            found |= {key: now - before[key] for key, now in io_nbytes().items()}
        finally:
            peak = watch.stop() if watch else 0
        if watch:
            found["peak_extra_nbytes"] = peak
            compare(name, converter.read(place / "target"), recipe)
    return found


def compare(name: str, read: ReadTensor, recipe: HubLike) -> None:
    """Raise `BenchError` where contender `name` wrote other tensors than it was given."""
    expected, got = dict[str, str](), dict[str, str]()
    for key, (path, shape) in recipe.contents().items():
        tensor = read(key, shape)
        if tensor is not None:
            expected[key], got[key] = digest(as_bytes(content(path, shape))), digest(as_bytes(tensor))
    require_same(expected, got, name=name)


def measure_load(options: Options) -> Part:
    scenario = options.scenario(LOAD, title="a Hugging Face folder onto FSDP2", world=NUM_RANKS, rounds=ROUNDS)
    return measure(options, Job(scenario, HubLoads, HubLike(options.nbytes(GIB), model_only=True), HUB_LOADING))


def bars(part: Part) -> Iterator[Bar]:
    title = part.scenario.title
    if not part.taken(OURS):
        return
    yield Bar(f"{title}, read of needed", part.per_byte(OURS, "device_nbytes"), MOVED_BAR, form=".3f")
    if part.scenario.name == LOAD:
        if part.taken(STOCK):
            seconds = median(paired_ratios(part.series(OURS), part.series(STOCK)))
            yield Bar(f"{title}, time of {STOCK}", seconds, 1.0, form=".2f")
            yield Bar(f"{title}, memory of {STOCK}", part.peak_nbytes(OURS) / part.peak_nbytes(STOCK), 1.0, form=".2f")
        return
    yield Bar(f"{title}, written of needed", part.per_byte(OURS, "written_nbytes"), MOVED_BAR, form=".3f")
    yield Bar(f"{title}, of raw", median(part.shares(OURS)), SHARE_BAR, form=".2f", at_least=True)
    yield Bar(f"{title}, extra memory", part.peak_nbytes(OURS) / 2**20, MEMORY_BAR_MIB, " MiB", ".0f")


def tables(result: Result) -> Iterator[str]:
    for part in result.parts:
        is_load = part.scenario.name == LOAD
        columns: list[tuple[str, Callable[[str], str]]] = [
            ("s", partial(_seconds, part)),
            ("of raw", partial(of_raw, part, measure=part.samples[0].measure)),
            ("read of needed", partial(_moved, part, "device_nbytes")),
            ("written of needed", partial(_moved, part, "written_nbytes")),
            (f"extra memory{' per rank' if is_load else ''}, MB", partial(memory, part)),
        ]
        if is_load:
            del columns[3]
        yield table(part.scenario.title, labels(part.able), *columns)
        yield f"{about(part)} The fastest raw loop: {part.raw_way().removeprefix(RAW).strip()}."


def _seconds(part: Part, name: str) -> str:
    return text(part.series(name))


def _moved(part: Part, key: str, name: str) -> str:
    return f"{part.per_byte(name, key):.2f}"


PARTS = {name: partial(measure_conversion, name) for name in CONVERSIONS} | {LOAD: measure_load}
EXCHANGE = Benchmark("exchange", PARTS, tables, bars)
