"""``python -m bench io``: save and load against the raw limit of the device."""

from __future__ import annotations

from pathlib import Path

import typer

from bench.contenders import NAMES, described
from bench.markdown import table, ways_in_words, whereabouts
from bench.options import Contenders, Folder, Gib, Name, Results, Rounds, World
from bench.progress import describe, progress
from bench.raw import RAW_WAYS, takes_direct
from bench.runner import run, scratch
from bench.save_load import MEASURES, SaveLoad
from bench.schema import RAW, RESULTS, Contender, Result, Scenario, measured, require_raw_limit, write_result
from bench.state import LlamaLike
from bench.statistics import text

_DEFAULT = ("torch.save", "dcp", "holdfast")


def io(
    *,
    gib: Gib = 2.0,
    rounds: Rounds = 7,
    world: World = 2,
    contender: Contenders = None,
    folder: Folder = Path(),
    name: Name = "io",
    results: Results = RESULTS,
) -> None:
    """Measure save and load of every contender against the raw limit, in one run of paired rounds."""
    names = (RAW, *(_DEFAULT if contender is None else contender))
    recipe = LlamaLike(int(gib * 2**30))
    with scratch(folder) as path:
        direct = takes_direct(path)
        job = SaveLoad(world=world, rounds=rounds, recipe=recipe, contenders=names, direct=direct)
        job.require_space(folder)
        with progress(job.num_samples()) as advance:
            size, samples = run(job, path, on_sample=lambda sample: advance(describe(sample)))
    part = measured(
        Scenario(name=name, world=world, rounds=rounds, state=size),
        samples,
        folder,
        contenders=described(tuple(each for each in NAMES if each in names), direct=direct),
        raw_ways=tuple(RAW_WAYS),
    )
    # Written before it is judged: the samples of a run that broke the rule show why.
    path = write_result(Result(name, (part,)), results)
    require_raw_limit(part, *MEASURES)
    typer.echo(f"wrote {path}")


def render_io(result: Result) -> str:
    """The figures of `result` as Markdown."""
    (part,) = result.parts
    scenario, raw = part.scenario, part.contender(RAW)
    saving, loading = (part.raw_way(measure) for measure in MEASURES)
    how = (
        f"{scenario.state.nbytes / 1e9:.2f} GB ({scenario.state.num_tensors} tensors), {scenario.world} ranks, "
        f'medians of {scenario.rounds} interleaved rounds (lowest to highest); "of raw" is raw seconds / seconds, '
        f"paired by round. Saves are durable, caches are cold ({part.caches}). Raw limit: {raw.description}, "
        f"{raw.io}, {raw.durable}, best of {ways_in_words(part)} (save {saving}, load {loading})."
    )

    def share(name: str, measure: str) -> str:
        return "1" if name == RAW else text(part.shares(name, measure=measure))

    lines = table(
        "",
        {each.name: _label(each) for each in part.contenders},
        [
            ("save, s", lambda name: text(part.series(name, measure="save"))),
            ("of raw", lambda name: share(name, "save")),
            ("load, s", lambda name: text(part.series(name, measure="load"))),
            ("of raw", lambda name: share(name, "load")),
            (
                "CPU, s/GB save, load",
                lambda name: ", ".join(f"{part.cpu_s_per_gb(name, measure=measure):.2f}" for measure in MEASURES),
            ),
            (
                "extra memory per rank, MB save, load",
                lambda name: ", ".join(f"{part.peak_nbytes(name, measure) / 1e6:.0f}" for measure in MEASURES),
            ),
        ],
    )
    return "\n".join((*lines, "", how, "", whereabouts(result.name, part)))


def _label(contender: Contender) -> str:
    if contender.name == RAW:
        return "raw limit"
    return f"{contender.name} (loads verified)" if contender.verified != "no" else contender.name
