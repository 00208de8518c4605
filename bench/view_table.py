"""The README's tables of ``bench view``."""

from __future__ import annotations

from bench.environment import in_words
from bench.results import RESULTS, TimedSeries, ViewResult
from bench.small_table import bar_lines

_LABELS = {"holdfast": "holdfast (verified)", "--help": "`holdfast --help`, for comparison"}


def render_view(result: ViewResult) -> str:
    """The figures of `result` as Markdown."""
    opened, shown = (list(map(_row, series)) for series in (result.opened, result.shown))
    reasons = "".join(f" Not possible for {each.contender}: {each.reason}." for each in result.not_possible)
    how = (
        f"Medians of {result.rounds} interleaved rounds (lowest to highest). Opening: in a new process that has "
        f"imported the library, caches are cold ({result.caches}), and the tensor is compared with what was saved; "
        "dcp, in one round, loads a state dict of that one tensor; safetensors is one file. "
        f"`show`: whole commands, warm caches.{reasons}"
    )
    where = f"{in_words(result.environment)}, {result.date[:10]}. [Samples]({RESULTS / result.name}.json)."
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


def _row(series: TimedSeries) -> str:
    seconds = series.seconds.text() if len(series.samples) > 1 else f"{series.seconds.median:.2f}"
    return f"| {_LABELS.get(series.name, series.name)} | {seconds} |"
