"""The result of ``bench engine``: four parts, which can be measured one by one, and the bars that they must meet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from bench.environment import Environment
from bench.results import ContenderMetadata, NotPossible, StateSize, read_as
from bench.statistics import Spread

Part = Literal["saves", "restore", "python", "loop"]
PARTS: tuple[Part, ...] = ("saves", "restore", "python", "loop")

#: The contender of the loops that saves nothing.
NO_SAVES = "no saves"

#: What ranks do while a save is under way: nothing, so that nothing takes a core from it, or work and a step.
Beside = Literal["nothing", "work"]


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """When and where a part was measured, in how many rounds, on how many ranks, with what state."""

    date: str
    environment: Environment
    world: int
    rounds: int
    state: StateSize


class SaveSample(msgspec.Struct, frozen=True, kw_only=True):
    """One save. Seconds are those of the slowest rank; ``durable_s`` runs from the first rank's call to the last rank's
    end, ``persist_s`` from the end of the copy, ``step_wait_s`` is what the next step took longer than one without a
    save. ``cpu_s`` is of all processes together, and `peak_extra_nbytes`, by rank, is counted from before the
    contender's first save."""

    contender: str
    round: int
    turn: int
    beside: Beside
    blocked_s: float
    durable_s: float
    persist_s: float | None = None
    step_wait_s: float | None = None
    cpu_s: float | None = None
    peak_extra_nbytes: tuple[int, ...] = ()


class SaveSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One contender. Blocked and step wait are of saves beside work; durable, shares of the raw limit (raw seconds /
    seconds, paired by round) and CPU are of saves beside nothing. The first save's seconds have its set-up in them."""

    contender: str
    first_blocked_s: float
    durable_s: Spread
    share_of_raw: Spread
    cpu_s_per_gb: Spread
    peak_extra_nbytes_per_rank: int
    blocked_s: Spread | None = None
    step_wait_s: Spread | None = None
    durable_beside_work_s: Spread | None = None
    persist_share_of_raw: Spread | None = None
    raw_way: str | None = None


class SavesPart(Taken, frozen=True, kw_only=True):
    """Saves, each contender in each round."""

    work_s: float
    generations: int
    raw_ways: tuple[str, ...]
    torch_threads: int
    caches: str
    packages: Mapping[str, str]
    contenders: tuple[ContenderMetadata, ...]
    not_possible: tuple[NotPossible, ...]
    summaries: tuple[SaveSummary, ...]
    samples: tuple[SaveSample, ...]


class RestoreSample(msgspec.Struct, frozen=True, kw_only=True):
    """One restore from the memory of the node after SIGKILL of all ranks, a copy of as many bytes, and a load from
    storage; from the first rank's start to the last rank's end. `durable`: whether the save was when the ranks died.
    `moved_s` is for a copy of each tensor with the digests of its bytes, and nothing else, `moved_cpu_s` the CPU
    seconds of all ranks for it."""

    round: int
    durable: bool
    restore_s: float
    memcpy_s: float
    moved_s: float
    moved_cpu_s: float
    load_s: float


class RestoreFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of all rounds. ``share_of_memcpy`` is copy seconds / restore seconds, paired by round, and
    ``moved_share_of_memcpy`` what it would be if a restore took no longer than to copy each tensor and digest it."""

    restore_s: Spread
    memcpy_s: Spread
    moved_s: Spread
    moved_cpu_s: Spread
    load_s: Spread
    share_of_memcpy: Spread
    moved_share_of_memcpy: Spread


class RestorePart(Taken, frozen=True, kw_only=True):
    """Restores from the memory of the node."""

    figures: RestoreFigures
    samples: tuple[RestoreSample, ...]


class PythonSample(msgspec.Struct, frozen=True, kw_only=True):
    """One save beside a loop of Python: how much it counted per second just before, while the state was copied in the
    background and written, while it was only written, and just after."""

    contender: str
    round: int
    before_per_s: float
    saving_per_s: float
    persisting_per_s: float
    after_per_s: float
    durable_s: float


class PythonSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One contender: what share of its rate the loop lost, from the call's return until all was durable, and of that
    time while it was only written."""

    contender: str
    slow_down: Spread
    persist_slow_down: Spread
    durable_s: Spread


class PythonPart(Taken, frozen=True, kw_only=True):
    """Saves beside a loop of Python."""

    summaries: tuple[PythonSummary, ...]
    samples: tuple[PythonSample, ...]


class LoopSample(msgspec.Struct, frozen=True, kw_only=True):
    """One training loop; ``lag_s`` is how long after its end the last save was durable."""

    contender: str
    round: int
    seconds: float
    lag_s: float


class LoopSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One contender: seconds, and seconds / seconds of the loop without saves - 1, paired by round."""

    contender: str
    seconds: Spread
    slow_down: Spread
    lag_s: Spread


class LoopPart(Taken, frozen=True, kw_only=True):
    """Training loops on all cores, of `steps` steps, with a save every `every` steps and without. In a step each rank
    does the arithmetic of `tokens` tokens."""

    steps: int
    every: int
    tokens: int
    summaries: tuple[LoopSummary, ...]
    samples: tuple[LoopSample, ...]


class Goal(msgspec.Struct, frozen=True):
    """A median of holdfast, and what it is to be: at most, or at least, `bar`."""

    what: str
    figure: float
    bar: float
    unit: str
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether it is."""
        return self.figure >= self.bar if self.at_least else self.figure <= self.bar

    def text(self) -> str:
        """The figure, what it is to be, and whether it is."""
        unit = f" {self.unit}" if self.unit else ""
        limit = f"at least {self.bar:g}{unit}" if self.at_least else f"at most {self.bar:g}{unit}"
        return f"{self.what} {self.figure:.3g}{unit} ({limit}): {'met' if self.met else 'missed'}"


class EngineResult(msgspec.Struct, frozen=True):
    """What is measured so far by ``python -m bench engine``. `bars` are those that hold for the sizes of its parts."""

    name: str
    saves: SavesPart | None = None
    restore: RestorePart | None = None
    python: PythonPart | None = None
    loop: LoopPart | None = None
    bars: tuple[Goal, ...] = ()


def read_engine(path: Path) -> EngineResult:
    """The result of `bench engine` in `path`; SetupError when there is none or it is not one."""
    return read_as(path, EngineResult, command="python -m bench engine")


def read_earlier(name: str, folder: Path) -> EngineResult:
    """What was measured before under this name, and written to `folder`; nothing where there is no file yet."""
    path = folder / f"{name}.json"
    return read_engine(path) if path.exists() else EngineResult(name)
