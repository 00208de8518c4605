"""Tables of Markdown, the cells in them and the words below them, and their places in a document: between markers such
as ``<!-- bench:start -->`` and ``<!-- bench:end -->``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType

from bench.schema import RAW, BenchError, Part

RESULTS = Path("bench/results")
#: The cell of a missing figure.
NO_FIGURE = "-"


def table(titles: Sequence[str], *rows: Iterable[str]) -> str:
    top, *rest = ("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in (titles, *rows))
    return "\n".join((top, "|" + "---|" * len(titles), *rest))


def labels(part: Part, verified: str = "") -> dict[str, str]:
    """The contenders that took part, for the heads of rows; with `verified` where one checks what it loads."""
    checks = {each.name: f" {verified}" if verified and each.verified != "no" else "" for each in part.able}
    return {name: "raw limit" if name == RAW else f"{name}{suffix}" for name, suffix in checks.items()}


def text(series: Sequence[float], digits: int = 2, *, scale: float = 1.0) -> str:
    """The median and the extremes of `series`, times `scale`; a dash when it is empty."""
    if not series:
        return NO_FIGURE
    middle, low, high = (f"{scale * each:.{digits}f}" for each in (median(series), min(series), max(series)))
    return f"{middle} ({low} to {high})"


def of_raw(part: Part, name: str, measure: str) -> str:
    return "1" if name == RAW else text(part.shares(name, measure=measure))


def cpu(part: Part, name: str, measure: str) -> str:
    return f"{part.cpu_s_per_gb(name, measure=measure):.2f}"


def memory(part: Part, name: str, *measures: str) -> str:
    return f"{part.peak_nbytes(name, *measures) / 1e6:.0f}"


def whereabouts(result: str, part: Part, *, packages: bool = False) -> str:
    """Where and when `part` was measured, and where its samples are."""
    found = "".join(f", {name} {version}" for name, version in part.packages.items()) if packages else ""
    return f"{part.environment.in_words()}{found}, {part.date[:10]}. {samples_link(result)}."


def samples_link(result: str) -> str:
    return f"[Samples](../{RESULTS / result}.json)"


def reasons(*parts: Part, renamed: Mapping[str, str] = MappingProxyType({})) -> str:
    found = (reason for part in parts for reason in part.not_possible.items())
    return "".join(dict.fromkeys(f" Not possible for {renamed.get(name, name)}: {reason}." for name, reason in found))


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:start -->", f"<!-- {name}:end -->"


def replace_part(text: str, name: str, rendered: str, *, where: Path) -> str:
    """`text` with `rendered` between the markers of `name`; BenchError unless the document `where` has each once."""
    start, end = markers(name)
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise BenchError(f"{where} needs one line {start} and below it one line {end}. Add both.")
    return re.sub(f"{start}.*{end}", lambda _: f"{start}\n{rendered}\n{end}", text, flags=re.DOTALL)
