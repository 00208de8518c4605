"""Saves of a live training state: the time that a loop waits, and the progress of the save after.

In its turn a contender saves twice. Once ranks do nothing meanwhile, which shows how fast it is and what it costs; once
they go on with work and a step, which shows what they wait for. Before both, a step without a save is timed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from bench.contenders import BACKGROUND, OURS
from bench.costs import Watch, give_back
from bench.runner import Found, Job, Span, Turns, require_same
from bench.schema import RAW, WARM_UP
from bench.state import State, Work

#: What is measured: saves beside which ranks do nothing, so that nothing takes a core from them, and saves beside work
#: and a step. Of both, ``seconds`` until the last rank's is durable, from the first one's call; ``blocked_s`` of the
#: call; ``persist_s`` from the end of the copy; ``step_wait_s`` is what the next step took longer than one without a
#: save; ``cpu_s`` is of all processes together, and ``peak_extra_nbytes`` counted from before the contender's first
#: save. The first save's seconds have its set-up in them.
ALONE, BESIDE_WORK = "save", "save beside work"


class Saves(Turns):
    """Saves of all contenders; a step comes after ``work_s`` of work. The raw limit only saves beside nothing."""

    registry = BACKGROUND

    def __init__(self, job: Job, state: State) -> None:
        super().__init__(job, state)
        self._work = Work()
        self._work_s: float = job.facts["work_s"]
        self.site.live.step()  # the first one of a process takes longer

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, str, Found]]:
        if name.startswith(RAW):
            self.way(name).ready()
            yield name, ALONE, self._save_alone(name, number)
        else:
            yield from self._save_twice(name, number)
        self.way(name).rest()

    def _save_twice(self, name: str, number: int) -> Iterator[tuple[str, str, Found]]:
        watch = self._watched(name) if number == WARM_UP else None
        if name in self.ways:
            self.way(name).ready()
        self._work.for_seconds(self._work_s)
        plain_step_s = self.site.live.step()
        yield name, ALONE, self._save_alone(name, number)

        folder = self.cold(self.place(name, f"{number}-beside-work"))
        expected = self.state.digests() if number == self.job.rounds else None
        found = self._save_beside_work(name, folder, plain_step_s)
        yield name, BESIDE_WORK, found | ({} if watch is None else {"peak_extra_nbytes": watch.stop()})
        if expected is not None:
            # What a step changed meanwhile must not be in it.
            self.state.clear()
            self.way(name).load(folder)
            require_same(expected, self.state.digests(), name=name)
        self.discard(name, folder)

    def _save_alone(self, name: str, number: int) -> Found:
        """A save beside which ranks do nothing. The first one of a contender sets it up, within its time."""
        folder = self.cold(self.place(name, f"{number}-alone"))
        cpu_before_s = self.cpu_s(name)
        called_s = time.monotonic()
        pending = self.way(name).begin(folder)
        returned_s = time.monotonic()
        pending.wait()
        span = Span(called_s, time.monotonic())
        found: Found = {"seconds": span, "blocked_s": returned_s - called_s, "cpu_s": self.cpu_s(name) - cpu_before_s}
        self.discard(name, folder)
        persist_s = pending.persist_s()
        return found if persist_s is None else {**found, "persist_s": persist_s}

    def _save_beside_work(self, name: str, folder: Path, plain_step_s: float) -> dict[str, Any]:
        way = self.way(name)
        dist.barrier()
        called_s = time.monotonic()
        pending = way.begin(folder)
        returned_s = time.monotonic()
        self._work.for_seconds(self._work_s)
        ready_s = time.monotonic()
        with way.unlocked():
            self.site.live.step()
        step_wait_s = time.monotonic() - ready_s - plain_step_s
        pending.wait()
        span = Span(called_s, time.monotonic())
        return {"seconds": span, "blocked_s": returned_s - called_s, "step_wait_s": step_wait_s}

    def _watched(self, name: str) -> Watch:
        """A watch of the memory from before there is anything of contender `name`."""
        give_back()
        dist.barrier()
        return Watch(node_dir=self.job.node_dir, world=self.job.world) if name == OURS else Watch()
