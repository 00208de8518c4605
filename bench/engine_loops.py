"""The cost of a save to training: to a loop of Python, and to a loop on all cores.

In the first, one rank counts in plain Python, which nothing but the interpreter can do for it, and there is a core to
spare for whoever writes. Its rate while a save is under way is compared with its rate just before and just after.

In the second, every rank keeps one core busy with the arithmetic of a forward and a backward, and all ranks meet at the
end of a step, as they do when they reduce gradients. Loops with saves take turns with one without.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from bench.contenders import BESIDE_PYTHON, BESIDE_TRAINING
from bench.costs import settle
from bench.runner import Found, Job, Span, Turns
from bench.state import State, Work

#: The loop that saves nothing.
NO_SAVES = "no saves"

#: Counted between two looks at the save: a millisecond or so.
_SLICE = 20_000
#: Floating-point operations of a forward and a backward, per parameter and token (Kaplan et al., 2020), and bytes of a
#: parameter with its two moments.
_OPERATIONS = 6
_PARAMETER_NBYTES = 12


class PythonLoop(Turns):
    """Saves beside a loop of Python, which counts for ``calm_s`` before and after each save.

    A sample has what it counted per second just before, while the state was copied in the background and written, while
    it was only written, and just after; ``seconds`` until the save was durable.
    """

    registry = BESIDE_PYTHON

    def __init__(self, job: Job, state: State) -> None:
        super().__init__(job, state)
        for name in job.contenders:
            self.way(name)

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, str, Found]]:
        calm_s: float = self.job.facts["calm_s"]
        folder = self.cold(self.place(name, number))
        before = _counted_for(calm_s)
        start_s = time.monotonic()
        pending = self.way(name).begin(folder)
        copying = _counted_until(pending.is_copied)
        persisting = _counted_until(pending.is_over)
        span = Span(start_s, time.monotonic())
        pending.wait()  # raises why it failed
        after = _counted_for(calm_s)
        saving = _Counted(copying.total + persisting.total, copying.seconds + persisting.seconds)
        found: Found = {
            "before_per_s": before.per_s,
            "saving_per_s": saving.per_s,
            "persisting_per_s": persisting.per_s,
            "after_per_s": after.per_s,
            "seconds": span,
        }
        yield name, measure, found
        self.discard(name, folder)


class TrainingLoop(Turns):
    """Training loops of so many ``steps`` of ``tokens`` per rank, with a save after the first one and ``every`` so many
    from there, and without. A sample has the ``seconds`` of a loop, and ``durable_s``, until its last save was durable.
    """

    registry = BESIDE_TRAINING

    def __init__(self, job: Job, state: State) -> None:
        super().__init__(job, state)
        for name in job.contenders:
            self.way(name)
        self._work = Work()
        num_operations = _OPERATIONS * job.facts["tokens"] * state.size().nbytes // _PARAMETER_NBYTES
        self._num_products = max(1, num_operations // Work.OPERATIONS)
        _ = self.site.live

    def entrants(self, number: int) -> tuple[str, ...]:
        """All contenders, and a loop without saves."""
        return NO_SAVES, *self.job.contenders

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, str, Found]]:
        steps, every = range(self.job.facts["steps"]), self.job.facts["every"]
        way = None if name == NO_SAVES else self.way(name)
        folders = {} if way is None else {step: self.place(name, f"{number}-{step}") for step in steps[::every]}
        if self.leads:
            for folder in folders.values():
                folder.mkdir(parents=True, exist_ok=True)
            settle(self.job.folder)
        dist.barrier()
        begun, reduced = [], torch.zeros(1)
        start_s = time.monotonic()
        for step in steps:
            self._work.products(self._num_products)
            dist.all_reduce(reduced)
            if way is None:
                self.site.live.step()
                continue
            with way.unlocked():
                self.site.live.step()
            if step in folders:
                begun.append(way.begin(folders[step]))
        end_s = time.monotonic()
        for pending in begun:
            pending.wait()
        yield name, measure, {"seconds": Span(start_s, end_s), "durable_s": Span(start_s, time.monotonic())}
        for folder in dict.fromkeys(folders.values()):
            self.discard(name, folder)


class _Counted(NamedTuple):
    total: int
    seconds: float

    @property
    def per_s(self) -> float:
        return self.total / self.seconds


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
