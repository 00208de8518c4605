"""The README's figures: a table of a few of all benchmarks, and a chart of how much of the disk's speed saves and loads
reach, for light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Callable
from statistics import median

from bench.contenders import THREAD
from bench.emulated_nodes import RESTORE, SHAPED, of_plain
from bench.engine import SAVES
from bench.engine_turns import BESIDE_WORK
from bench.markdown import NO_FIGURE, cpu, memory, table
from bench.save_load import LOAD, MEASURES, SAVE
from bench.schema import OURS, Part, Result
from bench.small import SAVES as SMALL_SAVES

CONTENDERS = {OURS: "Holdfast", "dcp": "PyTorch DCP", "torch.save": "torch.save"}
#: The contender that saves in the background, for each column that has one.
_BACKGROUND = {OURS: OURS, "dcp": THREAD}
_COLORS = ("#2f81f7", "#8b949e", "#c9ced6")
_HEIGHT = 0.26
#: Replaces matplotlib's colours where the reader prefers dark pages, with a background, as the page may be light.
_STYLE = """<style>
svg { background: #ffffff }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117 }
  text { fill: #e6edf3 !important }
  #limit path { stroke: #e6edf3 !important }
}
</style>
"""
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def render_front(saves: Result, engine: Result, small: Result, nodes: Result) -> str:
    (part,), background, many = saves.parts, engine.part(SAVES), small.part(SMALL_SAVES)
    lost = nodes.part(SHAPED)

    def waits(name: str) -> str:
        keys = ("blocked_s", "step_wait_s")
        series = [background.series(_BACKGROUND.get(name, ""), key, measure=BESIDE_WORK) for key in keys]
        return " + ".join(f"{1000 * median(each):,.0f}" for each in series) if all(series) else NO_FIGURE

    def small_save_s(name: str) -> str:
        series = many.series(name, measure=SAVE)
        return f"{median(series):.2f}" if series else NO_FIGURE

    def both(cost: Callable[[Part, str, str], str]) -> Callable[[str], str]:
        able = {each.name for each in part.able}
        return lambda name: " + ".join(cost(part, name, measure) if name in able else NO_FIGURE for measure in MEASURES)

    def lost_node(name: str) -> str:
        return f"{median(of_plain(lost, RESTORE)):.2f}" if name == OURS else NO_FIGURE

    saved, scenario, num_cpus = many.scenario, part.scenario, part.environment.num_cpus
    rows: dict[str, Callable[[str], str]] = {
        "background save, ms: the call + what the next step waits": waits,
        f"save of {saved.state.num_tensors:,} small tensors, {saved.world} ranks, s": small_save_s,
        f"one of {lost.scenario.world} nodes is lost: restore from the others, of a plain copy over TCP": lost_node,
        "CPU of a save + a load, s per GB": both(cpu),
        "extra memory of a rank in a save + in a load, MB": both(memory),
    }

    def column(name: str) -> Callable[[Callable[[str], str]], str]:
        return lambda cell: cell(name)

    lines = table("", rows, *((label, column(name)) for name, label in CONTENDERS.items()))
    how = (
        f"Medians. {scenario.state.nbytes / 1e9:.2f} GB of state, {scenario.world} ranks and {num_cpus} CPU cores, "
        "where the row does not say otherwise. All contenders of a row took turns in one run on one machine."
    )
    return f"{lines}\n\n{how}"


def render_chart(saves: Result, loads: Result) -> str:
    """The chart as SVG. Equal figures give equal bytes, so that a test can compare the file with the results."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    (part,), moved = saves.parts, loads.part("fsdp-tp")
    groups = {measure: _medians(part, measure) for measure in MEASURES}
    groups[f"load {moved.scenario.title}".replace("-> ", "->\n")] = _medians(moved, LOAD)
    with mpl.rc_context({"svg.hashsalt": "holdfast", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(7.4, 0.5 + 0.85 * len(groups)), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.patch.set_alpha(0)
        for number, (name, label) in enumerate(CONTENDERS.items()):
            found = [shares.get(name) for shares in groups.values()]
            places = [group + (number - 1) * _HEIGHT for group in range(len(groups))]
            axes.barh(places, [share or 0 for share in found], 0.9 * _HEIGHT, color=_COLORS[number], label=label)
            for place, share in zip(places, found, strict=True):
                words = "not possible" if share is None else f"{share:.2f}"
                # A text that would lie on the line of the limit begins behind it.
                end = 1 if share is not None and 0.92 < share < 1 else share or 0
                axes.text(end + 0.01, place, words, va="center")
        limit = axes.axvline(1, color="#1f2328", linestyle="--", linewidth=1)
        limit.set_gid("limit")
        axes.set_yticks(range(len(groups)), list(groups))
        axes.invert_yaxis()
        axes.set_xlim(0, 1.19)
        axes.set_xticks([])
        axes.text(1.01, -0.62, "the disk's limit", va="center", fontsize=9)
        axes.tick_params(left=False)
        axes.spines[:].set_visible(False)
        figure.legend(loc="outside lower center", ncols=len(CONTENDERS), frameon=False, handlelength=1)
        written = io.StringIO()
        figure.savefig(written, format="svg", metadata=_NO_METADATA)
    before, tag, after = written.getvalue().partition("<defs>")
    return "\n".join(line.rstrip() for line in f"{before}{_STYLE}{tag}{after}".splitlines()) + "\n"


def _medians(part: Part, measure: str) -> dict[str, float]:
    """Median shares by contender. Contenders that cannot take part are missing."""
    return {each.name: median(part.shares(each.name, measure=measure)) for each in part.able}
