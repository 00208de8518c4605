"""The result file: everything a reader needs to judge or recompute a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from bench.environment import Environment
from bench.errors import SetupError
from bench.statistics import Spread

Measure = Literal["save", "load"]
MEASURES: tuple[Measure, ...] = ("save", "load")

#: The contender that every other one is compared with.
RAW = "raw"

RESULTS = Path("bench/results")


def raw_name(threads: int) -> str:
    """The name under which the raw limit with `threads` threads per rank takes its turn."""
    return f"{RAW}-{threads}"


class StateSize(msgspec.Struct, frozen=True):
    """Size of the state over all ranks."""

    nbytes: int
    num_tensors: int
    num_values: int


class Traits(msgspec.Struct, frozen=True):
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
    peak_extra_nbytes: tuple[int, ...]


class Summary(msgspec.Struct, frozen=True):
    """One contender in one measure. ``share_of_raw`` is raw seconds / contender seconds, paired by round."""

    measure: Measure
    contender: str
    seconds: Spread
    gb_per_s: Spread
    share_of_raw: Spread
    shares_of_raw: tuple[float, ...]
    cpu_s_per_gb: Spread
    peak_extra_nbytes_per_rank: int
    raw_threads: int | None = None


class Setup(msgspec.Struct, frozen=True):
    """How the run was done."""

    world: int
    rounds: int
    state: StateSize
    request_nbytes: int
    raw_threads_tried: tuple[int, ...]
    torch_threads: int
    caches: str


class Result(msgspec.Struct, frozen=True):
    """One run of ``python -m bench io``."""

    name: str
    date: str
    setup: Setup
    environment: Environment
    contenders: tuple[Traits, ...]
    summaries: tuple[Summary, ...]
    samples: tuple[Sample, ...]

    def summary(self, measure: Measure, contender: str) -> Summary:
        """The summary of `contender` in `measure`; KeyError when it did not run."""
        for summary in self.summaries:
            if (summary.measure, summary.contender) == (measure, contender):
                return summary
        raise KeyError(f"{contender} has no {measure} summary")


def write_result(result: Result, folder: Path) -> Path:
    """Write `result` as ``<folder>/<name>.json``, replacing an older one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return path


def read_result(path: Path) -> Result:
    """The result in `path`; SetupError when there is none or it is not one."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Result)
    except FileNotFoundError as error:
        raise SetupError(f"There is no result at {path}. Run `python -m bench io` first.") from error
    except msgspec.DecodeError as error:
        raise SetupError(
            f"{path} is not a result of this version ({error}). Run `python -m bench io` again."
        ) from error
