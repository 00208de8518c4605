"""``python -m bench io``: save and load against the raw limit of the device."""

from __future__ import annotations

from bench.contenders import SAVING, select
from bench.markdown import label, of_raw, raw_in_words, table, whereabouts
from bench.runner import Job, measure
from bench.save_load import MEASURES, SaveLoad, copies
from bench.schema import Benchmark, Options, Part, Result
from bench.state import LlamaLike
from bench.statistics import text

_USUAL = ("torch.save", "dcp", "holdfast")


def measure_io(options: Options) -> Part:
    """Save and load of every contender against the raw limit, in one run of paired rounds."""
    names, absent = select(options.contenders, SAVING, _USUAL)
    job = Job(
        name="io",
        turns=SaveLoad,
        recipe=LlamaLike(options.nbytes(gib=2.0)),
        world=options.world or 2,
        rounds=options.rounds or 7,
        contenders=names,
        copies=copies(names),
    )
    return measure(job, options, absent=absent)


def render_io(result: Result) -> str:
    """The figures of `result` as Markdown."""
    (part,) = result.parts
    scenario, raw = part.scenario, part.contenders[0]
    saving, loading = (part.raw_way(measure) for measure in MEASURES)
    how = (
        f"{scenario.state.nbytes / 1e9:.2f} GB ({scenario.state.num_tensors} tensors), {scenario.world} ranks, "
        f'medians of {scenario.rounds} interleaved rounds (lowest to highest); "of raw" is raw seconds / seconds, '
        f"paired by round. Saves are durable, caches are cold ({part.caches}). Raw limit: {raw.description}, "
        f"{raw.io}, {raw.durable}, best of {raw_in_words(part)} (save {saving}, load {loading})."
    )
    lines = table(
        "",
        {each.name: label(each, "(loads verified)") for each in part.contenders},
        [
            ("save, s", lambda name: text(part.series(name, measure="save"))),
            ("of raw", lambda name: of_raw(part, name, "save")),
            ("load, s", lambda name: text(part.series(name, measure="load"))),
            ("of raw", lambda name: of_raw(part, name, "load")),
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


IO = Benchmark("io", {"io": measure_io}, render_io)
