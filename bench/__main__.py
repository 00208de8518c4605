"""The command line: ``python -m bench [NAME ...]``. Without a name, everything is measured and published."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench.agreement import AGREEMENT
from bench.benchmark import RESULTS, Benchmark, Options, chosen, require_bars, require_raw_limit
from bench.bucket_ways import TRANSFERRING
from bench.contenders import BACKGROUND, LOADING, MANY
from bench.converters import CONVERTING
from bench.data import DATA
from bench.emulated_nodes import NODES
from bench.engine import ENGINE
from bench.events import EVENTS
from bench.exchange import EXCHANGE
from bench.front import render_chart, render_front
from bench.history import HISTORY
from bench.hub_loads import HUB_LOADING
from bench.lost_nodes import LOST_NODES
from bench.markdown import replace_part
from bench.objects import OBJECTS
from bench.pacing import PACING
from bench.parity import PARITY
from bench.peers import PEERS
from bench.plan import PLAN, draw_planning
from bench.prune import PRUNE
from bench.save_load import IO, LOADS
from bench.schema import BenchError, Result, read_result, write_result
from bench.small import SMALL
from bench.step import STEP
from bench.view import VIEW

#: In the order in which they are measured. Each has a place of its name in `docs/benchmarks.md`.
BENCHMARKS = (
    *(IO, LOADS, EXCHANGE, PLAN, AGREEMENT, SMALL, VIEW, ENGINE),
    *(HISTORY, STEP, PRUNE, EVENTS, DATA, OBJECTS, PEERS, PARITY, NODES, LOST_NODES, PACING),
)
NAMES = tuple(each.name for each in BENCHMARKS)
FRONT, TABLE = "front", "table"
#: The published files, below the root of the repository.
README, TABLES = Path("README.md"), Path("docs/benchmarks.md")
CHART, PLANNING = Path("docs/figures/speed.svg"), Path("docs/figures/planning.png")


def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"What to measure: {', '.join(NAMES)}; {TABLE} publishes all results. Default: all."),
    ] = None,
    *,
    only: Annotated[list[str] | None, typer.Option(help="Only this part; the others stay. Repeatable.")] = None,
    contender: Annotated[list[str] | None, typer.Option(help="Only this one beside the raw limit. Repeatable.")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="In each round, every contender takes its turn.")] = None,
    scale: Annotated[float, typer.Option(min=0, help="Share of the full size of states; 0 is the smallest.")] = 1.0,
    folder: Annotated[Path, typer.Option("--dir", exists=True, help="A folder on the device to measure.")] = Path(),
    memory: Annotated[Path, typer.Option("--node-dir", exists=True, help="A folder in memory.")] = Path("/dev/shm"),
) -> None:
    """Measure holdfast against its peers and its bars. A missed bar ends this with status 1, when all is written."""
    root = Path()
    asked = chosen(names, (*NAMES, TABLE), kind="benchmark")
    if TABLE in asked:
        documents(root, {})  # faults in them are seen before the long run rather than after it
    known = {**LOADING, **BACKGROUND, **MANY, **CONVERTING, **HUB_LOADING, **TRANSFERRING}
    contenders = chosen(contender, known, kind="contender")
    options = Options(rounds=rounds, scale=scale, contenders=contenders, folder=folder, memory=memory)
    measured = [(each, measure(each, options, only, root / RESULTS)) for each in BENCHMARKS if each.name in asked]
    if TABLE in asked:
        publish(root)
    for _, result in measured:
        require_raw_limit(result)
    require_bars(bar for benchmark, result in measured for bar in benchmark.judged(result).values())


def measure(benchmark: Benchmark, options: Options, only: Sequence[str] | None, results: Path) -> Result:
    """Measure the parts of `benchmark` that were asked for, and keep each of them at once."""
    names = chosen(only, benchmark.parts, kind="part")
    is_added = only and (results / f"{benchmark.name}.json").exists()
    before = read_result(benchmark.name, results).parts if is_added else ()
    parts = {part.scenario.name: part for part in before}
    result = Result(benchmark.name, ())
    for name in names:
        parts[name] = benchmark.parts[name](options)
        result = Result(benchmark.name, tuple(parts[each] for each in benchmark.parts if each in parts))
        typer.echo(f"{benchmark.name}, {name}: wrote {write_result(result, results)}")
    for what, bar in benchmark.judged(result).items():
        typer.echo(f"{what} {bar.text()}")
    return result


def publish(root: Path) -> None:
    """Rewrite the tables in both documents and draw the charts, or nothing where something is wrong."""
    found = {each.name: read_result(each.name, root / RESULTS) for each in BENCHMARKS}
    for result in found.values():
        require_raw_limit(result)
    rendered = {each.name: each.render(found[each.name]) for each in BENCHMARKS}
    rendered[FRONT] = render_front(found["io"], found["engine"], found["small"], found["nodes"])
    texts = documents(root, rendered) | {root / CHART: render_chart(found["io"], found["load"])}
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    draw_planning(found["plan"], root / PLANNING)


def documents(root: Path, rendered: Mapping[str, str]) -> dict[Path, str]:
    """The documents with what was `rendered`. BenchError where one has no place for a table."""
    texts = {}
    for path, places in ((root / TABLES, NAMES), (root / README, (FRONT,))):
        if not path.is_file():
            raise BenchError(f"There is no {path}. Run from the root of the repository.")
        texts[path] = path.read_text()
        for place in places:
            texts[path] = replace_part(texts[path], place, rendered.get(place, ""), where=path)
    return texts


def main() -> None:
    """Run the command line; a BenchError ends it with its message and status 1."""
    try:
        typer.run(bench)
    except BenchError as error:
        sys.exit(f"bench: {error}")


if __name__ == "__main__":
    main()
