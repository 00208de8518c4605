"""``python -m bench table``: all tables, and the README's chart, from the result files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from bench.engine import render_engine, require_limit
from bench.front import render_front
from bench.history import render_history
from bench.io import render_io
from bench.load import LOAD, render_load
from bench.marked import CHART, README, TABLES, read_marked, rewrite
from bench.plan import render_plan
from bench.plot import draw_front
from bench.save_load import MEASURES
from bench.schema import RESULTS, Result, read_result, require_raw_limit
from bench.small import render_small
from bench.view import render_view

#: How the result of each benchmark becomes its table, and the name of the table's place in the document.
TABLES_OF: dict[str, tuple[str, Callable[[Result], str]]] = {
    "io": ("bench", render_io),
    "load": ("load", render_load),
    "engine": ("engine", render_engine),
    "small": ("small", render_small),
    "view": ("view", render_view),
    "plan": ("plan", render_plan),
    "history": ("history", render_history),
}
FRONT = "front"


def table(
    *,
    results: Annotated[Path, typer.Option(help="Folder of the result files.")] = RESULTS,
    document: Annotated[Path, typer.Option(help="The file whose tables are rewritten.")] = TABLES,
    readme: Annotated[Path, typer.Option(help="The file whose short table is rewritten.")] = README,
    chart: Annotated[Path, typer.Option(help="The chart that is drawn anew, as SVG.")] = CHART,
) -> None:
    """Rewrite the tables between the markers of two files and draw the chart: all, or where something is wrong none."""
    found = {name: read_result(results / f"{name}.json", command=name) for name in TABLES_OF}
    for part in found["io"].parts:
        require_raw_limit(part, *MEASURES)
    for part in found["load"].parts:
        require_raw_limit(part, LOAD)
    require_limit(found["engine"])
    require_places(document, readme)
    for name, (place, render) in TABLES_OF.items():
        rewrite(document, place, render(found[name]))
    rewrite(readme, FRONT, render_front(found["io"], found["engine"], found["small"]))
    draw_front(found["io"], found["load"], chart)


def require_places(document: Path, readme: Path) -> None:
    """MarkersError where a table has no place."""
    for place, _ in TABLES_OF.values():
        read_marked(document, place)
    read_marked(readme, FRONT)
