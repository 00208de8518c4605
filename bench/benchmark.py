"""What a benchmark is to the command line: its options, parts, table and bars; and the rules that judge its results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

from bench.schema import BenchError, Part, Result

#: A contender cannot be faster than the device; above this share the raw loop was not at the limit.
MAX_SHARE_OF_RAW = 1.05


class Bar(msgspec.Struct, frozen=True):
    """A median of holdfast, its limit (at most, or at least), and both in words."""

    what: str
    figure: float
    limit: float
    words: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def text(self) -> str:
        return f"{self.words}: {'met' if self.met else 'missed'}"


def judged(
    what: str, figure: float, limit: float, unit: str = "", *, form: str = "{:.3g}", at_least: bool = False
) -> Bar:
    """A bar whose words have the figure, in `form`, and the limit."""
    words = f"{what} {form.format(figure)}{unit} (at {'least' if at_least else 'most'} {limit:.3g}{unit})"
    return Bar(what, figure, limit, words, at_least)


def verdicts(bars: Iterable[Bar], head: str) -> list[str]:
    """A paragraph of which `bars` were met, below `head`; none without bars."""
    every = "; ".join(bar.text() for bar in bars)
    return [f"Bars {head}: {every}."] if every else []


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to measure. `scale` is the share of the full size of states, of durations, and of numbers of tensors and
    layers; at 0 all are as small as they can be."""

    rounds: int | None = None
    scale: float = 1.0
    world: int | None = None
    contenders: tuple[str, ...] | None = None
    folder: Path = Path()
    memory: Path = Path("/dev/shm")

    def number(self, full: int, *, least: int = 1) -> int:
        """The scaled number of what there are `full` at full size."""
        return max(least, round(self.scale * full))

    def nbytes(self, gib: float) -> int:
        """The scaled bytes of a state that has `gib` at full size."""
        return self.number(int(gib * 2**30))


class Benchmark(NamedTuple):
    """What the command line measures, judges and shows. Each of `parts` measures one scenario."""

    name: str
    parts: Mapping[str, Callable[[Options], Part]]
    render: Callable[[Result], str]
    bars: Callable[[Result], Iterable[Bar]] = lambda _: ()


def require_bars(bars: Iterable[Bar]) -> None:
    if missed := [bar.text() for bar in bars if not bar.met]:
        raise BenchError("; ".join(missed))


def require_raw_limit(result: Result) -> None:
    """BenchError when a contender's median share of the raw limit is above `MAX_SHARE_OF_RAW`. A save that syncs
    nothing may be faster."""
    for part in result.parts:
        measures = dict.fromkeys(sample.measure for sample in part.samples)
        for measure, contender in itertools.product(measures, part.able):
            share = median(part.shares(contender.name, measure=measure) or [0])
            if share > MAX_SHARE_OF_RAW and not (measure == "save" and contender.durable == "no"):
                raise BenchError(
                    f"{contender.name} reached {share:.2f} of the raw limit in {measure}: the raw limit was not "
                    "reached by the raw loop, so no share of this run counts. Add a way to `bench/raw.py`, or rounds."
                )


def chosen(names: Sequence[str] | None, known: Iterable[str], *, kind: str) -> tuple[str, ...]:
    """Those of `known` that `names` asks for, or all, in the order of `known`; BenchError for an unknown one."""
    known = tuple(known)
    if unknown := [name for name in names or () if name not in known]:
        raise BenchError(f"There is no {kind} {', '.join(unknown)}. Choose from {', '.join(known)}.")
    return tuple(name for name in known if names is None or name in names)
