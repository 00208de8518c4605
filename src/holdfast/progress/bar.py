"""The progress bar. A module of its own, so that only long work at a terminal waits for the import of rich."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from holdfast.reports import size


class _Bytes(ProgressColumn):
    """A column with the bytes done, the bytes in all and the speed on one line; empty where the total is not known."""

    def get_table_column(self) -> Column:
        return Column(no_wrap=True)

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        done = f"{size(int(task.completed))} of {size(int(task.total))}"
        speed = task.finished_speed or task.speed
        return Text(done if speed is None else f"{done}, {size(int(speed))}/s")


class _Time(ProgressColumn):
    """A column with the time left, or with the time passed where the time left is not known."""

    def __init__(self) -> None:
        super().__init__()
        self._elapsed, self._remaining = TimeElapsedColumn(), TimeRemainingColumn()

    def render(self, task: Task) -> Text:
        return (self._elapsed if task.total is None else self._remaining).render(task)


class _Screen(Console):
    """A console on standard error that never hides the cursor: a killed process could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        return False


def bar() -> Progress:
    """A bar on standard error that disappears when its work is done.

    The thread that updates the bar draws it: rich starts no thread and redirects neither standard output nor standard
    error.
    """
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        _Bytes(),
        _Time(),
        console=_Screen(stderr=True, highlight=False, markup=False, emoji=False),
        transient=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
