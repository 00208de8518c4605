"""A benchmark as the command line sees it: options, parts, tables and bars; and the rules that judge its results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from bench.markdown import table
from bench.schema import BenchError, Part, Result, Scenario

RESULTS = Path("bench/results")
#: A contender cannot be faster than the device; above this share the raw loop was not at the limit.
MAX_SHARE_OF_RAW = 1.05


class Bar(NamedTuple):
    """A median of holdfast, and its limit: at most, or at least."""

    what: str
    figure: float
    limit: float
    unit: str = ""
    form: str = ".3g"
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def text(self) -> str:
        limit = f"at {'least' if self.at_least else 'most'} {self.limit:.3g}{self.unit}"
        return f"{self.figure:{self.form}}{self.unit} ({limit}): {'met' if self.met else 'missed'}"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a measurement. `scale` is the share of the full size of states, of durations, and of numbers of
    tensors, layers and ranks; at 0 all are as small as they can be."""

    rounds: int | None = None
    scale: float = 1.0
    contenders: tuple[str, ...] | None = None
    folder: Path = Path()
    memory: Path = Path("/dev/shm")

    def number(self, full: int, *, least: int = 1) -> int:
        """The scaled number of what there are `full` at full size."""
        return max(least, round(self.scale * full))

    def nbytes(self, gib: float) -> int:
        """The scaled bytes of a state that has `gib` at full size."""
        return self.number(int(gib * 2**30))

    def scenario(self, name: str, *, rounds: int, **about: Any) -> Scenario:
        """A scenario that has so many `rounds` at full size."""
        chosen = self.rounds or rounds
        return Scenario(name=name, rounds=chosen, is_full=self.scale >= 1 and chosen >= rounds, **about)


class Benchmark(NamedTuple):
    """A benchmark that the command line measures, shows and judges. Each of `parts` measures one scenario, `bars` are
    those of one part of full size."""

    name: str
    parts: Mapping[str, Callable[[Options], Part]]
    tables: Callable[[Result], Iterable[str]]
    bars: Callable[[Part], Iterable[Bar]] = lambda _: ()

    def judged(self, result: Result) -> dict[str, Bar]:
        bars = (bar for part in result.parts if part.scenario.is_full for bar in self.bars(part))
        return {bar.what: bar for bar in bars}

    def render(self, result: Result) -> str:
        """The tables, that of the bars, and where everything was measured."""
        bars, every = self.judged(result), result.parts
        judged = [table("bar", bars, ("holdfast", Bar.text))] if bars else []
        machines = (", ".join(filter(None, (part.environment.in_words(), part.date[:10]))) for part in every)
        packages = (f", {name} {version}" for part in every for name, version in part.packages.items())
        where = f"{'; '.join(dict.fromkeys(machines))}{''.join(dict.fromkeys(packages))}."
        return "\n\n".join([*self.tables(result), *judged, f"{where} [Samples](../{RESULTS / self.name}.json)."])


def require_bars(bars: Iterable[Bar]) -> None:
    if missed := [f"{bar.what} {bar.text()}" for bar in bars if not bar.met]:
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
    return tuple(name for name in known if not names or name in names)
