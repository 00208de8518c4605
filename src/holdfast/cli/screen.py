"""Output that all commands share: widths, sizes, times, errors, questions, JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from threading import Lock
from typing import Literal

import msgspec
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from holdfast.errors import ConfigurationError, HoldfastError, printable, to_wire
from holdfast.progress import progress

_AGES = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
#: The width where output is no terminal: programs and files read it, so lines must not be broken.
_UNBROKEN = 10_000
#: Columns whose cells cannot be read on two lines.
_NEVER_WRAPPED = ("", "place", "saved", "dtype")
#: The least widths of folded columns, of those named here and of others, while another column can still be left out.
_READABLE = {"metrics": 16, "diverged": 16, "value": 24}
_READABLE_NAME = 40
_GAP = 2
_WORD = re.compile(r"\S+")


def console(*, stderr: bool = False) -> Console:
    """A console on standard output or standard error: as wide as the terminal, or with unbroken lines without one."""
    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() else _UNBROKEN
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def say(screen: Console, text: str | Text, style: str = "") -> None:
    """Print prose.

    At a terminal, break lines between words only: the terminal wraps a word that is longer than a line, such as a path,
    so that users can copy it whole. Elsewhere, break no lines.
    """
    whole = Text(text, style) if isinstance(text, str) else text
    for line in whole.split("\n", allow_blank=True):
        for part in line.divide(_breaks(line.plain, screen.width)) if screen.is_terminal else [line]:
            part.rstrip()
            screen.print(part, soft_wrap=True)


def _breaks(line: str, width: int) -> list[int]:
    """The positions at which to break a line, so that each part fits `width` unless one word is wider."""
    breaks, start = [], 0
    for word in _WORD.finditer(line):
        if line[start : word.start()].strip() and cell_len(line[start : word.end()]) > width:
            start = word.start()
            breaks.append(start)
    return breaks


class Listing:
    """A table without lines. Columns named in `right` are right-aligned, for numbers.

    Where the terminal is too narrow, the columns named in `spare` are left out, the first of them first, and a last
    line names them. Columns that are still too wide are folded: no character is lost.
    """

    def __init__(self, *columns: str, right: Sequence[str] = (), spare: Sequence[str] = ()) -> None:
        self._columns = columns
        self._right = right
        self._spare = spare
        self._rows: list[tuple[str | Text, ...]] = []

    def add_row(self, *cells: str | Text) -> None:
        """Add a row. Missing cells at its end are empty."""
        self._rows.append((*cells, *("" for _ in self._columns[len(cells) :])))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = [
            max(_width(name), *(_width(row[at]) for row in self._rows), 0) for at, name in enumerate(self._columns)
        ]
        shown = list(range(len(self._columns)))
        for name in self._spare:
            if name in self._columns and self._least(shown, widths) > options.max_width:
                shown.remove(self._columns.index(name))
        if sum(widths[at] + _GAP for at in shown) - _GAP <= options.max_width:
            yield from self._lines(console, shown, widths)
        else:
            yield self._table(shown, fold=self._least(shown, widths) > options.max_width)
        hidden = [name for at, name in enumerate(self._columns) if at not in shown]
        if hidden:
            yield Text(f"(too narrow to show: {', '.join(hidden)})", "dim")

    def _least(self, shown: Sequence[int], widths: Sequence[int]) -> int:
        """The width of the columns `shown` when all that can be folded are folded, but still readable."""
        return sum(
            widths[at] if self._is_whole(at) else min(widths[at], _READABLE.get(self._columns[at], _READABLE_NAME))
            for at in shown
        ) + _GAP * (len(shown) - 1)

    def _is_whole(self, at: int) -> bool:
        name = self._columns[at]
        return name in self._right or name in _NEVER_WRAPPED

    def _lines(self, console: Console, shown: Sequence[int], widths: Sequence[int]) -> Iterator[Segment]:
        """The columns `shown` without folding: a hundred times faster than a table that can fold."""
        header = (Text(name, "bold") for name in self._columns)
        for row in (tuple(header), *self._rows):
            line = ""
            for number, at in enumerate(shown):
                cell, gap = row[at], " " * (widths[at] - _width(row[at]))
                is_right = self._columns[at] in self._right
                line += (" " * _GAP if number else "") + (gap if is_right else "")
                if isinstance(cell, Text):
                    yield Segment(line)
                    yield from cell.render(console, end="")
                    line = ""
                else:
                    line += cell
                line += "" if is_right or at == shown[-1] else gap
            yield Segment(line)
            yield Segment.line()

    def _table(self, shown: Sequence[int], *, fold: bool) -> Table:
        """The columns `shown` as a table that folds; with `fold`, all columns may be folded."""
        made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, _GAP, 0, 0))
        for at in shown:
            name = self._columns[at]
            justify: Literal["left", "right"] = "right" if name in self._right else "left"
            made.add_column(name, justify=justify, overflow="fold", no_wrap=self._is_whole(at) and not fold)
        for row in self._rows:
            made.add_row(*(row[at] for at in shown))
        return made


def _width(cell: str | Text) -> int:
    if isinstance(cell, Text):
        return cell.cell_len
    return len(cell) if cell.isascii() else cell_len(cell)


def when(unix_s: float) -> str:
    """A moment as text in local time."""
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age(seconds: float) -> str:
    """A duration as text, in its largest unit."""
    for unit_s, unit in _AGES:
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return "now"


def ago(seconds: float) -> str:
    """The text of how long ago something was."""
    return f"{age(seconds)} ago" if seconds >= 1 else "now"


def metrics_text(metrics: dict[str, str | float]) -> str:
    """Metrics of a checkpoint on one line."""
    return " ".join(f"{printable(name)}={float(value):.4g}" for name, value in metrics.items())


def print_json(value: object) -> None:
    """Print one JSON document on standard output, in ASCII.

    Names come from files that anybody may have written, so none of their characters may act on a terminal.
    """
    print(json.dumps(msgspec.to_builtins(value), ensure_ascii=True))


def print_error(error: HoldfastError) -> None:
    """Print an error as the one JSON document on standard output."""
    print_json({"error": to_wire(error)})


@contextmanager
def counting(description: str, total: int | None, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar while the block runs, unless `quiet`. Gives a function that advances it by bytes, from any thread.

    `total` is None for work that is not counted in bytes.
    """
    done, lock = 0, Lock()

    def advance(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes

    with progress(description, shown=not quiet) as meter:
        if total is not None:
            meter.follow(total, lambda: done)
        yield advance


def confirmed(question: str, *, yes: bool) -> bool:
    """Ask the user at the terminal, and return whether they say yes. With `yes`, do not ask.

    Raises `ConfigurationError`, code ``config.confirmation``, where standard input is no terminal.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigurationError(
            "this command needs a confirmation, but standard input is not a terminal.",
            code="config.confirmation",
            action="Pass --yes to go ahead without a question.",
        )
    console(stderr=True).print(f"{question} [y/N] ", end="")
    try:
        answer = input()
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    console(stderr=True).print("Nothing was changed.")
    return False


def explain(error: HoldfastError) -> None:
    """Print an error on standard error: its message, details and next action."""
    screen = console(stderr=True)
    words = ("error ", "bold red"), (f"[{error.code}] ", "dim"), printable(error.message)
    say(screen, Text.assemble(*words))
    for detail in error.details:
        say(screen, Text(f"  {printable(detail)}"))
    say(screen, Text(printable(error.action)))
