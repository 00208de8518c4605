"""Tables of Markdown, the cells in them and the words below them, and their places in a document: between markers such
as ``<!-- io:start -->`` and ``<!-- io:end -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

from bench.schema import OURS, RAW, BenchError, Contender, Part

R = TypeVar("R")

#: The cell of a missing figure.
NO_FIGURE = "-"


def table(head: str, rows: Mapping[str, R], *columns: tuple[str, Callable[[R], str]]) -> str:
    """A table with a line for each of `rows`, by its label; each of `columns` has a title and makes a cell of a row."""
    titles = [head, *(title for title, _ in columns)]
    cells = [[label, *(cell(row) for _, cell in columns)] for label, row in rows.items()]
    top, *rest = ("|" + "".join(f" {cell} |" if cell else " |" for cell in line) for line in (titles, *cells))
    return "\n".join((top, "|" + "---|" * len(titles), *rest))


def labels(contenders: Iterable[Contender]) -> dict[str, str]:
    """The names of contenders, by the heads of their rows."""
    return {"raw limit" if each.name == RAW else each.name: each.name for each in contenders}


def text(series: Sequence[float], digits: int = 2, *, scale: float = 1.0) -> str:
    """The median and, of several, the extremes of `series`, times `scale`; a dash when it is empty."""
    if not series:
        return NO_FIGURE
    middle, low, high = (f"{scale * each:.{digits}f}" for each in (median(series), min(series), max(series)))
    return f"{middle} ({low} to {high})" if len(series) > 1 else middle


def ours(*keys: str, digits: int = 2, scale: float = 1.0) -> Callable[[Part], str]:
    """A cell with holdfast's median in a part, or the sum of its medians, times `scale`."""
    return lambda part: f"{scale * sum(part.median(OURS, key) for key in keys):.{digits}f}"


def of_raw(part: Part, name: str, measure: str) -> str:
    return "1" if name == RAW else text(part.shares(name, measure=measure))


def cpu(part: Part, name: str, measure: str) -> str:
    return f"{1e9 * part.per_byte(name, 'cpu_s', measure=measure):.2f}"


def memory(part: Part, name: str, measure: str | None = None) -> str:
    return f"{part.peak_nbytes(name, measure) / 1e6:,.0f}"


def about(part: Part) -> str:
    """The size of a scenario, of how many rounds its figures are medians, and why some contenders took no part."""
    scenario, state = part.scenario, part.scenario.state
    where = f"On {scenario.world:,} ranks" if scenario.world > 1 else "In one process"
    nbytes = f", {state.nbytes / 1e9:.2f} GB" if state.nbytes else ""
    tensors = f", {state.num_tensors:,} tensors" if state.num_tensors else ""
    rounds = f"medians of {scenario.rounds} rounds" if scenario.rounds > 1 else "one round"
    return f"{where}{nbytes}{tensors}: {rounds}.{reasons(part)}"


def fastest(part: Part, *measures: str) -> str:
    """A sentence that names the fastest way of the raw limit for each measure: the shares count from that one."""
    ways = (f"{measure}, {part.raw_way(measure).removeprefix(RAW).strip()}" for measure in measures)
    return f"The fastest raw loops: {'; '.join(ways)}."


def reasons(*parts: Part) -> str:
    found = (f" Not possible for {name}: {why}." for part in parts for name, why in part.not_possible.items())
    return "".join(dict.fromkeys(found))


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:start -->", f"<!-- {name}:end -->"


def replace_part(text: str, name: str, rendered: str, *, where: Path) -> str:
    """`text` with `rendered` between the markers of `name`; BenchError unless the document `where` has each once."""
    start, end = markers(name)
    if text.count(start) != 1 or text.count(end) != 1 or text.index(start) > text.index(end):
        raise BenchError(f"{where} needs one line {start} and below it one line {end}. Add both.")
    return re.sub(f"{start}.*{end}", lambda _: f"{start}\n{rendered}\n{end}", text, flags=re.DOTALL)
