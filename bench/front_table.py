"""The README's figures: a few of all benchmarks, for readers who are new to the project."""

from __future__ import annotations

from collections.abc import Callable

from bench.engine_contenders import OURS, THREAD
from bench.engine_results import EngineResult, SavesPart
from bench.results import MEASURES, LoadResult, Result, ScenarioResult, SmallResult, Summary

CONTENDERS = {"holdfast": "Holdfast", "dcp": "PyTorch DCP", "torch.save": "torch.save"}
#: Who of the columns saves in the background.
_BACKGROUND = {"holdfast": OURS, "dcp": THREAD}
_NO_FIGURE = "-"


def render_front(saves: Result, engine: EngineResult, small: SmallResult) -> str:
    """A few figures of each result as Markdown."""
    rows = []
    if engine.saves is not None:
        rows.append(["background save, ms: the call + what the next step waits", *_waits(engine.saves)])
    many = f"save of {small.setup.state.num_tensors:,} small tensors, {small.setup.world} ranks, s"
    rows.append([many, *_small(small)])
    rows.append(["CPU of a save + a load, s per GB", *_both(saves, lambda part: f"{part.cpu_s_per_gb.median:.2f}")])
    extra = _both(saves, lambda part: f"{part.peak_extra_nbytes_per_rank / 1e6:,.0f}")
    rows.append(["extra memory of a rank in a save + in a load, MB", *extra])
    lines = [f"| | {' | '.join(CONTENDERS.values())} |", f"|---|{'---|' * len(CONTENDERS)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join((*lines, "", _how(saves)))


def moved_onto_other_layout(loads: LoadResult) -> list[ScenarioResult]:
    """The loads onto another layout that the README shows."""
    return [each for each in loads.scenarios if each.name == "fsdp-tp"]


def _how(saves: Result) -> str:
    setup, num_cpus = saves.setup, saves.environment.num_cpus
    return (
        f"Medians. {setup.state.nbytes / 1e9:.2f} GB of state, {setup.world} ranks and {num_cpus} CPU cores, where the "
        "row does not say otherwise. All contenders of a row took turns in one run on one machine."
    )


def _both(result: Result, figure: Callable[[Summary], str]) -> list[str]:
    """A figure of the save and one of the load, for each column."""
    of = {(each.contender, each.measure): figure(each) for each in result.summaries}
    return [" + ".join(of.get((name, measure), _NO_FIGURE) for measure in MEASURES) for name in CONTENDERS]


def _waits(part: SavesPart) -> list[str]:
    of = {
        each.contender: f"{1000 * each.blocked_s.median:,.0f} + {1000 * each.step_wait_s.median:,.0f}"
        for each in part.summaries
        if each.blocked_s is not None and each.step_wait_s is not None
    }
    return [of.get(_BACKGROUND.get(name, ""), _NO_FIGURE) for name in CONTENDERS]


def _small(result: SmallResult) -> list[str]:
    of = {each.contender: f"{each.seconds.median:.2f}" for each in result.summaries if each.measure == "save"}
    return [of.get(name, _NO_FIGURE) for name in CONTENDERS]
