"""The shares of the raw limit as a picture."""

from __future__ import annotations

from pathlib import Path

from bench.results import MEASURES, RAW, Result


def plot_shares(result: Result, path: Path) -> None:
    """Draw median shares of the raw limit, with lowest and highest round, as a PNG at `path`."""
    from matplotlib.figure import Figure

    names = [contender.name for contender in result.contenders if contender.name != RAW]
    figure = Figure(figsize=(7, 1 + 0.45 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(MEASURES), sharey=True)
    panels[0].invert_yaxis()
    for axes, measure in zip(panels, MEASURES, strict=True):
        shares = [result.summary(measure, name).share_of_raw for name in names]
        below = [share.median - share.low for share in shares]
        above = [share.high - share.median for share in shares]
        axes.barh(names, [share.median for share in shares], xerr=(below, above), color="#4878a8", ecolor="#404040")
        axes.axvline(1, color="#404040", linestyle="--", linewidth=1)
        axes.set_title(f"{measure}: share of the raw limit", fontsize=10)
        axes.set_xlim(left=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
