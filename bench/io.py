"""``python -m bench io``: save and load against the raw limit of the device."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bench import contenders, harness
from bench.caches import how_dropped
from bench.environment import environment
from bench.metadata import metadata
from bench.order import Order
from bench.progress import describe, progress
from bench.rank import TORCH_THREADS
from bench.raw import RAW_WAYS
from bench.results import RAW, RESULTS, Result, Setup, write_result
from bench.state import LlamaLike
from bench.summary import require_raw_limit, summarize


def io(
    *,
    gib: Annotated[float, typer.Option(help="Size of the state over all ranks, at least.")] = 2.0,
    rounds: Annotated[int, typer.Option(help="Rounds; in each, every contender runs once.")] = 7,
    world: Annotated[int, typer.Option(help="Ranks.")] = 2,
    contender: Annotated[
        list[str] | None, typer.Option(help="Only this contender beside the raw limit; repeatable.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--dir", exists=True, file_okay=False, help="A folder on the device to measure.")
    ] = Path(),
    name: Annotated[str, typer.Option(help="Name of the result file.")] = "io",
    results: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
) -> None:
    """Measure save and load of every contender against the raw limit, in one run of paired rounds."""
    chosen = contenders.IO_NAMES if contender is None else (RAW, *contender)
    order = Order(world=world, rounds=rounds, recipe=LlamaLike(int(gib * 2**30)), contenders=chosen)
    with progress(order.num_turns()) as advance:
        outcome = harness.run(order, folder, on_turn=lambda sample: advance(describe(sample)))
    names = tuple(name for name in contenders.NAMES if name in chosen)
    result = Result(
        name=name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        setup=Setup(
            world=world,
            rounds=rounds,
            state=outcome.state,
            raw_ways=tuple(RAW_WAYS),
            torch_threads=TORCH_THREADS,
            caches=how_dropped(),
        ),
        environment=environment(folder),
        contenders=tuple(metadata(name, direct=outcome.direct) for name in names),
        summaries=summarize(outcome.samples, names, raw_ways=tuple(RAW_WAYS), nbytes=outcome.state.nbytes),
        samples=outcome.samples,
    )
    # Written before it is judged: the samples of a run that broke the rule show why.
    path = write_result(result, results)
    require_raw_limit(result.summaries)
    typer.echo(f"wrote {path}")
