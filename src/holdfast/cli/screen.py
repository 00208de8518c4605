"""What all commands share on screen: widths, sizes, times, errors, questions, JSON."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from holdfast.errors import ConfigurationError, HoldfastError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_AGES = ((86400 * 365, "y"), (86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
#: What is not written to a terminal goes to programs and files, whose lines nobody shall break.
_UNBROKEN = 10_000
#: Columns of words that make no sense in two lines.
_NEVER_WRAPPED = ("", "place", "saved", "dtype")


def console(*, stderr: bool = False) -> Console:
    """Standard output or standard error: as wide as the terminal, unbroken lines where there is none."""
    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() or "COLUMNS" in os.environ else _UNBROKEN
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without lines; columns named in `right` hold numbers."""
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        whole = name in (*right, *_NEVER_WRAPPED)
        made.add_column(name, justify="right" if name in right else "left", overflow="fold", no_wrap=whole)
    return made


def printable(text: str) -> str:
    """`text` without what a terminal would obey: names and values come from files that anybody may have written."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def size(nbytes: int) -> str:
    """`nbytes` for people."""
    number = float(nbytes)
    for unit in _UNITS:
        if number < 1024 or unit == _UNITS[-1]:
            return f"{nbytes} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


def count(number: int, what: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def when(unix_s: float) -> str:
    """A moment in local time."""
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def age(seconds: float) -> str:
    """A time that has passed, in its largest unit."""
    for unit_s, unit in _AGES:
        if seconds >= unit_s:
            return f"{int(seconds // unit_s)} {unit}"
    return "now"


def ago(seconds: float) -> str:
    """How long ago something was."""
    return f"{age(seconds)} ago" if seconds >= 1 else "now"


def metrics_text(metrics: dict[str, str | float]) -> str:
    """Metrics of a checkpoint on one line."""
    return " ".join(f"{printable(name)}={float(value):.4g}" for name, value in metrics.items())


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    print(msgspec.json.encode(value).decode())


@contextmanager
def progress(description: str, total: int | None, *, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while the block runs, where that is a terminal; gives what advances it, by bytes.

    A `total` that is not known is one of work that is counted in something else. No bar where `quiet`.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from holdfast.cli.bar import bar

    with bar(console(stderr=True), counted=total is not None) as shown:
        task = shown.add_task(description, total=total)
        yield lambda nbytes: shown.advance(task, nbytes)


def confirmed(question: str, *, yes: bool) -> bool:
    """Whether the person at the terminal says yes; `yes` answers beforehand.

    Raises `ConfigurationError`, code ``config.confirmation``, where nobody can answer.
    """
    if yes:
        return True
    if not sys.stdin.isatty():
        raise ConfigurationError(
            "this needs a confirmation, and standard input is no terminal.",
            code="config.confirmation",
            action="Say --yes to go ahead without being asked.",
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
    """An error on standard error: what, and what to do."""
    screen = console(stderr=True)
    words = ("error ", "bold red"), (f"[{error.code}] ", "dim"), printable(error.message)
    screen.print(Text.assemble(*words), soft_wrap=True)
    screen.print(Text(printable(error.action)), soft_wrap=True)
