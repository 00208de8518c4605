"""The result file: everything a reader needs to judge or recompute a figure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec

from bench.environment import Environment
from bench.errors import SetupError
from bench.statistics import Spread

Measure = Literal["save", "load"]
MEASURES: tuple[Measure, ...] = ("save", "load")
LOAD_ONLY: tuple[Measure, ...] = ("load",)

ModelKind = Literal["plain", "fsdp2"]
MODEL_KINDS: tuple[ModelKind, ...] = ("plain", "fsdp2")

#: The contender that every other one is compared with.
RAW = "raw"

RESULTS = Path("bench/results")

#: Rounds are counted from 1; this one pays for imports and first calls. It is watched for its memory, and not timed.
WARM_UP = 0

R = TypeVar("R")


def samples_link(name: str) -> str:
    """The link from `docs/benchmarks.md` to the samples of a result."""
    return f"[Samples](../{RESULTS / name}.json)"


def raw_name(way: str) -> str:
    """The name under which the raw limit takes its turn in one of its ways."""
    return f"{RAW} {way}"


class StateSize(msgspec.Struct, frozen=True):
    """Size of the state over all ranks."""

    nbytes: int
    num_tensors: int
    num_values: int


class ContenderMetadata(msgspec.Struct, frozen=True):
    """What a contender's figures include."""

    name: str
    description: str
    durable: str
    verified: str
    io: str


class Sample(msgspec.Struct, frozen=True):
    """One timed operation. ``seconds`` runs from the first rank's start to the last rank's end."""

    measure: Measure
    round: int
    turn: int
    contender: str
    seconds: float
    cpu_s: tuple[float, ...]
    peak_extra_nbytes: tuple[int | None, ...]
    device_nbytes: tuple[int, ...] = ()
    asked_nbytes: tuple[int, ...] = ()


class Summary(msgspec.Struct, frozen=True):
    """One contender in one measure. ``share_of_raw`` is raw seconds / contender seconds, paired by round.

    ``device_of_needed`` and ``asked_of_needed`` are the bytes of all ranks, as in `bench.meter.Usage`, per byte of the
    state: what every rank holds counts once. ``peak_extra_nbytes_per_rank`` is of the warm-up, in which alone memory
    is watched.
    """

    measure: Measure
    contender: str
    seconds: Spread
    gb_per_s: Spread
    share_of_raw: Spread
    shares_of_raw: tuple[float, ...]
    cpu_s_per_gb: Spread
    peak_extra_nbytes_per_rank: int
    raw_way: str | None = None
    device_of_needed: Spread | None = None
    asked_of_needed: Spread | None = None


class Setup(msgspec.Struct, frozen=True):
    """How the run was done."""

    world: int
    rounds: int
    state: StateSize
    raw_ways: tuple[str, ...]
    torch_threads: int
    caches: str


class Result(msgspec.Struct, frozen=True):
    """One run of ``python -m bench io``."""

    name: str
    date: str
    setup: Setup
    environment: Environment
    contenders: tuple[ContenderMetadata, ...]
    summaries: tuple[Summary, ...]
    samples: tuple[Sample, ...]

    def summary(self, measure: Measure, contender: str) -> Summary:
        """The summary of `contender` in `measure`; KeyError when it did not run."""
        for summary in self.summaries:
            if (summary.measure, summary.contender) == (measure, contender):
                return summary
        raise KeyError(f"{contender} has no {measure} summary")


class SmallSummary(msgspec.Struct, frozen=True):
    """One contender in one measure of `bench small`; CPU is that of all ranks."""

    measure: Measure
    contender: str
    num_rounds: int
    seconds: Spread
    cpu_s: Spread


class WalkFigure(msgspec.Struct, frozen=True):
    """One way to find the tensors of one kind of model and its optimizer."""

    model: ModelKind
    contender: str
    seconds: Spread
    samples: tuple[float, ...]


class Bar(msgspec.Struct, frozen=True):
    """A median, and what it may be at most."""

    what: str
    seconds: float
    most_s: float

    @property
    def met(self) -> bool:
        """Whether it is no more."""
        return self.seconds <= self.most_s


