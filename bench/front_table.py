"""The README's table: a few figures of all benchmarks, for whoever sees the project first."""

from __future__ import annotations

from bench.engine_contenders import OURS, THREAD
from bench.engine_results import EngineResult, SavesPart
from bench.results import MEASURES, LoadResult, Result, ScenarioResult, SmallResult

_CONTENDERS = {"holdfast": "Holdfast", "dcp": "PyTorch DCP", "torch.save": "torch.save"}
#: Who of the columns saves in the background.
_BACKGROUND = {"holdfast": OURS, "dcp": THREAD}
_SHARE = "share of the disk's speed"
_NO_FIGURE = "-"


def render_front(saves: Result, loads: LoadResult, engine: EngineResult, small: SmallResult) -> str:
    """A few figures of each result as Markdown."""
    rows = [[f"{measure}, {_SHARE}", *_shares(saves, number)] for number, measure in enumerate(MEASURES)]
    rows += [[f"load {each.title}, {_SHARE}", *_moved(each)] for each in loads.scenarios if each.name == "fsdp-tp"]
    if engine.saves is not None:
        rows.append(["background save, ms: the call + what the next step waits", *_waits(engine.saves)])
    many = f"save of {small.setup.state.num_tensors:,} small tensors, {small.setup.world} ranks, s"
    rows.append([many, *_small(small)])
    lines = [f"| | {' | '.join(_CONTENDERS.values())} |", f"|---|{'---|' * len(_CONTENDERS)}"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join((*lines, "", _how(saves)))


def _how(saves: Result) -> str:
    setup, num_cpus = saves.setup, saves.environment.num_cpus
    return (
        f"Medians. {setup.state.nbytes / 1e9:.2f} GB of state, {setup.world} ranks and {num_cpus} CPU cores, where the "
        "row does not say otherwise. All contenders of a row took turns in one run on one machine."
    )


def _shares(result: Result, number: int) -> list[str]:
    of = {each.contender: each for each in result.summaries if each.measure == MEASURES[number]}
    return [f"{of[name].share_of_raw.median:.2f}" if name in of else _NO_FIGURE for name in _CONTENDERS]


def _moved(scenario: ScenarioResult) -> list[str]:
    unable = {each.contender for each in scenario.not_possible}
    of = {each.contender: f"{each.share_of_raw.median:.2f}" for each in scenario.summaries}
    return ["not possible" if name in unable else of.get(name, _NO_FIGURE) for name in _CONTENDERS]


def _waits(part: SavesPart) -> list[str]:
    of = {
        each.contender: f"{1000 * each.blocked_s.median:,.0f} + {1000 * each.step_wait_s.median:,.0f}"
        for each in part.summaries
        if each.blocked_s is not None and each.step_wait_s is not None
    }
    return [of.get(_BACKGROUND.get(name, ""), _NO_FIGURE) for name in _CONTENDERS]


def _small(result: SmallResult) -> list[str]:
    of = {each.contender: f"{each.seconds.median:.2f}" for each in result.summaries if each.measure == "save"}
    return [of.get(name, _NO_FIGURE) for name in _CONTENDERS]
