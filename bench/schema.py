"""The schema of all results: scenarios, the contenders that took part in them, and a sample of each turn.

All figures are made of the samples when they are shown. What a benchmark is to the command line stands here too.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from bench.costs import how_dropped
from bench.environment import Environment, environment
from bench.statistics import fastest, median, paired_ratios

#: The contender that every other one is compared with. It takes its turn in several ways; the fastest counts.
RAW = "raw"
#: Rounds are counted from 1; this one pays for imports and first calls. It is watched for its memory, and not timed.
WARM_UP = 0
#: A contender cannot be faster than the device; above this share the raw loop was not at the limit.
MAX_SHARE_OF_RAW = 1.05


class BenchError(Exception):
    """Root of all errors of the benchmarks. Each ends the command with a message and a non-zero status."""


class SetupError(BenchError):
    """The run cannot start as asked."""


class RankFailedError(BenchError):
    """A rank process raised or died."""


class WrongBytesError(BenchError):
    """A contender loaded bytes that differ from those that it saved."""


class RawLimitError(BenchError):
    """A contender beat the raw limit, so the raw loop did not reach the limit."""


class MarkersError(BenchError):
    """The file has no place for the table."""


class StateSize(msgspec.Struct, frozen=True):
    """Size of a state over all ranks."""

    nbytes: int = 0
    num_tensors: int = 0
    num_values: int = 0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured: `facts` are what is particular to one benchmark."""

    name: str
    title: str = ""
    world: int = 1
    rounds: int
    state: StateSize = StateSize()
    facts: Mapping[str, Any] = {}


class Contender(msgspec.Struct, frozen=True):
    """Who takes part, and what its figures include."""

    name: str
    description: str = ""
    durable: str = "no"
    verified: str = "no"
    io: str = "buffered"


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was measured in one turn: each of `values` is one number of the whole job, or one of each rank.

    ``seconds`` runs from the first rank's start to the last rank's end. ``cpu_s`` is user and system time of a rank and
    of all that it started. ``peak_extra_nbytes`` is the most memory of those beyond what they held before. By the
    kernel's count, ``device_nbytes`` came from the device (mapped files too), and ``asked_nbytes`` is what read calls
    returned, from the device, the page cache or a pipe.
    """

    contender: str
    round: int
    values: Mapping[str, tuple[float, ...]]
    measure: str = ""
    turn: int = 0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario, measured. `contenders` are all that were asked for; `not_possible` says why some did not run."""

    scenario: Scenario
    date: str
    environment: Environment
    samples: tuple[Sample, ...]
    contenders: tuple[Contender, ...] = ()
    not_possible: Mapping[str, str] = {}
    caches: str = ""
    raw_ways: tuple[str, ...] = ()
    packages: Mapping[str, str] = {}

    @property
    def able(self) -> tuple[Contender, ...]:
        """The contenders that took part."""
        return tuple(each for each in self.contenders if each.name not in self.not_possible)

    def series(
        self,
        contender: str,
        key: str = "seconds",
        *,
        measure: str = "",
        of: Callable[[Iterable[float]], float] = max,
    ) -> list[float]:
        """One value of each timed round in which there was one; `of` makes it of those of several ranks."""
        name = self._entrant(contender, measure)
        found = [sample for sample in self.samples if (sample.contender, sample.measure) == (name, measure)]
        timed = sorted((sample for sample in found if sample.round != WARM_UP), key=lambda sample: sample.round)
        return [of(sample.values[key]) for sample in timed if key in sample.values]

    def raw_way(self, measure: str = "") -> str:
        """The way of the raw limit that was fastest by the median over all rounds."""
        return fastest({way: self.series(f"{RAW} {way}", measure=measure) for way in self.raw_ways})

    def shares(self, contender: str, key: str = "seconds", *, measure: str = "") -> list[float]:
        """Raw seconds / seconds, paired by round; nothing where the contender has no such value."""
        series = self.series(contender, key, measure=measure)
        return paired_ratios(self.series(RAW, measure=measure), series) if series else []

    def cpu_s_per_gb(self, contender: str, *, measure: str = "") -> float:
        """Median CPU seconds of all ranks for 10^9 bytes of the state."""
        nbytes = self.scenario.state.nbytes
        return median([cpu_s / (nbytes / 1e9) for cpu_s in self.series(contender, "cpu_s", measure=measure, of=sum)])

    def peak_nbytes(self, contender: str, *measures: str) -> float:
        """The most memory of any rank in the samples that watched it."""
        name = self._entrant(contender, measures[0])
        found = [each for each in self.samples if each.contender == name and each.measure in measures]
        return max((peak for each in found for peak in each.values.get("peak_extra_nbytes", ())), default=0)

    def _entrant(self, contender: str, measure: str) -> str:
        """Who has the samples of `contender`: of the raw limit, the fastest of its ways that were tried."""
        ways = {f"{RAW} {way}" for way in self.raw_ways}
        tried = contender == RAW and any(each.contender in ways and each.measure == measure for each in self.samples)
        return f"{RAW} {self.raw_way(measure)}" if tried else contender


