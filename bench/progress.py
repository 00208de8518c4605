"""Progress in a terminal; silence elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.schema import WARM_UP, Sample


@contextmanager
def progress(num_turns: int) -> Iterator[Callable[[str], None]]:
    """Show how many of `num_turns` are done on stderr; call the yielded function after each, with what it was."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(file=sys.stderr)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting the ranks", total=num_turns)

        yield lambda text: bar.update(task, advance=1, description=text)


def describe(sample: Sample) -> str:
    """One turn in words."""
    where = "warm-up" if sample.round == WARM_UP else f"round {sample.round}"
    return f"{where}: {sample.measure} {sample.contender} {max(sample.values['seconds']):.2f} s"
