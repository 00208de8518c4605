"""What all commands share on screen: sizes, times, errors, JSON."""

from __future__ import annotations

from datetime import datetime

import msgspec
from rich.console import Console
from rich.text import Text

from holdfast.errors import HoldfastError

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size(nbytes: int) -> str:
    """`nbytes` for people."""
    number = float(nbytes)
    for unit in _UNITS:
        if number < 1024 or unit == _UNITS[-1]:
            return f"{nbytes} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("unreachable")


def when(unix_s: float) -> str:
    """A moment in local time."""
    return datetime.fromtimestamp(unix_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def print_json(value: object) -> None:
    """One JSON document on standard output."""
    print(msgspec.json.encode(value).decode())


def explain(error: HoldfastError) -> None:
    """An error on standard error: what, and what to do."""
    console = Console(stderr=True)
    console.print(Text.assemble(("error ", "bold red"), (f"[{error.code}] ", "dim"), error.message), soft_wrap=True)
    console.print(Text(error.action), soft_wrap=True)
