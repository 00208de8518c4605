"""The output of the demo: progress, the table of promises, the picture."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from demo.promises import Losses, Promise

#: As wide as the terminal; lines that go to a file or a pipe stay unbroken.
CONSOLE = Console(width=None if sys.stdout.isatty() else 1000)
_GREY, _BLUE, _RED, _DARK = "#b8bcc4", "#1f5fa8", "#c8232c", "#606060"
#: Colours and lines of the resumed trainings.
_STYLES = (("#f08c00", "-"), ("#1e7a46", "--"))


def say(text: str) -> None:
    """One line of the story."""
    CONSOLE.print(Text(text))


@contextmanager
def chapter(title: str, *, steps: int, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A training in the story: its progress in a terminal while it runs, then a line with its time."""
    start_s = time.monotonic()
    with CONSOLE.status(title) as status:
        yield lambda step: status.update(f"{title}: {max(step, done)} of {steps} steps")
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


def draw(reference: Losses, job: Losses, resumed: Mapping[int, Losses], *, killed: int, head: int, path: Path) -> None:
    """Draw losses by step, and their differences from the reference, as a PNG at `path`. The job was killed in the save
    of step `killed`, and `resumed` from `head` on so many ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.2), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.3))
    figure.suptitle("A training killed in the middle of a save, and resumed on 2 and on 4 ranks", fontsize=12)
    upper.plot(*_xy(reference), color=_GREY, linewidth=8, label="reference, 2 ranks, never interrupted")
    upper.plot(*_xy(job), color=_BLUE, linewidth=4, label="the job, 2 ranks, until it was killed")
    for (world_size, losses), (color, style) in zip(resumed.items(), _STYLES, strict=True):
        upper.plot(*_xy(losses), style, color=color, linewidth=1.8, label=f"resumed on {world_size} ranks")
        steps, differences = _xy({step: loss - reference[step] for step, loss in losses.items()})
        largest = max(map(abs, differences), default=0.0)
        label = f"{world_size} ranks: at most {largest:.1e}" if largest else f"{world_size} ranks: none"
        lower.plot(steps, differences, style, color=color, linewidth=1.8, label=label)
    upper.set_ylabel("loss of the whole batch (nats per byte)")
    upper.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.09, 0.86))
    top = upper.get_ylim()[1]
    upper.text(killed, top, f" SIGKILL in the save\n of step {killed}", color=_RED, va="top", fontsize=9)
    resumed_at = f"resumed from here, \nthe head: step {head} "
    upper.text(head, top, resumed_at, color=_DARK, va="top", ha="right", fontsize=9)
    lower.ticklabel_format(axis="y", style="scientific", scilimits=(0, 0))
    lower.legend(frameon=False, loc="center left", bbox_to_anchor=(0.09, 0.5), title="difference from the reference")
    lower.set_ylabel("difference (nats)")
    lower.set_xlabel("step")
    for axes in (upper, lower):
        axes.axvline(killed, color=_RED, linewidth=1.4)
        axes.axvline(head, color=_DARK, linewidth=1, linestyle=":")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e8e8e8")
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def _xy(losses: Losses) -> tuple[list[int], list[float]]:
    return list(losses), list(losses.values())
