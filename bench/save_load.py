"""``python -m bench io`` and ``python -m bench load``: saves and loads against the raw limit of the device.

Caches are cold before each turn, and every load is compared with what was saved. `io` is both, on one layout. In each
scenario of `load`, some ranks save once with every contender, untimed; then others load, in every round. There the raw
limit reads files that the loading ranks wrote, an even part of the state each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple, TypeAlias

import torch.distributed as dist

from bench.benchmark import Bar, Benchmark, Options, judged, verdicts
from bench.contenders import LATER, SAVING, select
from bench.costs import Watch, give_back
from bench.markdown import cpu, labels, memory, of_raw, reasons, table, text, whereabouts
from bench.raw import RAW_WAYS
from bench.runner import Found, Job, Turns, measure, require_same
from bench.schema import RAW, WARM_UP, Part, Result, Scenario
from bench.state import NUM_LAYERS, Layout, LlamaLike
from bench.ways import Site

MEASURES = SAVE, LOAD = ("save", "load")
#: The place of saves that `Loads` load.
_KEPT = "kept"

#: The size that the bars hold for, and the most that loads may cost.
MIN_NBYTES = 2_000_000_000
CPU_BAR_S_PER_GB, READ_BAR = 0.35, 1.02
#: The default memory budget, and 64 MiB beside it.
MEMORY_BAR_NBYTES = 128 << 20

_LOADERS = {"torch.save": "torch.load"}


class SaveLoad(Turns):
    """Every contender saves, then every one loads."""

    measures: tuple[str, ...] = MEASURES

    def __init__(self, job: Job, site: Site) -> None:
        super().__init__(job, site)
        self._expected = {name: self.way(name).memory.digests() for name in super().entrants(WARM_UP)}

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, Found]]:
        way, keeps = self.way(name), SAVE not in self.measures
        if measure == LOAD:
            way.memory.clear()
        folder = self.cold(way.place(_KEPT if keeps else number))
        operation = way.save if measure == SAVE else way.load
        give_back()
        watch = Watch() if number == WARM_UP else None
        found = self.observed(name, lambda: operation(folder))
        if watch is not None:
            found["peak_extra_nbytes"] = watch.stop()
        # No rank's digests take time from a rank that still loads: all have been there for the CPU seconds.
        if measure == LOAD:
            require_same(self._expected[name], way.memory.digests(), name=name)
        yield measure, found
        if measure == LOAD and not keeps:
            self.discard(name, folder)


class Many(SaveLoad):
    """The same of so many tensors that dcp takes part in the first round only."""

    def entrants(self, number: int) -> tuple[str, ...]:
        return tuple(name for name in super().entrants(number) if name != "dcp" or number == 1)


class Keep(Turns):
    """Every contender saves for `Loads`. For a job of no rounds but the warm-up."""

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, Found]]:
        _keep(self, name)
        return iter(())


class Loads(SaveLoad):
    """Every contender loads what `Keep` has saved; the raw limit reads what the ranks that load have written."""

    measures = (LOAD,)

    def __init__(self, job: Job, site: Site) -> None:
        super().__init__(job, site)
        for name in self.entrants(WARM_UP):
            if name.startswith(RAW):
                _keep(self, name)


def copies(names: Sequence[str]) -> int:
    """The most copies of the state on the device at once: one of each entrant, and one more in a run."""
    return len(names) + (len(RAW_WAYS) - 1) * (RAW in names) + (LATER in names)


def _keep(turns: Turns, name: str) -> None:
    way = turns.way(name)
    way.save(turns.cold(way.place(_KEPT)))
    dist.barrier()  # not all contenders wait for each other


def measure_io(options: Options) -> Part:
    names, absent = select(options.contenders, SAVING, ("torch.save", "dcp", "holdfast"))
    scenario = Scenario(name="io", world=options.world or 2, rounds=options.rounds or 7)
    recipe = LlamaLike(options.nbytes(gib=2.0))
    job = Job(scenario=scenario, turns=SaveLoad, recipe=recipe, contenders=names, copies=copies(names))
    return measure(options, job, absent=absent)


def render_io(result: Result) -> str:
    (part,) = result.parts
    scenario, raw = part.scenario, part.contenders[0]
    saving, loading = (part.raw_way(measure) for measure in MEASURES)

    def cells(name: str) -> Iterator[str]:
        for each in MEASURES:
            yield from (text(part.series(name, measure=each)), of_raw(part, name, each))
        for cost in (cpu, memory):
            yield ", ".join(cost(part, name, each) for each in MEASURES)

    costs = ("CPU, s/GB save, load", "extra memory per rank, MB save, load")
    titles = ("", "save, s", "of raw", "load, s", "of raw", *costs)
    rows = ((label, *cells(name)) for name, label in labels(part, "(loads verified)").items())
    how = (
        f"{scenario.state.nbytes / 1e9:.2f} GB ({scenario.state.num_tensors} tensors), {scenario.world} ranks, "
        f'medians of {scenario.rounds} interleaved rounds (lowest to highest); "of raw" is raw seconds / seconds, '
        f"paired by round. Saves are durable, caches are cold ({part.caches}). Raw limit: {raw.description}, "
        f"{raw.io}, {raw.durable}, best of {part.raw_in_words()} (save {saving}, load {loading})."
    )
    return "\n\n".join([table(titles, *rows), how, whereabouts(result.name, part)])


IO = Benchmark("io", {"io": measure_io}, render_io)

#: How the state lies over so many ranks that save or load it.
Side: TypeAlias = tuple[Layout, int]


class Move(NamedTuple):
    """A checkpoint that some ranks save and others load, and the least share of the raw limit. With fewer layers,
    tensors are larger."""

    title: str
    saved: Side
    loaded: Side
    share_bar: float = 0.0
    num_layers: int = NUM_LAYERS


MOVES = {
    "same": Move("2 ranks, same rows", ("rows", 2), ("rows", 2), 0.9),
    "columns": Move("rows -> columns, 2 ranks", ("rows", 2), ("columns", 2), 0.8),
    "grow": Move("rows, 1 -> 4 ranks", ("rows", 1), ("rows", 4), 0.7),
    "shrink": Move("rows, 4 -> 3 ranks", ("rows", 4), ("rows", 3), 0.7),
    "fsdp-tp": Move("FSDP(4) -> TP 2 x FSDP 2", ("rows", 4), ("fsdp-tp", 4), 0.7),
    # Of 2 GiB in two layers, each weight has more than 8 MiB.
    "replicas": Move("4 replicas", ("replicas", 4), ("replicas", 4), num_layers=2),
}


def measure_load(name: str, options: Options) -> Part:
    move = MOVES[name]
    names, absent = contenders_of(move, options)
    facts = {"saved": "{}, {} ranks".format(*move.saved), "loaded": "{}, {} ranks".format(*move.loaded)}

    def job(side: Side, turns: type[Turns], contenders: Sequence[str], rounds: int) -> Job:
        layout, world = side
        return Job(
            scenario=Scenario(name=name, title=move.title, world=world, rounds=rounds, facts=facts),
            turns=turns,
            recipe=LlamaLike(options.nbytes(gib=2.0), layout, move.num_layers),
            contenders=tuple(contenders),
            copies=copies(names) + move.saved[1],  # of replicas, a contender may store one for each rank
        )

    saving = job(move.saved, Keep, [each for each in names if each != RAW], 0)
    return measure(options, saving, job(move.loaded, Loads, names, options.rounds or 7), absent=absent)


def contenders_of(move: Move, options: Options) -> tuple[tuple[str, ...], dict[str, str]]:
    """The contenders that take part in `move`, and why the others that were asked for cannot."""
    names, absent = select(options.contenders, SAVING, [name for name in SAVING if name != LATER])
    if "torch.save" in names and move.saved != move.loaded:
        absent["torch.save"] = "a file holds what one rank held, so only as many ranks of the same layout can load"
    return tuple(name for name in names if name not in absent), absent


def bars(result: Result) -> Iterator[Bar]:
    parts = {
        part.scenario.name: part
        for part in result.parts
        if part.scenario.state.nbytes >= MIN_NBYTES and part.series("holdfast", measure=LOAD)
    }
    for name, part in parts.items():
        if least := MOVES[name].share_bar:
            share = median(part.shares("holdfast", measure=LOAD))
            yield judged(f"{part.scenario.title}, of raw:", share, least, form="{:.2f}", at_least=True)
    if same := parts.get("same"):
        cpu_s = same.cpu_s_per_gb("holdfast", measure=LOAD)
        yield judged("CPU seconds per GB:", cpu_s, CPU_BAR_S_PER_GB, form="{:.2f}")
    if replicas := parts.get("replicas"):
        read = replicas.per_byte("holdfast", "device_nbytes", measure=LOAD)
        yield judged(f"{replicas.scenario.title}, read of needed:", read, READ_BAR, form="{:.3f}")
    if parts:
        most = max(part.peak_nbytes("holdfast", LOAD) for part in parts.values())
        yield judged("extra memory of a rank:", most / 1e6, MEMORY_BAR_NBYTES / 1e6, form="{:.0f} MB")


def render_load(result: Result) -> str:
    last, able = result.parts[-1], labels(result.parts[-1], "(verified)")
    rows = {each.name: _LOADERS.get(each.name, able.get(each.name, each.name)) for each in last.contenders}
    rows[RAW] += ", GB/s"

    def lines(names: Sequence[str], cell: Callable[[Part, str], str]) -> str:
        def row(name: str) -> Iterator[str]:
            yield rows[name]
            for part in result.parts:
                yield "not possible" if name in part.not_possible else cell(part, name)

        return table(("", *(part.scenario.title for part in result.parts)), *map(row, names))

    sizes = sorted(f"{each.scenario.state.nbytes / 1e9:.2f}" for each in result.parts)
    about_shares = (
        f"Share of the raw limit (raw seconds / seconds, paired by round), medians of {last.scenario.rounds} "
        f"interleaved rounds (lowest to highest). {sizes[0]} to {sizes[-1]} GB; caches are cold before every load "
        f"({last.caches}), and every load is compared with what was saved. Raw limit: as many processes as ranks that "
        f"load read the state's bytes once, evenly, {last.contenders[0].io}, best of {last.raw_in_words()}."
    )
    about_costs = (
        "CPU seconds of all ranks per GB; extra memory of a rank, MB; bytes that all ranks read from the device per "
        "byte of the state (in brackets: that their read calls returned, from the page cache too; mapped files are "
        f"none).{reasons(*result.parts, renamed=_LOADERS)}"
    )
    shared, costs = lines([*rows], _share), lines([name for name in rows if name != RAW], _cost)
    judgements, where = verdicts(bars(result), "for holdfast"), whereabouts(result.name, last, packages=True)
    return "\n\n".join([shared, about_shares, costs, about_costs, *judgements, where])


def _share(part: Part, name: str) -> str:
    if name != RAW:
        return text(part.shares(name, measure=LOAD))
    return text([part.scenario.state.nbytes / 1e9 / seconds for seconds in part.series(name, measure=LOAD)])


def _cost(part: Part, name: str) -> str:
    read, asked = (part.per_byte(name, key, measure=LOAD) for key in ("device_nbytes", "asked_nbytes"))
    return f"{cpu(part, name, LOAD)}; {memory(part, name, LOAD)}; {read:.2f} ({asked:.2f})"


LOADS = Benchmark("load", {name: partial(measure_load, name) for name in MOVES}, render_load, bars)
