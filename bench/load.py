"""``python -m bench load``: loads onto the layout that saved and onto others, against the raw limit of the device.

Per scenario, the ranks that save come first: every contender saves once, untimed. Then come the ranks that load: in
every round each contender loads what it saved, from a cold cache. The raw limit reads files that the loading ranks
wrote, an even part of the state each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import msgspec

from bench.contenders import LATER, SAVING, select
from bench.markdown import label, raw_in_words, table, whereabouts
from bench.runner import Job, measure
from bench.save_load import Keep, Loads, copies
from bench.schema import RAW, Bar, Benchmark, Options, Part, Result
from bench.state import NUM_LAYERS, Layout, LlamaLike
from bench.statistics import median, text

#: The size that the bars hold for; the least share of the raw limit that each scenario is to reach, and what all of
#: them may cost at most.
MIN_NBYTES = 2_000_000_000
SHARE_BARS = {"same": 0.9, "columns": 0.8, "grow": 0.7, "shrink": 0.7, "fsdp-tp": 0.7}
CPU_BAR_S_PER_GB = 0.35
READ_BAR = 1.02
#: The default memory budget, and 64 MiB beside it.
MEMORY_BAR_NBYTES = 128 << 20

LOAD = "load"
_LABELS = {RAW: "raw limit, GB/s", "torch.save": "torch.load"}
_NO_OTHER_LAYOUT = "a file holds what one rank held, so only as many ranks of the same layout can load"


class Side(NamedTuple):
    """The ranks that save or load, and how the state lies over them."""

    layout: Layout
    world: int


class Move(NamedTuple):
    """A checkpoint that is `saved` by some ranks and `loaded` by others. With fewer layers, tensors are larger."""

    title: str
    saved: Side
    loaded: Side
    num_layers: int = NUM_LAYERS


MOVES = {
    "same": Move("2 ranks, same rows", Side("rows", 2), Side("rows", 2)),
    "columns": Move("rows -> columns, 2 ranks", Side("rows", 2), Side("columns", 2)),
    "grow": Move("rows, 1 -> 4 ranks", Side("rows", 1), Side("rows", 4)),
    "shrink": Move("rows, 4 -> 3 ranks", Side("rows", 4), Side("rows", 3)),
    "fsdp-tp": Move("FSDP(4) -> TP 2 x FSDP 2", Side("rows", 4), Side("fsdp-tp", 4)),
    # Of 2 GiB in two layers, each weight has more than 8 MiB.
    "replicas": Move("4 replicas", Side("replicas", 4), Side("replicas", 4), num_layers=2),
}


def measure_load(name: str, options: Options) -> Part:
    """Loads of every contender that can take part in a move, in paired rounds."""
    move = MOVES[name]
    names, absent = contenders_of(move, options)

    def recipe(side: Side) -> LlamaLike:
        return LlamaLike(options.nbytes(gib=2.0), side.layout, move.num_layers)

    loading = Job(
        name=name,
        title=move.title,
        turns=Loads,
        recipe=recipe(move.loaded),
        world=move.loaded.world,
        rounds=options.rounds or 7,
        contenders=names,
        # Of replicas, a contender may store one for each rank.
        copies=copies(names) + move.saved.world,
        facts={
            when: f"{side.layout}, {side.world} ranks"
            for when, side in (("saved", move.saved), ("loaded", move.loaded))
        },
    )
    saving = msgspec.structs.replace(
        loading,
        turns=Keep,
        recipe=recipe(move.saved),
        world=move.saved.world,
        rounds=0,
        contenders=tuple(each for each in names if each != RAW),
    )
    return measure(loading, options, first=saving, absent=absent)


def contenders_of(move: Move, options: Options) -> tuple[tuple[str, ...], dict[str, str]]:
    """The contenders that take part in `move`, and why the others that were asked for cannot."""
    names, absent = select(options.contenders, SAVING, [name for name in SAVING if name != LATER])
    if "torch.save" in names and move.saved != move.loaded:
        names, absent = tuple(name for name in names if name != "torch.save"), absent | {"torch.save": _NO_OTHER_LAYOUT}
    return names, absent


def bars(result: Result) -> Iterator[Bar]:
    """What holdfast is to reach, in the parts of full size that it took part in."""
    parts = [
        part
        for part in result.parts
        if part.scenario.state.nbytes >= MIN_NBYTES and part.series("holdfast", measure=LOAD)
    ]
    for part in parts:
        least, share = SHARE_BARS.get(part.scenario.name), median(part.shares("holdfast", measure=LOAD))
        if least is not None:
            words = f"{part.scenario.title}, of raw: {share:.2f} (at least {least})"
            yield Bar("of raw", share, least, words, at_least=True)
    for part in parts:
        cpu_s, read = part.cpu_s_per_gb("holdfast", measure=LOAD), _per_byte(part, "holdfast", "device_nbytes")
        if part.scenario.name == "same":
            words = f"CPU seconds per GB: {cpu_s:.2f} (at most {CPU_BAR_S_PER_GB})"
            yield Bar("CPU", cpu_s, CPU_BAR_S_PER_GB, words)
        if part.scenario.name == "replicas":
            words = f"{part.scenario.title}, read of needed: {read:.3f} (at most {READ_BAR})"
            yield Bar("read", read, READ_BAR, words)
    if parts:
        most = max(part.peak_nbytes("holdfast", LOAD) for part in parts)
        words = f"extra memory of a rank: {most / 1e6:.0f} MB (at most {MEMORY_BAR_NBYTES / 1e6:.0f})"
        yield Bar("memory", most, MEMORY_BAR_NBYTES, words)


def render_load(result: Result) -> str:
    """The figures of `result` as Markdown."""
    last = result.parts[-1]
    labels = {each.name: _LABELS.get(each.name) or label(each, "(verified)") for each in last.contenders}
    costly = {name: label for name, label in labels.items() if name != RAW}
    lines = [*table("", labels, _columns(result, _share)), "", _about_shares(result), ""]
    lines += [*table("", costly, _columns(result, _cost)), "", _about_costs(result)]
    judged = "; ".join(bar.text() for bar in bars(result))
    if judged:
        lines += ["", f"Bars for holdfast: {judged}."]
    return "\n".join((*lines, "", whereabouts(result.name, last, packages=True)))


def _columns(result: Result, cell: Callable[[Part, str], str]) -> list[tuple[str, Callable[[str], str]]]:
    """A column for each scenario."""

    def of(part: Part, name: str) -> str:
        return "not possible" if name in part.not_possible else cell(part, name)

    return [(part.scenario.title, partial(of, part)) for part in result.parts]


def _share(part: Part, name: str) -> str:
    if name != RAW:
        return text(part.shares(name, measure=LOAD))
    nbytes = part.scenario.state.nbytes
    return text([nbytes / 1e9 / seconds for seconds in part.series(name, measure=LOAD)])


def _cost(part: Part, name: str) -> str:
    read, asked = (_per_byte(part, name, key) for key in ("device_nbytes", "asked_nbytes"))
    memory = f"{part.peak_nbytes(name, LOAD) / 1e6:.0f}"
    return f"{part.cpu_s_per_gb(name, measure=LOAD):.2f}; {memory}; {read:.2f} ({asked:.2f})"


def _per_byte(part: Part, name: str, key: str) -> float:
    """The bytes of all ranks per byte of the state: what every rank holds counts once."""
    return median([each / part.scenario.state.nbytes for each in part.series(name, key, measure=LOAD, of=sum)])


def _about_shares(result: Result) -> str:
    part = result.parts[-1]
    sizes = sorted(f"{each.scenario.state.nbytes / 1e9:.2f}" for each in result.parts)
    return (
        f"Share of the raw limit (raw seconds / seconds, paired by round), medians of {part.scenario.rounds} "
        f"interleaved rounds (lowest to highest). {sizes[0]} to {sizes[-1]} GB; caches are cold before every load "
        f"({part.caches}), and every load is compared with what was saved. Raw limit: as many processes as ranks that "
        f"load read the state's bytes once, evenly, {part.contenders[0].io}, best of {raw_in_words(part)}."
    )


def _about_costs(result: Result) -> str:
    every = dict.fromkeys(
        f" Not possible for {_LABELS.get(name, name)}: {reason}."
        for part in result.parts
        for name, reason in part.not_possible.items()
    )
    return (
        "CPU seconds of all ranks per GB; extra memory of a rank, MB; bytes that all ranks read from the device per "
        "byte of the state (in brackets: that their read calls returned, from the page cache too; mapped files are "
        f"none).{''.join(every)}"
    )


LOADS = Benchmark("load", {name: partial(measure_load, name) for name in MOVES}, render_load, bars)
