"""``python -m bench io`` and ``python -m bench load``: saves and loads against the raw limit of the device.

Caches are cold before each turn, and every load is compared with what was saved. `io` is both, on one layout. In each
scenario of `load`, some ranks save once with every contender, untimed; then others load, in every round. There the raw
limit reads files that the loading ranks wrote, an even part of the state each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import NamedTuple, TypeAlias

import torch.distributed as dist

from bench.benchmark import Bar, Benchmark, Options
from bench.contenders import LOADING, SAVING
from bench.costs import Watch, give_back
from bench.markdown import about, cpu, fastest, labels, memory, of_raw, reasons, table, text
from bench.runner import Found, Job, Turns, measure, require_same
from bench.schema import OURS, RAW, WARM_UP, Part, Result, Scenario
from bench.state import NUM_LAYERS, Layout, LlamaLike
from bench.ways import Site

MEASURES = SAVE, LOAD = ("save", "load")
#: The place of saves that `Loads` load.
_KEPT = "kept"

#: The most that loads may cost. The memory is the default budget, and 64 MiB beside it.
CPU_BAR_S_PER_GB, READ_BAR, MEMORY_BAR_MB = 0.35, 1.02, (128 << 20) / 1e6


class SaveLoad(Turns):
    """Every contender saves, then every one loads."""

    measures: tuple[str, ...] = MEASURES
    #: All rounds load the same saves.
    keeps = False

    def __init__(self, job: Job, site: Site) -> None:
        super().__init__(job, site)
        self._expected = {name: self.way(name).memory.digests() for name in self.entrants}

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, Found]]:
        way, keeps = self.way(name), self.keeps
        if measure == LOAD:
            way.memory.clear()
        folder = self.cold(way.place(_KEPT if keeps else number))
        operation = way.save if measure == SAVE else way.load
        give_back()
        watch = self.watched(name) if number == WARM_UP else None
        found = self.observed(name, lambda: operation(folder))
        if watch is not None:
            found["peak_extra_nbytes"] = watch.stop()
        # No rank's digests take time from a rank that still loads: all have been there for the CPU seconds.
        if measure == LOAD:
            require_same(self._expected[name], way.memory.digests(), name=name)
        yield measure, found
        if measure == LOAD and not keeps:
            self.discard(name, folder)

    def watched(self, name: str) -> Watch:
        """A watch of the memory that a turn of `name` takes."""
        return Watch()


class Keep(Turns):
    """Every contender saves for `Loads`. For a job of no rounds but the warm-up."""

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, Found]]:
        _keep(self, name)
        return iter(())


class Loads(SaveLoad):
    """Every contender loads what `Keep` has saved; the raw limit reads what the ranks that load have written."""

    measures, keeps = (LOAD,), True

    def __init__(self, job: Job, site: Site) -> None:
        super().__init__(job, site)
        for name in self.entrants:
            if name.startswith(RAW):
                _keep(self, name)


def _keep(turns: Turns, name: str) -> None:
    way = turns.way(name)
    way.save(turns.cold(way.place(_KEPT)))
    dist.barrier()  # not all contenders wait for each other


def measure_io(options: Options) -> Part:
    recipe = LlamaLike(options.nbytes(gib=2.0))
    return measure(options, Job(options.scenario("io", world=2, rounds=7), SaveLoad, recipe, SAVING))


def io_tables(result: Result) -> Iterator[str]:
    (part,) = result.parts

    def both(cost: Callable[[Part, str, str], str]) -> Callable[[str], str]:
        return lambda name: ", ".join(cost(part, name, measure) for measure in MEASURES)

    yield table(
        "",
        labels(part.able),
        ("save, s", lambda name: text(part.series(name, measure=SAVE))),
        ("of raw", lambda name: of_raw(part, name, SAVE)),
        ("load, s", lambda name: text(part.series(name, measure=LOAD))),
        ("of raw", lambda name: of_raw(part, name, LOAD)),
        ("CPU, s/GB save, load", both(cpu)),
        ("extra memory per rank, MB save, load", both(memory)),
    )
    yield f"{about(part)} {fastest(part, *MEASURES)}"


IO = Benchmark("io", {"io": measure_io}, io_tables)

#: The layout of a state, and the number of ranks that save or load it.
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


def impossible(move: Move) -> dict[str, str]:
    """The contenders that cannot take part in `move`, and why."""
    reason = "a file holds what one rank held, so only as many ranks of the same layout can load"
    return {} if move.saved == move.loaded else {"torch.save": reason}


def measure_load(name: str, options: Options) -> Part:
    move, absent = MOVES[name], impossible(MOVES[name])

    def recipe(layout: Layout) -> LlamaLike:
        return LlamaLike(options.nbytes(gib=2.0), layout, move.num_layers)

    (before, num_saving), (after, num_loading) = move.saved, move.loaded
    unmeasured = Scenario(name=name, world=num_saving, rounds=WARM_UP)
    scenario = options.scenario(name, title=move.title, world=num_loading, rounds=7)
    peers = {name: kind for name, kind in LOADING.items() if name != RAW}
    saving = Job(unmeasured, Keep, recipe(before), peers, absent)
    return measure(options, saving, Job(scenario, Loads, recipe(after), LOADING, absent))


def bars(part: Part) -> Iterator[Bar]:
    name, title = part.scenario.name, part.scenario.title
    if not part.taken(OURS):
        return
    if least := MOVES[name].share_bar:
        yield Bar(f"{title}, of raw", median(part.shares(OURS, measure=LOAD)), least, form=".2f", at_least=True)
    if name == "same":
        yield Bar(f"{title}, CPU seconds per GB", 1e9 * part.per_byte(OURS, "cpu_s"), CPU_BAR_S_PER_GB, form=".2f")
    if name == "replicas":
        yield Bar(f"{title}, read of needed", part.per_byte(OURS, "device_nbytes"), READ_BAR, form=".3f")
    yield Bar(f"{title}, extra memory of a rank", part.peak_nbytes(OURS) / 1e6, MEMORY_BAR_MB, " MB", ".0f")


def load_tables(result: Result) -> Iterator[str]:
    last, rows = result.parts[-1], labels(result.parts[-1].contenders)

    def column(part: Part, cell: Callable[[Part, str], str]) -> tuple[str, Callable[[str], str]]:
        return part.scenario.title, lambda name: "not possible" if name in part.not_possible else cell(part, name)

    yield table("", rows, *(column(part, _share) for part in result.parts))
    sizes = sorted(f"{part.scenario.state.nbytes / 1e9:.2f}" for part in result.parts)
    yield f"{sizes[0]} to {sizes[-1]} GB, medians of {last.scenario.rounds} rounds.{reasons(*result.parts)}"
    peers = {label: name for label, name in rows.items() if name != RAW}
    yield table("", peers, *(column(part, _cost) for part in result.parts))


def _share(part: Part, name: str) -> str:
    if name != RAW:
        return text(part.shares(name))
    return text([part.scenario.state.nbytes / 1e9 / seconds for seconds in part.series(name)]) + " GB/s"


def _cost(part: Part, name: str) -> str:
    read, asked = (part.per_byte(name, key) for key in ("device_nbytes", "asked_nbytes"))
    return f"{cpu(part, name, LOAD)}; {memory(part, name)}; {read:.2f} ({asked:.2f})"


LOADS = Benchmark("load", {name: partial(measure_load, name) for name in MOVES}, load_tables, bars)
