"""Tables of Markdown, the sentences that stand below most of them, and their places in a document: between markers such
as ``<!-- bench:start -->`` and ``<!-- bench:end -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from bench.environment import in_words
from bench.schema import RAW, Bar, Contender, MarkersError, Part
from bench.statistics import text

K = TypeVar("K", bound=Hashable)

RESULTS = Path("bench/results")


def table(head: str, rows: Mapping[K, str], columns: Sequence[tuple[str, Callable[[K], str]]]) -> list[str]:
    """The lines of a table: of each of `rows`, by its key, the label; of `columns`, the titles, and how a cell is made
    of the key of its row."""
    lines = [[head, *(title for title, _ in columns)]]
    lines += [[label, *(cell(key) for _, cell in columns)] for key, label in rows.items()]
    top, *rest = ("|" + "".join(f" {cell} |" if cell else " |" for cell in cells) for cells in lines)
    return [top, "|" + "---|" * (1 + len(columns)), *rest]


def label(contender: Contender, verified: str = "") -> str:
    """A contender at the head of its row; `verified` where it checks what it loads."""
    if contender.name == RAW:
        return "raw limit"
    return f"{contender.name} {verified}" if verified and contender.verified != "no" else contender.name


def of_raw(part: Part, name: str, measure: str) -> str:
    """Its shares of the raw limit."""
    return "1" if name == RAW else text(part.shares(name, measure=measure))


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


def in_time(what: str, seconds: float, most_s: float) -> Bar:
    """A bar of so many seconds at most."""
    return Bar(what, seconds, most_s, f"{what} {_amount(seconds)}")


def time_bars(bars: Iterable[Bar]) -> tuple[str, ...]:
    """Which of `bars` were met, all of `in_time`, as a paragraph; nothing where there are none."""
    every = tuple(bars)
    if not every:
        return ()
    most = " and ".join(_amount(most_s) for most_s in sorted({bar.limit for bar in every}, reverse=True))
    return (f"Bars ({most}): {'; '.join(bar.text() for bar in every)}.", "")


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
