"""The README's chart: how much of the disk's speed saves and loads reach, as a picture for light and dark pages."""

from __future__ import annotations

import io
from pathlib import Path

from bench.front import CONTENDERS, moved_onto_other_layout
from bench.save_load import MEASURES
from bench.schema import Part, Result
from bench.statistics import median

_COLORS = ("#2f81f7", "#8b949e", "#c9ced6")
_HEIGHT = 0.26
#: matplotlib writes colours into each element; where the reader prefers dark pages, these take their place. The
#: background goes with them, for a page may be light for a reader who prefers dark ones.
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


def draw_front(saves: Result, loads: Result, path: Path) -> None:
    """Draw the median shares of the disk's speed as an SVG at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_chart(saves, loads))


def render_chart(saves: Result, loads: Result) -> str:
    """The chart as SVG. Equal figures give equal bytes, so that a test can compare the file with the results."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    groups = _groups(saves, loads)
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
                axes.text(
                    _label_at(share or 0), place, "not possible" if share is None else f"{share:.2f}", va="center"
                )
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


def _label_at(share: float) -> float:
    """The position of the figure behind a bar. If it would cross the line of the limit, it stands behind that line."""
    return (1 if 0.92 < share < 1 else share) + 0.01


def _groups(saves: Result, loads: Result) -> dict[str, dict[str, float]]:
    """Medians by contender, for each group of bars by its label. Who cannot take part is missing."""
    (part,), moved = saves.parts, moved_onto_other_layout(loads)
    groups = {measure: _medians(part, measure) for measure in MEASURES}
    if moved is not None:
        groups[f"load {moved.scenario.title}".replace("-> ", "->\n")] = _medians(moved, "load")
    return groups


def _medians(part: Part, measure: str) -> dict[str, float]:
    return {each.name: median(part.shares(each.name, measure=measure)) for each in part.able}
