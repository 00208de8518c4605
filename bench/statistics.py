"""Spreads and paired ratios. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

T = TypeVar("T")


class Spread(msgspec.Struct, frozen=True):
    """Median and extremes of one series."""

    median: float
    low: float
    high: float

    def text(self, digits: int = 2, *, scale: float = 1.0) -> str:
        """The median and the extremes, times `scale`."""
        median, low, high = (f"{scale * value:.{digits}f}" for value in (self.median, self.low, self.high))
        return f"{median} ({low} to {high})"


def spread(series: Sequence[float]) -> Spread:
    """Median, minimum and maximum of `series`; ValueError when it is empty."""
    if not series:
        raise ValueError("a spread needs at least one sample")
    return Spread(median=statistics.median(series), low=min(series), high=max(series))


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, ...]:
    """One ratio per round; ValueError when the series are not from the same number of rounds."""
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} and {len(denominators)} rounds cannot be paired")
    return tuple(above / below for above, below in zip(numerators, denominators, strict=True))


def rotated(items: Sequence[T], turn: int) -> tuple[T, ...]:
    """`items`, beginning with item `turn` (modulo their number)."""
    first = turn % len(items) if items else 0
    return (*items[first:], *items[:first])


def fastest(series: Mapping[str, Sequence[float]]) -> str:
    """The key whose series has the lowest median; the first one among equals."""
    return min(series, key=lambda key: statistics.median(series[key]))
