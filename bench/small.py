"""``python -m bench small``: the cost of many small tensors, where bytes hardly matter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bench import contenders, harness, walks
from bench.caches import how_dropped
from bench.environment import environment
from bench.errors import BenchError, SetupError
from bench.metadata import metadata
from bench.order import Order
from bench.progress import describe, progress
from bench.rank import TORCH_THREADS
from bench.results import MODEL_KINDS, RESULTS, Bar, SmallResult, SmallSetup, SmallSummary, WalkFigure, write_result
from bench.state import SMALL_LOCAL_SHAPE, ManySmall
from bench.summary import summarize_small
from bench.walks import WalkOrder, run_walks

#: What the bars hold for, and the bars.
BAR_NUM_TENSORS, BAR_WORLD, BAR_S = 10_000, 8, 1.0
BAR_WALK_NUM_TENSORS, BAR_WALK_S = 3_000, 0.010


def small(
    *,
    tensors: Annotated[int, typer.Option(help="Tensors that are saved and loaded.")] = BAR_NUM_TENSORS,
    world: Annotated[int, typer.Option(help="Ranks.")] = BAR_WORLD,
    rounds: Annotated[int, typer.Option(help="Rounds; in each, every contender runs once.")] = 5,
    peer_rounds: Annotated[int, typer.Option(help="Rounds that torch.distributed.checkpoint takes part in.")] = 1,
    layers: Annotated[int, typer.Option(help="Layers of the walked model; each has 40 tensors with AdamW.")] = 75,
    walk_rounds: Annotated[int, typer.Option(help="Walks of each kind.")] = 30,
    folder: Annotated[
        Path, typer.Option("--dir", exists=True, file_okay=False, help="A folder on the device to save to.")
    ] = Path(),
    name: Annotated[str, typer.Option(help="Name of the result file.")] = "small",
    results: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
    json: Annotated[bool, typer.Option("--json", help="Also print the result file.")] = False,
) -> None:
    """Measure save and load of many small tensors, and the walk of a live training state, against their bars."""
    if not 1 <= peer_rounds <= rounds or walk_rounds < 1 or layers < 1:
        raise SetupError("Ask for at least one layer, one walk, and one round of the peer, and no more than --rounds.")
    order = Order(world, rounds, ManySmall(tensors), contenders.SMALL_NAMES, at_most={"dcp": peer_rounds})
    walk_order = WalkOrder(layers, walk_rounds)
    with progress(order.num_turns() + len(MODEL_KINDS)) as advance:
        # Walks first: their processes start faster before the ranks have dropped the caches.
        figures = run_walks(walk_order, on_kind=lambda kind: advance(f"walks of a {kind} model"))
        outcome = harness.run(order, folder, on_turn=lambda sample: advance(describe(sample)))
    setup = SmallSetup(
        world=world,
        rounds=rounds,
        state=outcome.state,
        local_shape=SMALL_LOCAL_SHAPE,
        torch_threads=TORCH_THREADS,
        caches=how_dropped(),
        walk_rounds=walk_rounds,
        walk_num_tensors=walk_order.num_tensors,
    )
    summaries = summarize_small(outcome.samples, contenders.SMALL_NAMES)
    result = SmallResult(
        name=name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        setup=setup,
        environment=environment(folder),
        contenders=tuple(metadata(name, direct=outcome.direct) for name in contenders.SMALL_NAMES),
        summaries=summaries,
        walks=figures,
        bars=tuple(bars(setup, summaries, figures)),
        samples=outcome.samples,
    )
    path = write_result(result, results)
    typer.echo(path.read_text().rstrip("\n") if json else f"wrote {path}")
    missed = [f"{bar.what} {bar.seconds:.3g} s > {bar.most_s} s" for bar in result.bars if not bar.met]
    if missed:
        raise BenchError(f"bars missed: {'; '.join(missed)}")


def bars(setup: SmallSetup, summaries: Iterable[SmallSummary], figures: Iterable[WalkFigure]) -> Iterator[Bar]:
    """The bars that hold for a run of this size, with its medians."""
    if (setup.state.num_tensors, setup.world) == (BAR_NUM_TENSORS, BAR_WORLD):
        for summary in summaries:
            if summary.contender != "dcp":
                what = f"{summary.measure} {summary.contender}"
                yield Bar(what=what, seconds=summary.seconds.median, most_s=BAR_S)
    if setup.walk_num_tensors == BAR_WALK_NUM_TENSORS:
        for figure in figures:
            if figure.contender == walks.LATER:
                yield Bar(what=f"later walk, {figure.model}", seconds=figure.seconds.median, most_s=BAR_WALK_S)