class SmallSetup(msgspec.Struct, frozen=True):
    """How a run of `bench small` was done; `local_shape` is what a rank holds of each tensor."""

    world: int
    rounds: int
    state: StateSize
    local_shape: tuple[int, int]
    torch_threads: int
    caches: str
    walk_rounds: int
    walk_num_tensors: int


class SmallResult(msgspec.Struct, frozen=True):
    """One run of ``python -m bench small``. `bars` are those that hold for its size."""

    name: str
    date: str
    setup: SmallSetup
    environment: Environment
    contenders: tuple[ContenderMetadata, ...]
    summaries: tuple[SmallSummary, ...]
    walks: tuple[WalkFigure, ...]
    bars: tuple[Bar, ...]
    samples: tuple[Sample, ...]

    def summary(self, measure: Measure, contender: str) -> SmallSummary:
        """The summary of `contender` in `measure`."""
        (found,) = (each for each in self.summaries if (each.measure, each.contender) == (measure, contender))
        return found

    def walk(self, model: ModelKind, contender: str) -> WalkFigure:
        """The walk of a `model` by `contender`."""
        (found,) = (each for each in self.walks if (each.model, each.contender) == (model, contender))
        return found


class NotPossible(msgspec.Struct, frozen=True):
    """A contender that cannot take part in a scenario."""

    contender: str
    reason: str


class ScenarioResult(msgspec.Struct, frozen=True):
    """One scenario of `bench load`; `saved` and `loaded` are the layouts in words."""

    name: str
    title: str
    saved: str
    loaded: str
    state: StateSize
    not_possible: tuple[NotPossible, ...]
    summaries: tuple[Summary, ...]
    samples: tuple[Sample, ...]

    def summary(self, contender: str) -> Summary:
        """The summary of `contender`."""
        (found,) = (each for each in self.summaries if each.contender == contender)
        return found


class LoadSetup(msgspec.Struct, frozen=True):
    """How a run of `bench load` was done; `packages` are the versions of contenders that are packages of their own."""

    rounds: int
    raw_ways: tuple[str, ...]
    torch_threads: int
    caches: str
    packages: Mapping[str, str]


class LoadResult(msgspec.Struct, frozen=True):
    """One run of ``python -m bench load``."""

    name: str
    date: str
    setup: LoadSetup
    environment: Environment
    contenders: tuple[ContenderMetadata, ...]
    scenarios: tuple[ScenarioResult, ...]


class TimedSeries(msgspec.Struct, frozen=True):
    """One thing that was timed again and again."""

    name: str
    seconds: Spread
    samples: tuple[float, ...]


class ViewResult(msgspec.Struct, frozen=True):
    """One run of ``python -m bench view``. `bars` are those that hold for its size."""

    name: str
    date: str
    environment: Environment
    rounds: int
    caches: str
    num_tensors: int
    world: int
    opened: tuple[TimedSeries, ...]
    not_possible: tuple[NotPossible, ...]
    shown: tuple[TimedSeries, ...]
    bars: tuple[Bar, ...]


class Named(Protocol):
    """A result that knows the name of its file."""

    @property
    def name(self) -> str:
        """The name, without a suffix."""


def write_result(result: Named, folder: Path) -> Path:
    """Write `result` as ``<folder>/<name>.json``, replacing an older one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return path


def read_result(path: Path) -> Result:
    """The result of `bench io` in `path`; SetupError when there is none or it is not one."""
    return read_as(path, Result, command="python -m bench io")


def read_small(path: Path) -> SmallResult:
    """The result of `bench small` in `path`; SetupError when there is none or it is not one."""
    return read_as(path, SmallResult, command="python -m bench small")


def read_load(path: Path) -> LoadResult:
    """The result of `bench load` in `path`; SetupError when there is none or it is not one."""
    return read_as(path, LoadResult, command="python -m bench load")


def read_view(path: Path) -> ViewResult:
    """The result of `bench view` in `path`; SetupError when there is none or it is not one."""
    return read_as(path, ViewResult, command="python -m bench view")


def read_as(path: Path, kind: type[R], *, command: str) -> R:
    """The result of `command` in `path`; SetupError when there is none or it is not one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as error:
        raise SetupError(f"There is no result at {path}. Run `{command}` first.") from error
    except msgspec.DecodeError as error:
        raise SetupError(f"{path} is not a result of this version ({error}). Run `{command}` again.") from error
