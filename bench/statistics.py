"""Medians, extremes, paired ratios, and the order of turns. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

#: What a table has in place of a figure that there is not.
NO_FIGURE = "-"


def median(series: Sequence[float]) -> float:
    """The median of `series`; ValueError when it is empty."""
    if not series:
        raise ValueError("a median needs at least one sample")
    return statistics.median(series)


def text(series: Sequence[float], digits: int = 2, *, scale: float = 1.0) -> str:
    """The median and the extremes of `series`, times `scale`; a dash when it is empty."""
    if not series:
        return NO_FIGURE
    middle, low, high = (f"{scale * each:.{digits}f}" for each in (median(series), min(series), max(series)))
    return f"{middle} ({low} to {high})"


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """One ratio per round; ValueError when the series are not from the same number of rounds."""
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} and {len(denominators)} rounds cannot be paired")
    return [above / below for above, below in zip(numerators, denominators, strict=True)]


def rotated(items: Sequence[T], turn: int) -> tuple[T, ...]:
    """`items`, beginning with item `turn` (modulo their number)."""
    first = turn % len(items) if items else 0
    return (*items[first:], *items[:first])


def fastest(series: Mapping[str, Sequence[float]]) -> str:
    """The key whose series has the lowest median; the first one among equals."""
    return min(series, key=lambda key: statistics.median(series[key]))
