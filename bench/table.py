"""``python -m bench table``: the README's table, from a result file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.marked import README, rewrite
from bench.plot import plot_shares
from bench.results import MEASURES, RAW, RESULTS, Result, Summary, Traits, read_result
from bench.statistics import Spread
from bench.summary import require_valid

HEAD = (
    "| | save, s | of raw | load, s | of raw | CPU, s/GB save, load | extra memory per rank, MB save, load |",
    "|---|---|---|---|---|---|---|",
)


def table(
    *,
    result: Annotated[Path, typer.Option(help="The result file.")] = RESULTS / "io.json",
    readme: Annotated[Path, typer.Option(help="The file whose table is rewritten.")] = README,
    plot: Annotated[Path | None, typer.Option(help="Also draw the shares of the raw limit as this PNG.")] = None,
) -> None:
    """Rewrite the table between the markers of a file."""
    figures = read_result(result)
    require_valid(figures)
    rewrite(readme, "bench", render(figures))
    if plot is not None:
        plot_shares(figures, plot)


def render(result: Result) -> str:
    """The figures of `result` as Markdown."""
    setup, machine = result.setup, result.environment
    rows = [_row(result, traits) for traits in result.contenders]
    (raw,) = (traits for traits in result.contenders if traits.name == RAW)
    saving, loading = (result.summary(measure, RAW).raw_threads for measure in MEASURES)
    how = (
        f"{setup.state.nbytes / 1e9:.2f} GB ({setup.state.num_tensors} tensors), {setup.world} ranks, "
        f'medians of {setup.rounds} interleaved rounds (lowest to highest); "of raw" is raw seconds / seconds, '
        f"paired by round. Saves are durable, caches are cold ({setup.caches}). Raw limit: {raw.description}, "
        f"{raw.io}, {raw.durable}, best of {_listed(setup.raw_threads_tried)} threads per rank "
        f"(save {saving}, load {loading})."
    )
    where = (
        f"{machine.cpu}, {machine.num_cpus} CPUs, {machine.filesystem}, Linux {machine.kernel}, "
        f"Python {machine.python}, torch {machine.torch}, holdfast {machine.holdfast} "
        f"(revision {machine.revision[:12]}), {result.date[:10]}. [Samples]({RESULTS / result.name}.json)."
    )
    return "\n".join((*HEAD, *rows, "", how, "", where))


def _row(result: Result, traits: Traits) -> str:
    save, load = (result.summary(measure, traits.name) for measure in MEASURES)
    cpu = f"{save.cpu_s_per_gb.median:.2f}, {load.cpu_s_per_gb.median:.2f}"
    memory = ", ".join(f"{part.peak_extra_nbytes_per_rank / 1e6:.0f}" for part in (save, load))
    cells = (_label(traits), *_times(save), *_times(load), cpu, memory)
    return f"| {' | '.join(cells)} |"


def _label(traits: Traits) -> str:
    if traits.name == RAW:
        return "raw limit"
    return f"{traits.name} (loads verified)" if traits.verified != "no" else traits.name


def _times(summary: Summary) -> tuple[str, str]:
    share = "1" if summary.contender == RAW else _spread(summary.share_of_raw)
    return _spread(summary.seconds), share


def _spread(series: Spread) -> str:
    return f"{series.median:.2f} ({series.low:.2f} to {series.high:.2f})"


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(str(number) for number in numbers)
