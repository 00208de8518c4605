"""Tables of Markdown, what stands in their cells and below them, and their places in a document: between markers such
as ``<!-- bench:start -->`` and ``<!-- bench:end -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeAlias, TypeVar

from bench.benchmark import Bar
from bench.environment import in_words
from bench.errors import MarkersError
from bench.schema import RAW, Part

K = TypeVar("K", bound=Hashable)
#: A column: its title, and how a cell is made of the key of its row.
Column: TypeAlias = tuple[str, Callable[[K], str]]

RESULTS = Path("bench/results")
#: What a table has in place of a figure that there is not.
NO_FIGURE = "-"


def table(head: str, rows: Mapping[K, str], columns: Sequence[Column[K]]) -> str:
    """A table: of each of `rows`, by its key, the label, and the cells of all `columns`."""
    lines = [[head, *(title for title, _ in columns)]]
    lines += [[label, *(cell(key) for _, cell in columns)] for key, label in rows.items()]
    top, *rest = ("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in lines)
    return "\n".join((top, "|" + "---|" * (1 + len(columns)), *rest))


def labels(part: Part, verified: str = "") -> dict[str, str]:
    """The contenders that took part, for the heads of rows; with `verified` where one checks what it loads."""
    found = {each.name: f"{each.name} {verified * (each.verified != 'no')}".rstrip() for each in part.able}
    return {name: "raw limit" if name == RAW else label for name, label in found.items()}


def text(series: Sequence[float], digits: int = 2, *, scale: float = 1.0) -> str:
    """The median and the extremes of `series`, times `scale`; a dash when it is empty."""
    if not series:
        return NO_FIGURE
    middle, low, high = (f"{scale * each:.{digits}f}" for each in (median(series), min(series), max(series)))
    return f"{middle} ({low} to {high})"


def figures(
    title: str, part: Part, key: str = "seconds", digits: int = 2, *, measure: str = "", scale: float = 1.0
) -> Column[str]:
    """A column of medians and extremes of one value."""
    return title, lambda name: text(part.series(name, key, measure=measure), digits, scale=scale)


def shares(part: Part, measure: str) -> Column[str]:
    """A column of shares of the raw limit."""
    return "of raw", lambda name: "1" if name == RAW else text(part.shares(name, measure=measure))


def cpu(part: Part, name: str, measure: str) -> str:
    """CPU seconds of all ranks per GB."""
    return f"{part.cpu_s_per_gb(name, measure=measure):.2f}"


def memory(part: Part, name: str, *measures: str) -> str:
    """The most memory of a rank in any of `measures`, in MB."""
    return f"{part.peak_nbytes(name, *measures) / 1e6:.0f}"


def whereabouts(result: str, part: Part, *, packages: bool = False) -> str:
    """Where and when `part` was measured, and where its samples are."""
    found = "".join(f", {name} {version}" for name, version in part.packages.items()) if packages else ""
    return f"{in_words(part.environment)}{found}, {part.date[:10]}. {samples_link(result)}."


def samples_link(result: str) -> str:
    """The link from `docs/benchmarks.md` to the samples of a result."""
    return f"[Samples](../{RESULTS / result}.json)"


def reasons(part: Part) -> str:
    """Who could not take part, and why."""
    return "".join(f" Not possible for {name}: {reason}." for name, reason in part.not_possible.items())


def raw_in_words(part: Part) -> str:
    """The ways in which the raw limit was tried."""
    return f"{'; '.join(part.raw_ways)} (threads of a rank x size of a request)"


def in_time(what: str, series: Sequence[float], most_s: float) -> Bar:
    """A bar of so many seconds at most, for the median of `series`."""
    seconds = median(series)
    return Bar(what, seconds, most_s, f"{what} {_amount(seconds)}")


def verdicts(bars: Iterable[Bar], head: str = "") -> list[str]:
    """Which of `bars` were met, as a paragraph below `head`, or below the limits of those of `in_time`; none without
    bars."""
    every = tuple(bars)
    most = " and ".join(_amount(most_s) for most_s in sorted({bar.limit for bar in every}, reverse=True))
    return [f"Bars {head or f'({most})'}: {'; '.join(bar.text() for bar in every)}."] if every else []


def markers(name: str) -> tuple[str, str]:
    """The start and end markers of `name`."""
    return f"<!-- {name}:start -->", f"<!-- {name}:end -->"


def replace_part(text: str, name: str, rendered: str, *, where: Path) -> str:
    """`text` with `rendered` between the markers of `name`; MarkersError, naming `where`, unless they are there once
    each."""
    start, end = markers(name)
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise MarkersError(f"{where} needs one line {start} and below it one line {end}. Add both.")
    return re.sub(f"{start}.*{end}", lambda _: f"{start}\n{rendered}\n{end}", text, flags=re.DOTALL)


def _amount(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
