"""Charts as SVG, for a page that loads nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Final, NamedTuple

_WIDTH: Final = 760
_HEIGHT: Final = 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 12, 10, 34
#: Most points of a line. A page shows no more of them apart.
_MOST_POINTS: Final = 600
_NUM_TICKS: Final = 4


class Curve(NamedTuple):
    """A line of a chart: its name, the points, and the number of its look (colour and dashes)."""

    name: str
    points: Sequence[tuple[float, float]]
    look: int = 0


def line_chart(
    label: str,
    lines: Sequence[Curve],
    *,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    y_base: float = 10,
) -> str:
    """A chart of lines over a common axis, from 0 upwards. `label` is what a screen reader says. Marks on the axis are
    round numbers of units, which are powers of `y_base`."""
    points = [point for line in lines for point in line.points]
    if not points:
        return '<p class="none">Nothing is recorded.</p>'
    x_least, x_most = min(x for x, _ in points), max(x for x, _ in points)
    y_ticks = _ticks(max(y for _, y in points), y_base)

    def place(x: float, y: float) -> tuple[float, float]:
        right = (x - x_least) / (x_most - x_least) if x_most > x_least else 0.5
        up = y / y_ticks[-1]
        return _LEFT + right * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for y in y_ticks:
        _, at = place(x_least, y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="tick y" x="{_LEFT - 8}" y="{at + 4:.1f}">{escape(y_text(y))}</text>')
    for x, anchor in ((x_least, "start"), (x_most, "end")) if x_most > x_least else ((x_least, "middle"),):
        at, _ = place(x, 0)
        text = escape(x_text(x))
        parts.append(f'<text class="tick" text-anchor="{anchor}" x="{at:.1f}" y="{_HEIGHT - 12}">{text}</text>')
    for line in lines:
        parts.extend(_drawn(line, place, x_text, y_text))
    names = legend((line.name, f"line-{line.look}") for line in lines) if len(lines) > 1 else ""
    return _svg(label, _WIDTH, _HEIGHT, parts) + names


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """A legend: names, each with the class of its swatch."""
    items = "".join(f'<li><span class="swatch {look}"></span>{escape(name)}</li>' for name, look in entries)
    return f'<ul class="legend">{items}</ul>'


def drawing(label: str, width: float, height: float, parts: Sequence[str]) -> str:
    """A drawing of `parts`, in its own scale, which a narrow page scrolls."""
    return f'<div class="scroll">{_svg(label, width, height, parts, is_fixed=True)}</div>'


def _svg(label: str, width: float, height: float, parts: Sequence[str], *, is_fixed: bool = False) -> str:
    size = f' width="{width:.0f}" height="{height:.0f}"' if is_fixed else ""
    opened = f'<svg role="img" aria-label="{escape(label)}" viewBox="0 0 {width:.0f} {height:.0f}"{size}>'
    return f"{opened}{''.join(parts)}</svg>"


def _drawn(
    line: Curve,
    place: Callable[[float, float], tuple[float, float]],
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
) -> list[str]:
    points = _thinned(line.points)
    path = " ".join("{:.1f},{:.1f}".format(*place(x, y)) for x, y in points)
    parts = [f'<polyline class="line line-{line.look}" points="{path}"/>']
    for x, y in points if len(points) <= 100 else ():
        at = 'cx="{:.1f}" cy="{:.1f}"'.format(*place(x, y))
        told = escape(f"{line.name}: {y_text(y)} at {x_text(x)}")
        parts.append(f'<circle class="point line-{line.look}" {at} r="3"><title>{told}</title></circle>')
    return parts


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `_MOST_POINTS` points: of each stretch, the highest, so that no peak is lost."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    edges = [len(points) * each // _MOST_POINTS for each in range(_MOST_POINTS + 1)]
    return [max(points[a:b], key=lambda point: point[1]) for a, b in pairwise(edges)]


def _ticks(most: float, base: float) -> list[float]:
    """From 0 to `most` or a little more, in steps that are round numbers of units."""
    if most <= 0:
        return [0.0, 1.0]
    unit = base ** math.floor(math.log(most / _NUM_TICKS, base))
    unit *= 10 ** math.floor(math.log10(most / _NUM_TICKS / unit))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor * _NUM_TICKS >= most * 0.999)
    return [step * number for number in range(math.ceil(most / step - 1e-9) + 1)]
