"""``python -m bench io``: save and load against the raw limit of the device."""

from __future__ import annotations

from bench.benchmark import Benchmark, Options
from bench.contenders import SAVING, select
from bench.markdown import cpu, figures, labels, memory, raw_in_words, shares, table, whereabouts
from bench.runner import Job, measure
from bench.save_load import LOAD, MEASURES, SAVE, SaveLoad, copies
from bench.schema import Part, Result
from bench.state import LlamaLike


def measure_io(options: Options) -> Part:
    """Save and load of every contender against the raw limit, in one run of paired rounds."""
    names, absent = select(options.contenders, SAVING, ("torch.save", "dcp", "holdfast"))
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
    lines = table(
        "",
        labels(part, "(loads verified)"),
        [
            figures("save, s", part, measure=SAVE),
            shares(part, SAVE),
            figures("load, s", part, measure=LOAD),
            shares(part, LOAD),
            ("CPU, s/GB save, load", lambda name: f"{cpu(part, name, SAVE)}, {cpu(part, name, LOAD)}"),
            (
                "extra memory per rank, MB save, load",
                lambda name: f"{memory(part, name, SAVE)}, {memory(part, name, LOAD)}",
            ),
        ],
    )
    how = (
        f"{scenario.state.nbytes / 1e9:.2f} GB ({scenario.state.num_tensors} tensors), {scenario.world} ranks, "
        f'medians of {scenario.rounds} interleaved rounds (lowest to highest); "of raw" is raw seconds / seconds, '
        f"paired by round. Saves are durable, caches are cold ({part.caches}). Raw limit: {raw.description}, "
        f"{raw.io}, {raw.durable}, best of {raw_in_words(part)} (save {saving}, load {loading})."
    )
    return "\n\n".join([lines, how, whereabouts(result.name, part)])


IO = Benchmark("io", {"io": measure_io}, render_io)
