"""The heat map of phases and ranks. It shows which rank is slow in which phase."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

from holdfast.telemetry.charts import drawing, legend
from holdfast.telemetry.run_figures import DURABLE, HeatRow
from holdfast.wording import duration

#: The strength of a cell's colour is the number of these factors by which its time exceeds that of the middle rank.
_FACTORS: Final = (1.1, 1.25, 1.5, 2.0, 3.0)
#: Times that differ by less than this are equal. A rank looks only so often at what the keeper does.
_EXACT_S: Final = 0.002
_EXACT_OF_KEEPER_S: Final = 0.06
_OF_KEEPER: Final = ("seal", "store", DURABLE)
#: Most columns; with more ranks, several share one, which shows the slowest of them.
_MOST_COLUMNS: Final = 128
#: Most columns whose cells have their times as text in them.
_MOST_TEXTS: Final = 12
_LEFT, _TOP, _ROW = 84, 22, 24


class _Cell(NamedTuple):
    rank: int
    seconds: float


def level_of(row: HeatRow, seconds: float) -> int:
    """The strength of the colour of a cell of `row`, from 0 to 5."""
    if seconds - row.typical_s < (_EXACT_OF_KEEPER_S if row.phase in _OF_KEEPER else _EXACT_S):
        return 0
    return sum(seconds > factor * row.typical_s for factor in _FACTORS)


def heat_map(rows: Sequence[HeatRow]) -> str:
    """The map as a drawing with its legend."""
    ranks = sorted({rank for row in rows for rank in row.seconds})
    if not ranks:
        return '<p class="none">No durable checkpoint is recorded.</p>'
    share = -(-len(ranks) // _MOST_COLUMNS)
    columns = [ranks[at : at + share] for at in range(0, len(ranks), share)]
    width = max(5.0, min(64.0, 676 / len(columns)))
    parts = [f'<text class="tick y" x="{_LEFT - 8}" y="14">rank</text>']
    parts += [
        f'<text class="tick" text-anchor="middle" x="{_LEFT + (number + 0.5) * width:.1f}" y="14">{column[0]}</text>'
        for number, column in enumerate(columns)
        if number % max(1, len(columns) // 16) == 0
    ]
    for at, row in enumerate(rows):
        y = _TOP + at * _ROW
        parts.append(f'<text class="tick y" x="{_LEFT - 8}" y="{y + 16}">{escape(row.phase)}</text>')
        for number, column in enumerate(columns):
            cells = [_Cell(rank, row.seconds[rank]) for rank in column if rank in row.seconds]
            if cells:
                slowest = max(cells, key=lambda cell: cell.seconds)
                has_text = len(columns) <= _MOST_TEXTS
                parts.append(_drawn(row, slowest, _LEFT + number * width, y, width, has_text=has_text))
    label = "Heat map of the time of each phase on each rank"
    names = ("as the middle rank", *(f"over {factor:g} times that" for factor in _FACTORS))
    shared = f'<p class="note">Each column is {share} ranks, and shows the slowest of them.</p>' if share > 1 else ""
    map_ = drawing(label, _LEFT + len(columns) * width + 8, _TOP + len(rows) * _ROW + 4, parts)
    return f"{map_}{legend((name, f'heat-{level}') for level, name in enumerate(names))}{shared}"


def _drawn(row: HeatRow, cell: _Cell, x: float, y: float, width: float, *, has_text: bool) -> str:
    level = level_of(row, cell.seconds)
    told = escape(f"rank {cell.rank}, {row.phase}: {duration(cell.seconds)} (middle rank: {duration(row.typical_s)})")
    box = f'x="{x + 0.5:.1f}" y="{y + 0.5:.1f}" width="{width - 1:.1f}" height="{_ROW - 1}"'
    text = ""
    if has_text:
        at = f'x="{x + width / 2:.1f}" y="{y + 16}"'
        text = f'<text class="in-cell on-{level}" {at}>{escape(duration(cell.seconds))}</text>'
    return f'<g><title>{told}</title><rect class="heat-{level}" {box}/>{text}</g>'
