"""Tables of Markdown, and the sentences that stand below most of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from bench.environment import in_words
from bench.schema import RESULTS, Bar, Part

K = TypeVar("K", bound=Hashable)


def table(head: str, rows: Mapping[K, str], columns: Sequence[tuple[str, Callable[[K], str]]]) -> list[str]:
    """The lines of a table: of each of `rows`, by its key, the label; of `columns`, the titles, and how a cell is made
    of the key of its row."""
    lines = [[head, *(title for title, _ in columns)], ["---"] * (1 + len(columns))]
    lines += [[label, *(cell(key) for _, cell in columns)] for key, label in rows.items()]
    top, rule, *rest = (_line(cells) for cells in lines)
    return [top, rule.replace(" ", ""), *rest]


def whereabouts(result: str, part: Part, *, packages: bool = False) -> str:
    """The place and time of the measurement of `part`, and the file of its samples."""
    found = "".join(f", {name} {version}" for name, version in part.packages.items()) if packages else ""
    return f"{in_words(part.environment)}{found}, {part.date[:10]}. {samples_link(result)}."


def samples_link(result: str) -> str:
    """The link from `docs/benchmarks.md` to the samples of a result."""
    return f"[Samples](../{RESULTS / result}.json)"


def reasons(part: Part) -> str:
    """The contenders that could not take part, each with the reason."""
    return "".join(f" Not possible for {name}: {reason}." for name, reason in part.not_possible.items())


def ways_in_words(part: Part) -> str:
    """The ways in which the raw limit was tried."""
    return f"{'; '.join(part.raw_ways)} (threads of a rank x size of a request)"


def in_time(what: str, seconds: float, most_s: float) -> Bar:
    """A bar: at most so many seconds."""
    return Bar(what, seconds, most_s, f"{what} {_amount(seconds)}")


def time_bars(bars: Iterable[Bar]) -> tuple[str, ...]:
    """A paragraph that names the `bars` that were met, all of them `in_time`; empty where there are no bars."""
    every = tuple(bars)
    if not every:
        return ()
    most = " and ".join(_amount(most_s) for most_s in sorted({bar.limit for bar in every}, reverse=True))
    return (f"Bars ({most}): {'; '.join(bar.text() for bar in every)}.", "")


def _line(cells: Iterable[str]) -> str:
    return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)


def _amount(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"
