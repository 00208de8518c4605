"""``python -m bench small``: the cost of many small tensors, where bytes hardly matter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from bench import walks
from bench.contenders import LATER, described
from bench.errors import SetupError
from bench.markdown import in_time, table, time_bars, whereabouts
from bench.options import Folder, Name, Results, Rounds, World
from bench.progress import describe, progress
from bench.runner import run, scratch
from bench.save_load import MEASURES, SaveLoad
from bench.schema import RESULTS, Bar, Contender, Result, Scenario, measured, require_bars, write_result
from bench.state import SMALL_LOCAL_SHAPE, ManySmall
from bench.statistics import median, text
from bench.walks import MODEL_KINDS, measure_walks

#: What the bars hold for, and the bars.
BAR_NUM_TENSORS, BAR_WORLD, BAR_S = 10_000, 8, 1.0
BAR_WALK_NUM_TENSORS, BAR_WALK_S = 3_000, 0.010

NAMES = ("dcp", "holdfast", LATER)
SAVES = "saves"
_LABELS = {
    "dcp": "dcp",
    "holdfast": "holdfast, first save into a new run",
    LATER: "holdfast, later saves into one run",
}
_WALK_LABELS = {
    walks.LATER: "holdfast, later save",
    walks.FIRST: "holdfast, first save",
    walks.STATE_DICTS: "`model.state_dict()` and `optimizer.state_dict()`",
    walks.GET_STATE_DICT: "dcp `get_state_dict`",
}


def small(
    *,
    tensors: Annotated[int, typer.Option(help="Tensors that are saved and loaded.")] = BAR_NUM_TENSORS,
    world: World = BAR_WORLD,
    rounds: Rounds = 5,
    peer_rounds: Annotated[int, typer.Option(help="Rounds that torch.distributed.checkpoint takes part in.")] = 1,
    layers: Annotated[int, typer.Option(help="Layers of the walked model; each has 40 tensors with AdamW.")] = 75,
    walk_rounds: Annotated[int, typer.Option(help="Walks of each kind.")] = 30,
    folder: Folder = Path(),
    name: Name = "small",
    results: Results = RESULTS,
    json: Annotated[bool, typer.Option("--json", help="Also print the result file.")] = False,
) -> None:
    """Measure save and load of many small tensors, and the walk of a live training state, against their bars."""
    if not 1 <= peer_rounds <= rounds or walk_rounds < 1 or layers < 1:
        raise SetupError("Ask for at least one layer, one walk, and one round of the peer, and no more than --rounds.")
    recipe = ManySmall(tensors)
    job = SaveLoad(world=world, rounds=rounds, recipe=recipe, contenders=NAMES, at_most={"dcp": peer_rounds})
    job.require_space(folder)
    with progress(job.num_samples() + len(MODEL_KINDS)) as advance:
        # Walks first: their processes start faster before the ranks have dropped the caches.
        walked = measure_walks(layers, walk_rounds, folder, advance)
        with scratch(folder) as scratch_folder:
            size, samples = run(job, scratch_folder, on_sample=lambda sample: advance(describe(sample)))
    facts = {"local_shape": [*SMALL_LOCAL_SHAPE]}
    saves = measured(
        Scenario(name=SAVES, world=world, rounds=rounds, state=size, facts=facts),
        samples,
        folder,
        contenders=described(NAMES, direct=True),
    )
    result = Result(name, (saves, *walked))
    path = write_result(result, results)
    typer.echo(path.read_text().rstrip("\n") if json else f"wrote {path}")
    require_bars(bars(result))


def bars(result: Result) -> Iterator[Bar]:
    """The bars that hold for a run of this size, with its medians."""
    part = result.part(SAVES)
    if (part.scenario.state.num_tensors, part.scenario.world) == (BAR_NUM_TENSORS, BAR_WORLD):
        for measure in MEASURES:
            for name in NAMES[1:]:
                yield in_time(f"{measure} {name}", median(part.series(name, measure=measure)), BAR_S)
    for kind in MODEL_KINDS:
        walked = result.part(kind)
        if walked.scenario.state.num_tensors == BAR_WALK_NUM_TENSORS:
            yield in_time(f"later walk, {kind}", median(walked.series(walks.LATER)), BAR_WALK_S)


def render_small(result: Result) -> str:
    """The figures of `result` as Markdown."""
    part, plain, fsdp2 = result.part(SAVES), result.part("plain"), result.part("fsdp2")
    scenario, num_walked = part.scenario, f"{plain.scenario.state.num_tensors:,} tensors"
    rows, width = scenario.facts["local_shape"]
    durable = "; ".join(f"{contender.name}: {contender.durable}" for contender in part.contenders[:2])
    how = (
        f"{scenario.state.num_tensors:,} DTensors (Shard(0), float32, {rows * scenario.world} x {width}), "
        f"{scenario.world} ranks, gloo; from the first rank's start to the last rank's end. Medians of "
        f"{scenario.rounds} interleaved rounds (lowest to highest) after a warm-up; dcp takes so long that it takes "
        f"part in {len(part.series('dcp', measure='save'))} of them, without a warm-up. Saves are durable ({durable}), "
        f"caches are cold ({part.caches}), and every load is compared with what was saved."
    )
    walk = (
        f"Walks: {num_walked} (parameters and AdamW's slots), one rank, medians of {plain.scenario.rounds}, Python's "
        f"garbage collector paused for all. {whereabouts(result.name, part)}"
    )

    def times(name: str, measure: str) -> str:
        series = part.series(name, measure=measure)
        return text(series) if len(series) > 1 else f"{series[0]:.2f}"

    def cpu_s(name: str) -> str:
        series = (part.series(name, "cpu_s", measure=measure, of=sum) for measure in MEASURES)
        return ", ".join(f"{median(each):.1f}" for each in series)

    lines = table(
        f"{scenario.state.num_tensors:,} tensors",
        {each.name: _label(each) for each in part.contenders},
        [
            ("save, s", lambda name: times(name, "save")),
            ("load, s", lambda name: times(name, "load")),
            ("CPU of all ranks, s save, load", cpu_s),
        ],
    )
    walk_lines = table(
        f"finding {num_walked}, ms",
        _WALK_LABELS,
        [
            ("plain", lambda name: text(plain.series(name), 1, scale=1e3)),
            ("FSDP2", lambda name: text(fsdp2.series(name), 1, scale=1e3)),
        ],
    )
    return "\n".join((*lines, "", how, "", *walk_lines, "", *time_bars(bars(result)), walk))


def _label(contender: Contender) -> str:
    return _LABELS[contender.name] + (" (loads verified)" if contender.verified != "no" else "")
