"""The README's figures: a few of all benchmarks, for readers who are new to the project."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.engine import SAVES
from bench.engine_contenders import OURS, THREAD
from bench.engine_saves import BESIDE_WORK
from bench.markdown import table
from bench.save_load import MEASURES
from bench.schema import Part, Result
from bench.small import SAVES as SMALL_SAVES
from bench.statistics import NO_FIGURE, median

CONTENDERS = {"holdfast": "Holdfast", "dcp": "PyTorch DCP", "torch.save": "torch.save"}
#: Who of the columns saves in the background.
_BACKGROUND = {"holdfast": OURS, "dcp": THREAD}


def render_front(saves: Result, engine: Result, small: Result) -> str:
    """A few figures of each result as Markdown."""
    (part,), background, many = saves.parts, engine.find(SAVES), small.part(SMALL_SAVES)
    rows: dict[str, Callable[[str], str]] = {}
    if background is not None:
        rows["background save, ms: the call + what the next step waits"] = lambda name: _waits(background, name)
    small_row = f"save of {many.scenario.state.num_tensors:,} small tensors, {many.scenario.world} ranks, s"
    rows[small_row] = lambda name: _median(many.series(name, measure="save"))
    rows["CPU of a save + a load, s per GB"] = lambda name: _both(
        part, name, lambda measure: f"{part.cpu_s_per_gb(name, measure=measure):.2f}"
    )
    rows["extra memory of a rank in a save + in a load, MB"] = lambda name: _both(
        part, name, lambda measure: f"{part.peak_nbytes(name, measure) / 1e6:,.0f}"
    )

    def column(name: str) -> Callable[[str], str]:
        return lambda row: rows[row](name)

    lines = table("", {row: row for row in rows}, [(title, column(name)) for name, title in CONTENDERS.items()])
    scenario, num_cpus = part.scenario, part.environment.num_cpus
    how = (
        f"Medians. {scenario.state.nbytes / 1e9:.2f} GB of state, {scenario.world} ranks and {num_cpus} CPU cores, "
        "where the row does not say otherwise. All contenders of a row took turns in one run on one machine."
    )
    return "\n".join((*lines, "", how))


def moved_onto_other_layout(loads: Result) -> Part | None:
    """The load onto another layout that the README shows."""
    return loads.find("fsdp-tp")


def _both(part: Part, name: str, figure: Callable[[str], str]) -> str:
    """A figure of the save and one of the load."""
    found = [figure(measure) if part.series(name, measure=measure) else NO_FIGURE for measure in MEASURES]
    return " + ".join(found)


def _median(series: Sequence[float]) -> str:
    return f"{median(series):.2f}" if series else NO_FIGURE


def _waits(part: Part, column: str) -> str:
    name = _BACKGROUND.get(column, "")
    series = [part.series(name, key, measure=BESIDE_WORK) for key in ("blocked_s", "step_wait_s")]
    return " + ".join(f"{1000 * median(each):,.0f}" for each in series) if all(series) else NO_FIGURE
