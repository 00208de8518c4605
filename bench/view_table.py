"""The tables of ``bench view``."""

from __future__ import annotations

from bench.environment import in_words
from bench.results import ViewResult, samples_link
from bench.small_table import bar_lines

_LABELS = {"holdfast": "holdfast (verified)", "--help": "`holdfast --help`, for comparison"}


def render_view(result: ViewResult) -> str:
    """The figures of `result` as Markdown."""
    opened = [f"| {_LABELS.get(series.name, series.name)} | {series.seconds.text()} |" for series in result.opened]
    shown = [f"| {_LABELS.get(series.name, series.name)} | {series.seconds.text()} |" for series in result.shown]
    reasons = "".join(f" Not possible for {each.contender}: {each.reason}." for each in result.not_possible)
    how = (
        f"Medians of {result.rounds} interleaved rounds (lowest to highest). Opening: in a new process that has "
        f"imported the library, caches are cold ({result.caches}), and the tensor is compared with what was saved; dcp "
        f"loads a state dict of that one tensor, safetensors is one file.{reasons} `show`: whole commands, warm caches."
    )
    where = f"{in_words(result.environment)}, {result.date[:10]}. {samples_link(result.name)}."
    return "\n".join(
        (
            f"| open a checkpoint of {result.num_tensors:,} tensors, read one | s |",
            "|---|---|",
            *opened,
            "",
            f"| `holdfast show` of a manifest of {result.world:,} ranks | s |",
            "|---|---|",
            *shown,
            "",
            *bar_lines(result.bars),
            how,
            "",
            where,
        )
    )
