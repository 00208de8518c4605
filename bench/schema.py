"""The schema of all results: scenarios, the contenders that took part in them, and a sample of each turn.

All figures are made of the samples when they are shown.
"""

from __future__ import annotations

import math
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import msgspec
import psutil

T = TypeVar("T")

#: The contender that every other one is compared with. It takes its turn in several ways; the fastest counts.
RAW = "raw"
#: The contender that the bars are for.
OURS = "holdfast"
#: Rounds are counted from 1; this one pays for imports and first calls. It is watched for its memory, and not timed.
WARM_UP = 0


class BenchError(Exception):
    """A run that cannot start or cannot count, or a missed bar: the message says which, and what to do."""


class Environment(msgspec.Struct, frozen=True):
    """Versions and machine of one run."""

    holdfast: str
    torch: str
    python: str
    kernel: str
    filesystem: str
    num_cpus: int
    cpu: str
    memory_nbytes: int
    revision: str

    def in_words(self) -> str:
        return (
            f"{self.cpu}, {self.num_cpus} CPUs, {self.filesystem}, Linux {self.kernel}, Python {self.python}, "
            f"torch {self.torch}, holdfast {self.holdfast} (revision {self.revision[:12]})"
        )


class StateSize(msgspec.Struct, frozen=True):
    """Size of a state over all ranks."""

    nbytes: int = 0
    num_tensors: int = 0


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """The setting of a measurement. `facts` are particular to one benchmark. Bars hold only for a scenario that
    `is_full`."""

    name: str
    title: str = ""
    world: int = 1
    rounds: int
    state: StateSize = StateSize()
    facts: Mapping[str, Any] = {}
    is_full: bool = True


class Contender(msgspec.Struct, frozen=True):
    """A library or a way of it that takes part, and what makes its saves durable, which its figures include."""

    name: str
    durable: str = "no"


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """The measurements of one turn: each of `values` is one number of the whole job, or one of each rank.

    ``seconds`` are those of a rank, which all begin at once. ``cpu_s`` is user and system time of a rank and
    all that it started, ``peak_extra_nbytes`` the most memory that they had beyond that at the start. ``device_nbytes``
    came from the device (mapped files too), ``asked_nbytes`` were returned by read calls, from wherever.
    """

    contender: str
    round: int
    values: Mapping[str, tuple[float, ...]]
    measure: str = ""
    turn: int = 0


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario, measured. `contenders` are all that were asked for; `not_possible` says why some did not run.

    If no `measure` is named, the samples of all of them count.
    """

    scenario: Scenario
    date: str
    environment: Environment
    samples: tuple[Sample, ...]
    contenders: tuple[Contender, ...] = ()
    not_possible: Mapping[str, str] = {}
    packages: Mapping[str, str] = {}

    @property
    def able(self) -> tuple[Contender, ...]:
        return tuple(each for each in self.contenders if each.name not in self.not_possible)

    def taken(self, contender: str, measure: str | None = None) -> list[Sample]:
        """The samples of `contender` by round, the warm-up's too; of the raw limit, those of its fastest way."""
        name = self.raw_way(measure) if contender == RAW else contender
        found = (sample for sample in self.samples if sample.contender == name and measure in (None, sample.measure))
        return sorted(found, key=lambda sample: sample.round)

    def series(
        self,
        contender: str,
        key: str = "seconds",
        *,
        measure: str | None = None,
        of: Callable[[Iterable[float]], float] = max,
    ) -> list[float]:
        """One value of each timed round that has one; `of` makes it of those of several ranks."""
        timed = (sample for sample in self.taken(contender, measure) if sample.round != WARM_UP)
        return [of(sample.values[key]) for sample in timed if key in sample.values]

    def median(self, contender: str, key: str = "seconds", *, measure: str | None = None) -> float:
        """The median of the highest value of each round."""
        return median(self.series(contender, key, measure=measure))

    def shares(self, contender: str, key: str = "seconds", *, measure: str | None = None) -> list[float]:
        """Raw seconds / seconds, paired by round; nothing where one of them has no such value."""
        raw, series = self.series(RAW, measure=measure), self.series(contender, key, measure=measure)
        return paired_ratios(raw, series) if raw and series else []

    def per_byte(self, contender: str, key: str, *, measure: str | None = None) -> float:
        """Median sum over all ranks for each byte of the state; a byte that every rank holds counts once."""
        return median(self.series(contender, key, measure=measure, of=sum)) / self.scenario.state.nbytes

    def peak_nbytes(self, contender: str, measure: str | None = None) -> float:
        """The most memory of any rank in the samples that watched it."""
        found = self.taken(contender, measure)
        return max((peak for sample in found for peak in sample.values.get("peak_extra_nbytes", ())), default=0)

    def raw_way(self, measure: str | None = None) -> str:
        """The way of the raw limit that was fastest by the median over all rounds, if it took turns in several."""
        ways = dict.fromkeys(each.contender for each in self.samples if each.contender.startswith(f"{RAW} "))
        return min(ways, key=lambda way: median(self.series(way, measure=measure) or [math.inf]), default=RAW)


class Result(msgspec.Struct, frozen=True):
    """The results of one benchmark, as its file holds them."""

    name: str
    parts: tuple[Part, ...]

    def part(self, name: str) -> Part:
        for part in self.parts:
            if part.scenario.name == name:
                return part
        raise BenchError(f"{self.name} has no part {name}. Run `python -m bench {self.name} --only {name}` first.")


def environment(folder: Path) -> Environment:
    """This machine, with the filesystem of `folder`."""
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    git = ("git", "-C", Path(__file__).parent)
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return Environment(
        holdfast=version("holdfast"),
        torch=version("torch"),
        python=platform.python_version(),
        kernel=platform.release(),
        filesystem=_output("df", "--output=fstype", folder).split()[-1],
        num_cpus=len(os.sched_getaffinity(0)),
        cpu=models[0] if models else platform.machine(),
        memory_nbytes=psutil.virtual_memory().total,
        revision=f"{_output(*git, 'rev-parse', 'HEAD') or 'unknown'}{'+changes' if changed else ''}",
    )


def _output(*command: str | Path) -> str:
    """Return what a command prints to its standard output."""
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


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
    """The result of benchmark `name` in `folder`; BenchError when there is none or it is not one."""
    path, again = folder / f"{name}.json", f"`python -m bench {name}`"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except FileNotFoundError as error:
        raise BenchError(f"There is no result at {path}. Run {again} first.") from error
    except msgspec.DecodeError as error:
        raise BenchError(f"{path} is not a result of this version ({error}). Run {again} again.") from error


def rotated(items: Sequence[T], turn: int) -> tuple[T, ...]:
    """`items`, beginning with item `turn` (modulo their number)."""
    first = turn % len(items) if items else 0
    return (*items[first:], *items[:first])


def paired_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """One ratio per round; ValueError when the series are not from the same number of rounds."""
    return [above / below for above, below in zip(numerators, denominators, strict=True)]