class Result(msgspec.Struct, frozen=True):
    """What one benchmark wrote."""

    name: str
    parts: tuple[Part, ...]

    def find(self, name: str) -> Part | None:
        """The part of scenario `name`, if it was measured."""
        return next((part for part in self.parts if part.scenario.name == name), None)

    def part(self, name: str) -> Part:
        """The part of scenario `name`."""
        found = self.find(name)
        assert found is not None, f"{self.name} has no part {name}"
        return found


class Bar(msgspec.Struct, frozen=True):
    """A median of holdfast, what it is to be (at most, or at least, `limit`), and both in words."""

    what: str
    figure: float
    limit: float
    words: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.figure >= self.limit if self.at_least else self.figure <= self.limit

    def text(self) -> str:
        """The figure, and whether it is what it is to be."""
        return f"{self.words}: {'met' if self.met else 'missed'}"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to measure: what the command line says to all benchmarks. `scale` is the share of the full size of states,
    of durations, and of numbers of tensors and layers; where it is 0, all are as small as they can be."""

    rounds: int | None = None
    scale: float = 1.0
    world: int | None = None
    contenders: tuple[str, ...] | None = None
    folder: Path = Path()
    memory: Path = Path("/dev/shm")

    def __post_init__(self) -> None:
        if (self.rounds is not None and self.rounds < 1) or (self.world is not None and self.world < 1):
            raise SetupError("A run needs at least one round and one rank.")
        if not self.scale >= 0:
            raise SetupError(f"A scale of {self.scale} is not possible. Ask for 0 or more; 1 is the full size.")

    def number(self, full: int, *, least: int = 1) -> int:
        """So many of what there are `full` at full size."""
        return max(least, round(self.scale * full))

    def nbytes(self, gib: float) -> int:
        """Bytes of a state that has `gib` at full size."""
        return self.number(int(gib * 2**30))


class Benchmark(NamedTuple):
    """What the command line measures, judges and shows: each of `parts` is a scenario, and how it is measured."""

    name: str
    parts: Mapping[str, Callable[[Options], Part]]
    render: Callable[[Result], str]
    bars: Callable[[Result], Iterable[Bar]] = lambda _: ()


def require_bars(bars: Iterable[Bar]) -> None:
    """BenchError when a bar was missed."""
    missed = [bar.text() for bar in bars if not bar.met]
    if missed:
        raise BenchError("; ".join(missed))


def require_raw_limit(result: Result) -> None:
    """RawLimitError when a contender's median share of the raw limit is above `MAX_SHARE_OF_RAW`. A save that syncs
    nothing may be faster."""
    for part in result.parts:
        raw = {f"{RAW} {way}" for way in part.raw_ways}
        measures = dict.fromkeys(sample.measure for sample in part.samples if sample.contender in raw)
        for measure, contender in itertools.product(measures, part.able):
            share = median(part.shares(contender.name, measure=measure) or [0])
            if share > MAX_SHARE_OF_RAW and not (measure == "save" and contender.durable == "no"):
                raise RawLimitError(
                    f"{contender.name} reached {share:.2f} of the raw limit in {measure}: the raw limit was not "
                    "reached by the raw loop, so no share of this run counts. Add a way to `bench/raw.py`, or rounds."
                )


def measured(scenario: Scenario, samples: Iterable[Sample], folder: Path, **about: Any) -> Part:
    """A part that was measured in `folder`, here and now."""
    return Part(
        scenario=scenario,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=environment(folder),
        samples=tuple(samples),
        caches=how_dropped(),
        **about,
    )


def write_result(result: Result, folder: Path) -> Path:
    """Write `result` as ``<folder>/<name>.json``, replacing an older one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    text = msgspec.json.format(msgspec.json.encode(result), indent=1)
    # All values of a sample on one line.
    text = re.sub(rb'"values": \{[^{}]*\}', lambda found: b" ".join(found[0].split()), text)
    path.write_bytes(text + b"\n")
    return path


def read_result(name: str, folder: Path) -> Result:
    """The result of benchmark `name` in `folder`; SetupError when there is none or it is not one."""
    path, again = folder / f"{name}.json", f"`python -m bench {name}`"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except FileNotFoundError as error:
        raise SetupError(f"There is no result at {path}. Run {again} first.") from error
    except msgspec.DecodeError as error:
        raise SetupError(f"{path} is not a result of this version ({error}). Run {again} again.") from error


def chosen(names: Sequence[str] | None, known: Iterable[str], *, kind: str) -> tuple[str, ...]:
    """Those of the `known` names that were asked for, in their order, or all; SetupError for one that is not known."""
    known = tuple(known)
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise SetupError(f"There is no {kind} {', '.join(unknown)}. Choose from {', '.join(known)}.")
    return tuple(name for name in known if names is None or name in names)
