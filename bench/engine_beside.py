"""The cost of a save to training, for ``bench engine``: to a loop of Python, and to a loop on all cores.

In the first, one rank counts in plain Python, which nothing but the interpreter can do for it, and there is a core to
spare for whoever writes. Its rate while a save is under way is compared with its rate just before and just after.

In the second, every rank keeps one core busy with the arithmetic of a forward and a backward, and all ranks meet at the
end of a step, as they do when they reduce gradients. Loops with saves take turns with one without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bench import engine_contenders
from bench.caches import settle
from bench.engine_job import EngineJob, LiveTurns
from bench.live import Work
from bench.runner import Found, Span, Turns
from bench.state import State
from bench.way import Pending, Way

#: The loop that saves nothing.
NO_SAVES = "no saves"

#: Counted between two looks at the save: a millisecond or so.
_SLICE = 20_000
#: Floating-point operations of a forward and a backward, per parameter and token (Kaplan et al., 2020), and bytes of a
#: parameter with its two moments.
_OPERATIONS = 6
_PARAMETER_NBYTES = 12


class PythonLoop(EngineJob, frozen=True, kw_only=True):
    """Saves beside a loop of Python, which counts for `calm_s` before and after each save.

    A sample has what it counted per second just before, while the state was copied in the background and written, while
    it was only written, and just after; ``seconds`` until the save was durable.
    """

    calm_s: float

    def num_saves(self) -> int:
        """Two runs, and the save under way."""
        return 3

    def num_samples(self) -> int:
        """One for each save."""
        return (self.rounds + 1) * len(self.contenders)

    def turns(self, state: State) -> Turns:
        """The turns that the rank takes."""
        return _PythonTurns(self, state)


class _Counted(NamedTuple):
    total: int
    seconds: float

    @property
    def per_s(self) -> float:
        return self.total / self.seconds


class _PythonTurns(LiveTurns):
    def __init__(self, job: PythonLoop, state: State) -> None:
        super().__init__(job, state)
        self._calm_s = job.calm_s
        for name in job.contenders:
            self.way(name)

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, str, Found]]:
        folder = self.folder_of(name, str(number))
        folder.mkdir(parents=True, exist_ok=True)
        settle(folder)
        yield name, measure, self._counted(self.way(name), folder)
        engine_contenders.discard(name, folder)

    def _counted(self, way: Way, folder: Path) -> Found:
        before = _counted_for(self._calm_s)
        start_s = time.monotonic()
        pending = way.begin(folder)
        copying = _counted_until(pending.is_copied)
        persisting = _counted_until(pending.is_over)
        span = Span(start_s, time.monotonic())
        pending.wait()  # raises why it failed
        after = _counted_for(self._calm_s)
        saving = _Counted(copying.total + persisting.total, copying.seconds + persisting.seconds)
        return {
            "before_per_s": before.per_s,
            "saving_per_s": saving.per_s,
            "persisting_per_s": persisting.per_s,
            "after_per_s": after.per_s,
            "seconds": span,
        }


class TrainingLoop(EngineJob, frozen=True, kw_only=True):
    """Training loops of `steps` of `tokens` per rank, with a save after the first one and every `every` from there, and
    without. A sample has the ``seconds`` of a loop, and ``durable_s``, until its last save was durable."""

    steps: int
    every: int
    tokens: int

    def num_saves(self) -> int:
        """Two runs, and the saves of a loop."""
        return 2 + len(range(0, self.steps, self.every))

    def num_samples(self) -> int:
        """One for each loop."""
        return (self.rounds + 1) * (1 + len(self.contenders))

    def facts(self) -> dict[str, Any]:
        """The description of a loop."""
        return {"steps": self.steps, "every": self.every, "tokens": self.tokens}

    def turns(self, state: State) -> Turns:
        """The turns that this rank takes."""
        return _LoopTurns(self, state)


class _LoopTurns(LiveTurns):
    def __init__(self, job: TrainingLoop, state: State) -> None:
        super().__init__(job, state)
        self._steps = range(job.steps)
        self._saves = range(0, job.steps, job.every)
        for name in job.contenders:
            self.way(name)
        num_operations = _OPERATIONS * job.tokens * state.size().nbytes // _PARAMETER_NBYTES
        self._num_products = max(1, num_operations // Work.OPERATIONS)

    def entrants(self, number: int) -> tuple[str, ...]:
        return NO_SAVES, *self.job.contenders

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, str, Found]]:
        way = None if name == NO_SAVES else self.way(name)
        folders = [self.folder_of(name, f"{number}-{step}") for step in self._saves if way is not None]
        if self.leads:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
            settle(self.job.folder)
        dist.barrier()
        start_s = time.monotonic()
        begun = self._loop(way, folders)
        end_s = time.monotonic()
        for pending in begun:
            pending.wait()
        yield name, measure, {"seconds": Span(start_s, end_s), "durable_s": Span(start_s, time.monotonic())}
        if self.leads:
            for folder in dict.fromkeys(folders):
                engine_contenders.discard(name, folder)

    def _loop(self, way: Way | None, folders: Sequence[Path]) -> list[Pending]:
        """One loop; returns what it has begun."""
        begun: list[Pending] = []
        reduced = torch.zeros(1)
        for step in self._steps:
            self.work.products(self._num_products)
            dist.all_reduce(reduced)
            if way is None:
                self.live.step()
                continue
            with way.unlocked():
                self.live.step()
            if step in self._saves:
                begun.append(way.begin(folders[len(begun)]))
        return begun


def _counted_for(seconds: float) -> _Counted:
    end_s = time.perf_counter() + seconds
    return _counted_until(lambda: time.perf_counter() >= end_s)


def _counted_until(is_over: Callable[[], bool]) -> _Counted:
    """Count until `is_over`, at least one slice."""
    start_s, total = time.perf_counter(), 0
    while True:
        for _ in range(_SLICE):
            total += 1
        if is_over():
            return _Counted(total, time.perf_counter() - start_s)
