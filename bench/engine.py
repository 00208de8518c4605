"""``python -m bench engine``: saves that training does not wait for, restores from memory, and what both cost.

Four parts, each of which can be measured alone: saves, restores from the memory of the node, saves beside a loop of
Python, and saves in a training loop on all cores.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from bench.engine_bars import bars, require_limit
from bench.engine_contenders import NAMES, able
from bench.engine_parts import measure_loops, measure_python, measure_restores, measure_saves
from bench.engine_plan import Plan
from bench.engine_results import PARTS, EngineResult, LoopPart, Part, PythonPart, RestorePart, SavesPart, read_earlier
from bench.errors import BenchError, SetupError
from bench.results import RAW, RESULTS, write_result

#: With 111 layers, model and optimizer have 4,008 tensors.
NUM_LAYERS = 111


def engine(
    *,
    gib: Annotated[float, typer.Option(help="Size of the state that is saved and restored, over all ranks.")] = 2.0,
    python_gib: Annotated[float, typer.Option(help="Size of the state that is saved beside a loop of Python.")] = 1.0,
    loop_gib: Annotated[float, typer.Option(help="Size of the state that is saved in a training loop.")] = 0.5,
    layers: Annotated[int, typer.Option(help="Layers; each has 36 tensors with AdamW.")] = NUM_LAYERS,
    world: Annotated[int, typer.Option(help="Ranks, but for the loop of Python, which is one.")] = 2,
    rounds: Annotated[int, typer.Option(help="Rounds; in each, every contender runs once.")] = 7,
    only: Annotated[list[str] | None, typer.Option(help=f"Only this part: {', '.join(PARTS)}; repeatable.")] = None,
    contender: Annotated[
        list[str] | None, typer.Option(help="Only this contender beside the raw limit; repeatable.")
    ] = None,
    work_s: Annotated[float, typer.Option(help="Seconds of work between a save and the next step.")] = 1.0,
    calm_s: Annotated[float, typer.Option(help="Seconds that the loop of Python runs before and after a save.")] = 1.0,
    steps: Annotated[int, typer.Option(help="Steps of a training loop.")] = 10,
    every: Annotated[int, typer.Option(help="Steps from save to save.")] = 10,
    tokens: Annotated[int, typer.Option(help="Tokens of a rank in a step of a training loop.")] = 512,
    folder: Annotated[
        Path, typer.Option("--dir", exists=True, file_okay=False, help="A folder on the device to measure.")
    ] = Path(),
    memory: Annotated[
        Path, typer.Option("--node-dir", exists=True, file_okay=False, help="A folder in memory.")
    ] = Path("/dev/shm"),
    name: Annotated[str, typer.Option(help="Name of the result file.")] = "engine",
    results: Annotated[Path, typer.Option(help="Folder of the result file.")] = RESULTS,
) -> None:
    """Measure the save engine against its peers and its bars. Parts that are not asked for stay as they are."""
    if min(rounds, world, layers, every, steps, tokens) < 1:
        raise SetupError("Ask for at least one round, one rank, one layer, one step, and one token.")
    names = NAMES if contender is None else (RAW, *contender)
    plan = Plan(world, rounds, layers, names, work_s, calm_s, steps, every, tokens, folder, memory)
    able(names)  # a wrong name is said before anything runs
    measures: dict[Part, Callable[[], SavesPart | RestorePart | PythonPart | LoopPart]] = {
        "saves": lambda: measure_saves(plan, gib),
        "restore": lambda: measure_restores(plan, gib),
        "python": lambda: measure_python(plan, python_gib),
        "loop": lambda: measure_loops(plan, loop_gib),
    }
    parts = chosen(only)
    result = read_earlier(name, results) if only else EngineResult(name)
    for part in parts:
        result = msgspec.structs.replace(result, **{part: measures[part]()})
        result = msgspec.structs.replace(result, bars=tuple(bars(result)))
        # Whatever happens to a later part, this one is kept.
        path = write_result(result, results)
        typer.echo(f"{part}: wrote {path}")
    for bar in result.bars:
        typer.echo(bar.text())
    if "saves" in parts and result.saves is not None:
        require_limit(result.saves)
    missed = [bar.text() for bar in result.bars if not bar.met]
    if missed:
        raise BenchError("; ".join(missed))


def chosen(names: list[str] | None) -> tuple[Part, ...]:
    """The parts of these names, or all; SetupError for a name that is not known."""
    unknown = [name for name in names or () if name not in PARTS]
    if unknown:
        raise SetupError(f"There is no part {', '.join(unknown)}. Choose from {', '.join(PARTS)}.")
    return tuple(part for part in PARTS if names is None or part in names)
