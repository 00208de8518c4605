"""``python -m bench load``: loads onto the layout that saved and onto others, against the raw limit of the device.

Per scenario, the ranks that save come first: every contender saves once, untimed. Then come the ranks that load: in
every round each contender loads what it saved, from a cold cache. The raw limit reads files that the loading ranks
wrote, an even part of the state each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer

from bench.contenders import LATER, NAMES, described, entrants, not_installed
from bench.environment import package_versions
from bench.errors import SetupError
from bench.markdown import table, ways_in_words, whereabouts
from bench.options import Contenders, Folder, Gib, Name, Results, Rounds
from bench.placing import Layout
from bench.progress import describe, progress
from bench.raw import RAW_WAYS, takes_direct
from bench.runner import run, scratch
from bench.save_load import SaveLoad
from bench.schema import (
    RAW,
    RESULTS,
    Bar,
    Contender,
    Part,
    Result,
    Sample,
    Scenario,
    chosen,
    measured,
    require_raw_limit,
    write_result,
)
from bench.state import NUM_LAYERS, LlamaLike
from bench.statistics import median, text

#: Contenders that are packages of their own.
PACKAGES = ("torch_checkpointing", "torchsnapshot", "safetensors")

#: The least share of the raw limit that each scenario is to reach, and what all of them may cost at most.
SHARE_BARS = {"same": 0.9, "columns": 0.8, "grow": 0.7, "shrink": 0.7, "fsdp-tp": 0.7}
CPU_BAR_S_PER_GB = 0.35
READ_BAR = 1.02
#: The default memory budget, and 64 MiB beside it.
MEMORY_BAR_NBYTES = 128 << 20

LOAD = "load"
_LABELS = {RAW: "raw limit, GB/s", "torch.save": "torch.load"}


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

    def recipe(self, side: Side, min_nbytes: int) -> LlamaLike:
        """The recipe by which the ranks of `side` make the state."""
        return LlamaLike(min_nbytes, side.layout, self.num_layers)


MOVES = {
    "same": Move("2 ranks, same rows", Side("rows", 2), Side("rows", 2)),
    "columns": Move("rows -> columns, 2 ranks", Side("rows", 2), Side("columns", 2)),
    "grow": Move("rows, 1 -> 4 ranks", Side("rows", 1), Side("rows", 4)),
    "shrink": Move("rows, 4 -> 3 ranks", Side("rows", 4), Side("rows", 3)),
    "fsdp-tp": Move("FSDP(4) -> TP 2 x FSDP 2", Side("rows", 4), Side("fsdp-tp", 4)),
    # Of 2 GiB in two layers, each weight has more than 8 MiB.
    "replicas": Move("4 replicas", Side("replicas", 4), Side("replicas", 4), num_layers=2),
}


def load(
    *,
    gib: Gib = 2.0,
    rounds: Rounds = 7,
    scenario: Annotated[list[str] | None, typer.Option(help="Only this scenario; repeatable.")] = None,
    contender: Contenders = None,
    folder: Folder = Path(),
    name: Name = "load",
    results: Results = RESULTS,
) -> None:
    """Measure loads across layouts against the raw limit, each scenario in paired rounds."""
    if rounds < 1:
        raise SetupError("A run needs at least one round.")
    names = tuple(each for each in NAMES if each != LATER) if contender is None else (RAW, *contender)
    moves = {each: MOVES[each] for each in chosen(scenario, tuple(MOVES), kind="scenario")}
    jobs = {each: _jobs(move, names, rounds=rounds, min_nbytes=int(gib * 2**30)) for each, move in moves.items()}
    for saving, loading in jobs.values():
        # Of replicas, a contender may store one for each rank.
        loading.require_space(folder, num_more=saving.world)
    parts: list[Part] = []
    path: Path | None = None
    with progress(sum(loading.num_samples() for _, loading in jobs.values())) as advance:
        for each in moves:
            parts.append(_measure(each, names, *jobs[each], folder, advance))
            # Whatever happens to a later scenario, this one is kept.
            path = write_result(Result(name, tuple(parts)), results)
    for part in parts:
        require_raw_limit(part, LOAD)
    typer.echo(f"wrote {path}")


def why_not(contender: str, move: Move) -> str | None:
    """Why `contender` cannot take part in `move`; None if it can."""
    if contender == "torch.save" and move.saved != move.loaded:
        return "a file holds what one rank held, so only as many ranks of the same layout can load"
    return not_installed(contender, contender if contender in PACKAGES else None).get(contender)


def _jobs(move: Move, names: tuple[str, ...], *, rounds: int, min_nbytes: int) -> tuple[SaveLoad, SaveLoad]:
    """The job of the ranks that save, and the job of those that load."""
    able = tuple(name for name in names if why_not(name, move) is None)
    peers = tuple(name for name in able if name != RAW)
    recipes = (move.recipe(side, min_nbytes) for side in (move.saved, move.loaded))
    saving, loading = (
        SaveLoad(world=side.world, rounds=rounds, recipe=recipe, contenders=able, measures=(LOAD,))
        for side, recipe in zip((move.saved, move.loaded), recipes, strict=True)
    )
    return (
        msgspec.structs.replace(saving, rounds=1, contenders=peers, measures=(), kept=peers),
        msgspec.structs.replace(loading, kept=entrants((RAW,))),
    )


def _measure(
    name: str,
    names: tuple[str, ...],
    saving: SaveLoad,
    loading: SaveLoad,
    folder: Path,
    advance: Callable[[str], None],
) -> Part:
    move = MOVES[name]

    def tell(sample: Sample) -> None:
        advance(f"{move.title}: {describe(sample)}")

    with scratch(folder) as path:
        direct = takes_direct(path)
        run(saving, path, on_sample=tell)
        size, samples = run(msgspec.structs.replace(loading, direct=direct), path, on_sample=tell)
    sides = {"saved": move.saved, "loaded": move.loaded}
    return measured(
        Scenario(
            name=name,
            title=move.title,
            world=loading.world,
            rounds=loading.rounds,
            state=size,
            facts={when: f"{side.layout}, {side.world} ranks" for when, side in sides.items()},
        ),
        samples,
        folder,
        contenders=described(names, direct=direct),
        not_possible={each: reason for each in names if (reason := why_not(each, move)) is not None},
        raw_ways=tuple(RAW_WAYS),
        packages=package_versions(PACKAGES),
    )


def bars(result: Result) -> Iterator[Bar]:
    """The targets that holdfast must reach."""
    for part in result.parts:
        least, share = SHARE_BARS.get(part.scenario.name), median(part.shares("holdfast", measure=LOAD))
        if least is not None:
            words = f"{part.scenario.title}, of raw: {share:.2f} (at least {least})"
            yield Bar("of raw", share, least, words, at_least=True)
    for part in result.parts:
        cpu_s, read = part.cpu_s_per_gb("holdfast", measure=LOAD), _per_byte(part, "holdfast", "device_nbytes")
        if part.scenario.name == "same":
            words = f"CPU seconds per GB: {cpu_s:.2f} (at most {CPU_BAR_S_PER_GB})"
            yield Bar("CPU", cpu_s, CPU_BAR_S_PER_GB, words)
        if part.scenario.name == "replicas":
            words = f"{part.scenario.title}, read of needed: {read:.3f} (at most {READ_BAR})"
            yield Bar("read", read, READ_BAR, words)
    most = max(part.peak_nbytes("holdfast", LOAD) for part in result.parts)
    words = f"extra memory of a rank: {most / 1e6:.0f} MB (at most {MEMORY_BAR_NBYTES / 1e6:.0f})"
    yield Bar("memory", most, MEMORY_BAR_NBYTES, words)


def render_load(result: Result) -> str:
    """The figures of `result` as Markdown."""
    last = result.parts[-1]
    labels = {each.name: _label(each) for each in last.contenders}
    costly = {name: label for name, label in labels.items() if name != RAW}
    lines = [*table("", labels, _columns(result, _share)), "", _about_shares(result), ""]
    lines += [*table("", costly, _columns(result, _cost)), "", _about_costs(result)]
    if "holdfast" in labels:
        lines += ["", f"Bars for holdfast: {'; '.join(bar.text() for bar in bars(result))}."]
    return "\n".join((*lines, "", whereabouts(result.name, last, packages=True)))


def _columns(result: Result, cell: Callable[[Part, str], str]) -> list[tuple[str, Callable[[str], str]]]:
    """A column for each scenario."""

    def of(part: Part) -> Callable[[str], str]:
        return lambda name: "not possible" if name in part.not_possible else cell(part, name)

    return [(part.scenario.title, of(part)) for part in result.parts]


def _label(contender: Contender) -> str:
    return _LABELS.get(contender.name, contender.name) + (" (verified)" if contender.verified != "no" else "")


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
        f"load read the state's bytes once, evenly, {part.contender(RAW).io}, best of {ways_in_words(part)}."
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
