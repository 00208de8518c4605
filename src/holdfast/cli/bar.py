"""The progress bar. Apart from what else is on screen, because only long work at a terminal waits for its import."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from holdfast.reports import size


class _Bytes(ProgressColumn):
    """How many bytes are done, of how many, and how fast, on one line."""

    def get_table_column(self) -> Column:
        return Column(no_wrap=True)

    def render(self, task: Task) -> Text:
        done = f"{size(int(task.completed))} of {size(int(task.total or 0))}"
        speed = task.finished_speed or task.speed
        return Text(done if speed is None else f"{done}, {size(int(speed))}/s")


def bar(screen: Console, *, counted: bool) -> Progress:
    """A bar that is gone when its work is done. Work that is not `counted` shows only that it goes on."""
    columns = (_Bytes(), TimeRemainingColumn()) if counted else (TimeElapsedColumn(),)
    return Progress(TextColumn("{task.description}"), BarColumn(), *columns, console=screen, transient=True)
