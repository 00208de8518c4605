"""``python -m bench load``: loads onto the layout that saved and onto others, against the raw limit of the device.

Per scenario, the ranks that save come first: every contender saves once, untimed. Then come the ranks that load: in
every round each contender loads what it saved, from a cold cache. The raw limit reads files that the loading ranks
wrote, an even part of the state each.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from bench import contenders, harness
from bench.caches import how_dropped
from bench.environment import environment, package_versions
from bench.errors import SetupError
from bench.harness import Outcome
from bench.metadata import metadata
from bench.order import Order
from bench.progress import describe, progress
from bench.rank import TORCH_THREADS
from bench.raw import RAW_WAYS
from bench.results import (
    LOAD_ONLY,
    RAW,
    RESULTS,
    LoadResult,
    LoadSetup,
    NotPossible,
    Sample,
    ScenarioResult,
    write_result,
)
from bench.scenarios import PACKAGES, Scenario, chosen, why_not
from bench.summary import require_raw_limit, summarize


def load(
    *,
    gib: Annotated[float, typer.Option(help="Size of the state over all ranks, at least.")] = 2.0,
    rounds: Annotated[int, typer.Option(help="Rounds; in each, every contender loads once.")] = 7,
    scenario: Annotated[list[str] | None, typer.Option(help="Only this scenario; repeatable.")] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help="Only this contender beside the raw limit; repeatable.")
    ] = None,
    folder: Annotated[
        Path, typer.Option("--dir", exists=True, file_okay=False, help="A folder on the device to measure.")
    ] = Path(),
    name: Annotated[str, typer.Option(help="Name of the result file.")] = "load",
    results: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
) -> None:
    """Measure loads across layouts against the raw limit, each scenario in paired rounds."""
    if rounds < 1:
        raise SetupError("A run needs at least one round.")
    names = contenders.LOAD_NAMES if contender is None else (RAW, *contender)
    scenarios = chosen(scenario)
    orders = [_orders(each, names, rounds=rounds, min_nbytes=int(gib * 2**30)) for each in scenarios]
    for saving, loading in orders:
        # Of replicas, a contender may store one for each rank.
        harness.require_space(loading, folder, num_more=saving.world)
    done: list[ScenarioResult] = []
    path: Path | None = None
    with progress(sum(loading.num_turns() for _, loading in orders)) as advance:
        for each, (saving, loading) in zip(scenarios, orders, strict=True):
            outcome = _run(saving, loading, folder, on_turn=_teller(each, advance))
            done.append(_scenario_result(each, names, loading, outcome))
            # Whatever happens to a later scenario, this one is kept.
            path = write_result(_result(name, names, rounds, folder, done, direct=outcome.direct), results)
    for finished in done:
        require_raw_limit(finished.summaries)
    typer.echo(f"wrote {path}")


def _orders(scenario: Scenario, names: tuple[str, ...], *, rounds: int, min_nbytes: int) -> tuple[Order, Order]:
    """What the ranks that save do, and what those that load do."""
    able = tuple(name for name in names if why_not(name, scenario) is None)
    peers = tuple(name for name in able if name != RAW)
    saved, loaded = scenario.saved, scenario.loaded
    saving = Order(saved.world, 1, scenario.recipe(saved, min_nbytes), peers, measures=(), kept=peers)
    raws = contenders.entrants((RAW,))
    loading = Order(loaded.world, rounds, scenario.recipe(loaded, min_nbytes), able, measures=LOAD_ONLY, kept=raws)
    return saving, loading


def _run(saving: Order, loading: Order, folder: Path, *, on_turn: Callable[[Sample], None]) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as scratch:
        harness.run_in(saving, Path(scratch), on_turn=on_turn)
        return harness.run_in(loading, Path(scratch), on_turn=on_turn)


def _teller(scenario: Scenario, advance: Callable[[str], None]) -> Callable[[Sample], None]:
    return lambda sample: advance(f"{scenario.title}: {describe(sample)}")


def _scenario_result(scenario: Scenario, names: tuple[str, ...], loading: Order, outcome: Outcome) -> ScenarioResult:
    reasons = ((name, why_not(name, scenario)) for name in names)
    return ScenarioResult(
        name=scenario.name,
        title=scenario.title,
        saved=f"{scenario.saved.layout}, {scenario.saved.world} ranks",
        loaded=f"{scenario.loaded.layout}, {scenario.loaded.world} ranks",
        state=outcome.state,
        not_possible=tuple(NotPossible(name, reason) for name, reason in reasons if reason is not None),
        summaries=summarize(
            outcome.samples,
            loading.contenders,
            raw_ways=tuple(RAW_WAYS),
            nbytes=outcome.state.nbytes,
            measures=LOAD_ONLY,
        ),
        samples=outcome.samples,
    )


def _result(
    name: str, names: tuple[str, ...], rounds: int, folder: Path, done: list[ScenarioResult], *, direct: bool
) -> LoadResult:
    return LoadResult(
        name=name,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        setup=LoadSetup(
            rounds=rounds,
            raw_ways=tuple(RAW_WAYS),
            torch_threads=TORCH_THREADS,
            caches=how_dropped(),
            packages=package_versions(PACKAGES),
        ),
        environment=environment(folder),
        contenders=tuple(metadata(each, direct=direct) for each in names),
        scenarios=tuple(done),
    )
