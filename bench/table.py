"""``python -m bench table``: the tables of all benchmarks but `plan` and `history`, and the README's chart, from their
result files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.engine_bars import require_limit
from bench.engine_results import read_engine
from bench.engine_table import render_engine
from bench.environment import in_words
from bench.front_table import render_front
from bench.load_table import render_load, ways_in_words
from bench.marked import CHART, README, TABLES, read_marked, rewrite
from bench.plot import draw_front
from bench.results import (
    MEASURES,
    RAW,
    RESULTS,
    ContenderMetadata,
    Result,
    Summary,
    read_load,
    read_result,
    read_small,
    read_view,
    samples_link,
)
from bench.small_table import render_small
from bench.summary import require_valid, require_valid_load
from bench.view_table import render_view

HEAD = (
    "| | save, s | of raw | load, s | of raw | CPU, s/GB save, load | extra memory per rank, MB save, load |",
    "|---|---|---|---|---|---|---|",
)


def table(
    *,
    result: Annotated[Path, typer.Option(help="The result file of `bench io`.")] = RESULTS / "io.json",
    small: Annotated[Path, typer.Option(help="The result file of `bench small`.")] = RESULTS / "small.json",
    loads: Annotated[Path, typer.Option("--load", help="The result file of `bench load`.")] = RESULTS / "load.json",
    engines: Annotated[Path, typer.Option("--engine", help="The result file of `bench engine`.")] = RESULTS
    / "engine.json",
    views: Annotated[Path, typer.Option("--view", help="The result file of `bench view`.")] = RESULTS / "view.json",
    document: Annotated[Path, typer.Option(help="The file whose tables are rewritten.")] = TABLES,
    readme: Annotated[Path, typer.Option(help="The file whose short table is rewritten.")] = README,
    chart: Annotated[Path, typer.Option(help="The chart that is drawn anew, as SVG.")] = CHART,
) -> None:
    """Rewrite the tables between the markers of two files and draw the chart: all, or where something is wrong none."""
    figures, small_figures = read_result(result), read_small(small)
    load_figures, view_figures = read_load(loads), read_view(views)
    engine_figures = read_engine(engines)
    require_valid(figures)
    require_valid_load(load_figures)
    if engine_figures.saves is not None:
        require_limit(engine_figures.saves)
    for part in ("small", "load", "engine", "view"):
        read_marked(document, part)
    read_marked(readme, "front")
    rewrite(document, "bench", render(figures))
    rewrite(document, "small", render_small(small_figures))
    rewrite(document, "load", render_load(load_figures))
    rewrite(document, "engine", render_engine(engine_figures))
    rewrite(document, "view", render_view(view_figures))
    rewrite(readme, "front", render_front(figures, engine_figures, small_figures))
    draw_front(figures, load_figures, chart)


def render(result: Result) -> str:
    """The figures of `result` as Markdown."""
    setup = result.setup
    rows = [_row(result, contender) for contender in result.contenders]
    (raw,) = (contender for contender in result.contenders if contender.name == RAW)
    saving, loading = (result.summary(measure, RAW).raw_way for measure in MEASURES)
    how = (
        f"{setup.state.nbytes / 1e9:.2f} GB ({setup.state.num_tensors} tensors), {setup.world} ranks, "
        f'medians of {setup.rounds} interleaved rounds (lowest to highest); "of raw" is raw seconds / seconds, '
        f"paired by round. Saves are durable, caches are cold ({setup.caches}). Raw limit: {raw.description}, "
        f"{raw.io}, {raw.durable}, best of {ways_in_words(setup.raw_ways)} "
        f"(save {saving}, load {loading})."
    )
    where = f"{in_words(result.environment)}, {result.date[:10]}. {samples_link(result.name)}."
    return "\n".join((*HEAD, *rows, "", how, "", where))


def _row(result: Result, contender: ContenderMetadata) -> str:
    save, load = (result.summary(measure, contender.name) for measure in MEASURES)
    cpu = f"{save.cpu_s_per_gb.median:.2f}, {load.cpu_s_per_gb.median:.2f}"
    memory = ", ".join(f"{part.peak_extra_nbytes_per_rank / 1e6:.0f}" for part in (save, load))
    cells = (_label(contender), *_times(save), *_times(load), cpu, memory)
    return f"| {' | '.join(cells)} |"


def _label(contender: ContenderMetadata) -> str:
    if contender.name == RAW:
        return "raw limit"
    return f"{contender.name} (loads verified)" if contender.verified != "no" else contender.name


def _times(summary: Summary) -> tuple[str, str]:
    share = "1" if summary.contender == RAW else summary.share_of_raw.text()
    return summary.seconds.text(), share
