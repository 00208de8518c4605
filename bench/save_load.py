"""Turns in which a contender saves, and turns in which it loads what it saved: `bench io`, `bench load`, `bench small`.

Caches are cold before each turn, and what was loaded is compared with what was saved.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from bench.contenders import LATER
from bench.costs import Watch, give_back, read_nbytes
from bench.raw import RAW_WAYS
from bench.runner import Found, Job, Span, Turns, require_same
from bench.schema import RAW, WARM_UP
from bench.state import State

MEASURES = SAVE, LOAD = ("save", "load")
#: Where those save that `Loads` load.
_KEPT = "kept"


class SaveLoad(Turns):
    """Every contender saves, then every one loads."""

    measures: tuple[str, ...] = MEASURES

    def __init__(self, job: Job, state: State) -> None:
        super().__init__(job, state)
        self._expected = {name: self.way(name).memory.digests() for name in super().entrants(WARM_UP)}

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, str, Found]]:
        way, keeps = self.way(name), SAVE not in self.measures
        if measure == LOAD:
            way.memory.clear()
        folder = self.cold(self.place(name, _KEPT if keeps else number))
        operation = way.save if measure == SAVE else way.load
        give_back()
        watch = Watch() if number == WARM_UP else None
        cpu_before_s, read_before = self.cpu_s(name), read_nbytes()
        start_s = time.monotonic()
        operation(folder)
        span = Span(start_s, time.monotonic())
        device_nbytes, asked_nbytes = (now - before for now, before in zip(read_nbytes(), read_before, strict=True))
        cpu_s = self.cpu_s(name) - cpu_before_s
        found: Found = {"seconds": span, "cpu_s": cpu_s, "device_nbytes": device_nbytes, "asked_nbytes": asked_nbytes}
        if watch is not None:
            found = {**found, "peak_extra_nbytes": watch.stop()}
        # No rank's digests take time from a rank that still loads: all have been there for the CPU seconds.
        if measure == LOAD:
            require_same(self._expected[name], way.memory.digests(), name=name)
        yield name, measure, found
        if measure == LOAD and not keeps:
            self.discard(name, folder)


class Many(SaveLoad):
    """The same of so many tensors that dcp takes part in the first round only, and has no warm-up."""

    def entrants(self, number: int) -> tuple[str, ...]:
        return tuple(name for name in super().entrants(number) if name != "dcp" or number == 1)


class Keep(Turns):
    """Every contender saves, untimed, where `Loads` in the same folder finds it. For a job of no rounds but the
    warm-up."""

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, str, Found]]:
        _keep(self, name)
        return iter(())


class Loads(SaveLoad):
    """Every contender loads what `Keep` has saved; the raw limit reads what the ranks that load have written."""

    measures = (LOAD,)

    def __init__(self, job: Job, state: State) -> None:
        super().__init__(job, state)
        for name in self.entrants(WARM_UP):
            if name.startswith(RAW):
                _keep(self, name)


def copies(names: Sequence[str]) -> int:
    """Copies of the state on the device at once, at most: before the loads of a round every entrant has one, and a run
    has one more."""
    return len(names) + (len(RAW_WAYS) - 1) * (RAW in names) + (LATER in names)


def _keep(turns: Turns, name: str) -> None:
    turns.way(name).save(turns.cold(turns.place(name, _KEPT)))
    dist.barrier()  # not all contenders wait for each other
