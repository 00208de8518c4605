"""Saves of a live training state, for ``bench engine``: the time that a loop waits, and the progress of the save after.

In its turn a contender saves twice. Once ranks do nothing meanwhile, which shows how fast it is and what it costs; once
they go on with work and a step, which shows what they wait for. Before both, a step without a save is timed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench import engine_contenders
from bench.caches import settle
from bench.contenders import Raw
from bench.engine_contenders import GENERATIONS, OURS
from bench.engine_job import EngineJob, LiveTurns
from bench.meter import give_back
from bench.processes import cpu_s, keepers, tree
from bench.raw import RAW_WAYS, RawImage
from bench.runner import Found, Span, Turns, require_same
from bench.schema import RAW, WARM_UP, raw_name
from bench.state import State
from bench.statistics import rotated
from bench.watch import Watch

#: What is measured: saves beside which ranks do nothing, so that nothing takes a core from them, and saves beside work
#: and a step. Of both, ``seconds`` until the last rank's is durable, from the first one's call; ``blocked_s`` of the
#: call; ``persist_s`` from the end of the copy; ``step_wait_s`` is what the next step took longer than one without a
#: save; ``cpu_s`` is of all processes together, and ``peak_extra_nbytes`` counted from before the contender's first
#: save. The first save's seconds have its set-up in them.
ALONE, BESIDE_WORK = "save", "save beside work"


class Saves(EngineJob, frozen=True, kw_only=True):
    """Saves of all contenders; a step comes after `work_s` of work."""

    work_s: float

    def num_saves(self) -> int:
        """Two runs keep their head until after their next save."""
        return 5

    def num_samples(self) -> int:
        """One sample of each way of the raw limit, and two of every other contender."""
        return (self.rounds + 1) * sum(len(RAW_WAYS) if name == RAW else 2 for name in self.contenders)

    def facts(self) -> dict[str, Any]:
        """Work, and the snapshots that holdfast keeps in the memory of the node."""
        return {"work_s": self.work_s, "generations": GENERATIONS}

    def turns(self, state: State) -> Turns:
        """The turns that this rank takes."""
        return _SavesTurns(self, state)


class _SavesTurns(LiveTurns):
    def __init__(self, job: Saves, state: State) -> None:
        super().__init__(job, state)
        self._work_s = job.work_s
        self.live.step()  # the first one of a process takes longer

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, str, Found]]:
        return self._take_raw(number) if name == RAW else self._take(name, number)

    def _take_raw(self, number: int) -> Iterator[tuple[str, str, Found]]:
        """All ways to write the same bytes. Their memory is there for this turn only."""
        image = RawImage(self.state.share(dist.get_rank(), self.job.world))
        for way in rotated(tuple(RAW_WAYS), number):
            raw = Raw(self.state, image, RAW_WAYS[way], direct=self.job.direct)
            folder = self._fresh(self.job.folder / RAW / f"{number}-{way.replace(' ', '-')}")
            cpu_before_s = self._cpu_s(RAW)
            start_s = time.monotonic()
            raw.save(folder)
            span = Span(start_s, time.monotonic())
            cpu = self._cpu_s(RAW) - cpu_before_s
            yield raw_name(way), ALONE, {"seconds": span, "blocked_s": span.end_s - span.start_s, "cpu_s": cpu}
            self._discard(RAW, folder)

    def _take(self, name: str, number: int) -> Iterator[tuple[str, str, Found]]:
        watch = self._watched(name) if number == WARM_UP else None
        if self.is_set_up(name):
            self.way(name).ready()
        plain_step_s = self._worked_step_s()
        folder = self._fresh(self.folder_of(name, f"{number}-beside-nothing"))
        yield name, ALONE, self._timed_alone(name, folder)
        self._discard(name, folder)

        folder = self._fresh(self.folder_of(name, f"{number}-beside-work"))
        expected = self.state.digests() if number == self.job.rounds else None
        found = self._timed_beside_work(name, folder, plain_step_s)
        yield name, BESIDE_WORK, found | ({} if watch is None else {"peak_extra_nbytes": watch.stop()})
        if expected is not None:
            # What a step changed meanwhile must not be in it.
            self.state.clear()
            self.way(name).load(folder)
            require_same(expected, self.state.digests(), name=name)
        self._discard(name, folder)
        self.way(name).rest()

    def _watched(self, name: str) -> Watch:
        """A watch of the memory from before there is anything of contender `name`."""
        give_back()
        dist.barrier()
        return Watch(node_dir=self.job.node_dir, world=self.job.world) if name == OURS else Watch()

    def _timed_alone(self, name: str, folder: Path) -> Found:
        """A save beside which ranks do nothing. The first one of a contender sets it up, within its time."""
        cpu_before_s = self._cpu_s(name)
        called_s = time.monotonic()
        pending = self.way(name).begin(folder)
        returned_s = time.monotonic()
        pending.wait()
        span = Span(called_s, time.monotonic())
        found: Found = {"seconds": span, "blocked_s": returned_s - called_s, "cpu_s": self._cpu_s(name) - cpu_before_s}
        return found if pending.persist_s is None else {**found, "persist_s": pending.persist_s}

    def _timed_beside_work(self, name: str, folder: Path, plain_step_s: float) -> dict[str, float | Span]:
        way = self.way(name)
        dist.barrier()
        called_s = time.monotonic()
        pending = way.begin(folder)
        returned_s = time.monotonic()
        self.work.for_seconds(self._work_s)
        ready_s = time.monotonic()
        with way.unlocked():
            self.live.step()
        step_wait_s = time.monotonic() - ready_s - plain_step_s
        pending.wait()
        span = Span(called_s, time.monotonic())
        return {"seconds": span, "blocked_s": returned_s - called_s, "step_wait_s": step_wait_s}

    def _worked_step_s(self) -> float:
        """Seconds of a step after work, while nothing is saved."""
        self.work.for_seconds(self._work_s)
        return self.live.step()

    def _cpu_s(self, name: str) -> float:
        """CPU seconds so far of this rank and all that it started, and on rank 0 of holdfast's keeper. All ranks are
        here for it, so that what others still do for a save counts, and what they do next does not."""
        dist.barrier()
        used_s = cpu_s(tree(os.getpid()))
        if self.leads and name == OURS:
            used_s += cpu_s(keepers(self.job.node_dir))
        dist.barrier()
        return used_s

    def _fresh(self, folder: Path) -> Path:
        """`folder`, made where it is not there, beside caches that are cold; when all ranks are here."""
        if self.leads:
            folder.mkdir(parents=True, exist_ok=True)
            settle(folder)
        dist.barrier()
        return folder

    def _discard(self, name: str, folder: Path) -> None:
        """Give back what a save takes on the device, when all ranks have done with it."""
        dist.barrier()
        if self.leads:
            engine_contenders.discard(name, folder)
