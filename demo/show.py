"""The output of the demo: progress, the table of promises, the picture."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from demo.promises import Promise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: As wide as the terminal; lines that go to a file or a pipe stay unbroken.
CONSOLE = Console(width=None if sys.stdout.isatty() else 1000)
_GREY, _BLUE, _RED = "#b8bcc4", "#1f5fa8", "#c8232c"
#: Colours and lines of the resumed trainings.
_STYLES = (("#f08c00", "-"), ("#1e7a46", "--"))


@dataclass(frozen=True)
class Curves:
    """Loss by step of all trainings; the job was killed in the save of step `killed`, the others began at `head`."""

    reference: Mapping[int, float]
    job: Mapping[int, float]
    resumed: Mapping[int, Mapping[int, float]]
    killed: int
    head: int


def say(text: str) -> None:
    """One line of the story."""
    CONSOLE.print(Text(text))


@contextmanager
def chapter(title: str, *, steps: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A training in the story: a bar in a terminal while it runs, then a line with its time."""
    start_s = time.monotonic()
    columns = (TextColumn("  {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=CONSOLE, transient=True, disable=not CONSOLE.is_terminal) as bar:
        task = bar.add_task(title, total=steps, completed=done)
        yield lambda step: bar.update(task, completed=max(step, done))
    CONSOLE.print(Text.assemble(title, (f"  {time.monotonic() - start_s:.0f} s", "dim")))


def table_of(promises: Sequence[Promise]) -> Table:
    """The promises in a table."""
    table = Table(title="What holdfast promised, and what was seen", title_justify="left", expand=False)
    table.add_column("")
    table.add_column("promise", ratio=2)
    table.add_column("seen", ratio=3)
    for promise in promises:
        mark = Text("kept", "bold green") if promise.kept else Text("BROKEN", "bold red")
        table.add_row(mark, promise.text, Text(promise.seen), end_section=True)
    return table


def draw(curves: Curves, path: Path) -> None:
    """Draw losses, and their differences from the reference, as a PNG at `path`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
    figure.suptitle("A training killed in the middle of a save, and resumed on 2 and on 4 ranks", fontsize=12)
    _draw_losses(upper, curves)
    _draw_differences(lower, curves)
    for axes in (upper, lower):
        axes.axvline(curves.killed, color=_RED, linewidth=1.4)
        axes.axvline(curves.head, color="#606060", linewidth=1, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e8e8e8")
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def _draw_losses(axes: Axes, curves: Curves) -> None:
    axes.plot(*_xy(curves.reference), color=_GREY, linewidth=8, label="reference, 2 ranks, never interrupted")
    axes.plot(*_xy(curves.job), color=_BLUE, linewidth=4, label="the job, 2 ranks, until it was killed")
    for (world_size, losses), (color, style) in zip(curves.resumed.items(), _STYLES, strict=True):
        axes.plot(*_xy(losses), style, color=color, linewidth=1.8, label=f"resumed on {world_size} ranks")
    axes.set_ylabel("loss of the whole batch (nats per byte)")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.09, 0.86))
    top = axes.get_ylim()[1]
    killed = f" SIGKILL in the save\n of step {curves.killed}"
    head = f"resumed from here, \nthe head: step {curves.head} "
    axes.text(curves.killed, top, killed, color=_RED, va="top", fontsize=9)
    axes.text(curves.head, top, head, color="#606060", va="top", ha="right", fontsize=9)


def _draw_differences(axes: Axes, curves: Curves) -> None:
    for (world_size, losses), (color, style) in zip(curves.resumed.items(), _STYLES, strict=True):
        steps, differences = _xy({step: loss - curves.reference[step] for step, loss in losses.items()})
        largest = max(map(abs, differences), default=0.0)
        label = f"{world_size} ranks: at most {largest:.1e}" if largest else f"{world_size} ranks: none"
        axes.plot(steps, differences, style, color=color, linewidth=1.8, label=label)
    axes.ticklabel_format(axis="y", style="scientific", scilimits=(0, 0))
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(0.09, 0.5), title="difference from the reference")
    axes.set_ylabel("difference (nats)")
    axes.set_xlabel("step")


def _xy(losses: Mapping[int, float]) -> tuple[list[int], list[float]]:
    return list(losses), list(losses.values())
