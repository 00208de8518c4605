"""The progress bar. Apart from what shows it, because only long work at a terminal waits for the import of rich."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from holdfast.reports import size


class _Bytes(ProgressColumn):
    """How many bytes are done, of how many, and how fast, on one line; nothing where bytes are not counted."""

    def get_table_column(self) -> Column:
        return Column(no_wrap=True)

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text()
        done = f"{size(int(task.completed))} of {size(int(task.total))}"
        speed = task.finished_speed or task.speed
        return Text(done if speed is None else f"{done}, {size(int(speed))}/s")


class _Time(ProgressColumn):
    """The time that is left; where that cannot be told, the time that has passed."""

    def __init__(self) -> None:
        super().__init__()
        self._elapsed, self._remaining = TimeElapsedColumn(), TimeRemainingColumn()

    def render(self, task: Task) -> Text:
        return (self._elapsed if task.total is None else self._remaining).render(task)


class _Screen(Console):
    """Standard error, whose cursor stays: a process that is killed could not bring it back."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        return False


def bar() -> Progress:
    """A bar on standard error that is gone when its work is done. Whoever updates it draws it: no thread, and standard
    output and standard error are left as they are."""
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
