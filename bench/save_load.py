"""Turns in which a contender saves, and turns in which it loads what it saved: `bench io`, `bench load`, `bench small`.

Caches are cold before each turn, and what was loaded is compared with what was saved.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as dist

from bench.caches import settle
from bench.contenders import LATER, build, entrants
from bench.meter import Meter
from bench.runner import Found, Job, Span, Turns, require_room, require_same
from bench.schema import WARM_UP
from bench.state import State

MEASURES = ("save", "load")
_DISK_HEADROOM = 1.1


class SaveLoad(Job, frozen=True, kw_only=True):
    """The plan of a run: `contenders`, in each of `measures`.

    A contender that is named in `at_most` takes part in so many rounds only, the first ones, and has no warm-up.
    The entrants in `kept` save once, before the rounds and untimed, where a run that does not save finds it: this one
    or a later one in the same folder.
    """

    contenders: tuple[str, ...]
    at_most: Mapping[str, int] = {}
    measures: tuple[str, ...] = MEASURES
    kept: tuple[str, ...] = ()
    direct: bool = False

    def entrants(self, number: int) -> tuple[str, ...]:
        """The entrants that take a turn in round `number`."""
        found = entrants(self.contenders)
        return tuple(name for name in found if name not in self.at_most or WARM_UP < number <= self.at_most[name])

    def num_samples(self) -> int:
        """Timed operations, with those of the warm-up."""
        return len(self.measures) * sum(len(self.entrants(number)) for number in range(WARM_UP, self.rounds + 1))

    def folder_of(self, name: str, number: int, root: Path) -> Path:
        """The folder in `root` where entrant `name` saves or loads in round `number`: one for the round, or one that
        outlives the rounds."""
        outlives = name == LATER or "save" not in self.measures
        return root / name if outlives else root / f"round-{number}" / name

    def turns(self, state: State) -> Turns:
        """The turns that this rank takes."""
        return _SaveLoadTurns(self, state)

    def require_space(self, folder: Path, *, num_more: int = 0) -> None:
        """Refuse a run whose last round does not fit: before its loads, every entrant's files exist at once, and those
        of all rounds where they go into one run. `num_more` copies of the state are to fit as well."""
        num_copies = len(entrants(self.contenders)) + (self.rounds if LATER in self.contenders else 0) + num_more
        needed = int(_DISK_HEADROOM * self.recipe.nbytes(self.world) * num_copies)
        require_room(f"in {folder}", needed, free=shutil.disk_usage(folder).free)


class _SaveLoadTurns(Turns):
    def __init__(self, job: SaveLoad, state: State) -> None:
        self.measures = job.measures
        self._job = job
        self._leads = dist.get_rank() == 0
        self._ways = build(job.contenders, state, direct=job.direct)
        memories = {id(way.memory): way.memory for way in self._ways.values()}
        self._digests = {key: memory.digests() for key, memory in memories.items()}
        for name in job.kept:
            self._keep(name)

    def entrants(self, number: int) -> tuple[str, ...]:
        return self._job.entrants(number)

    def begin_round(self, number: int) -> None:
        if self._leads:
            self._round_folder(number).mkdir()

    def end_round(self, number: int) -> None:
        if self._leads:
            shutil.rmtree(self._round_folder(number))

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, str, Found]]:
        way = self._ways[name]
        folder = self._job.folder_of(name, number, self._job.folder)
        if measure == "load":
            way.memory.clear()
        elif self._leads:
            folder.mkdir(exist_ok=True)
        if self._leads:
            settle(folder)
        operation = way.save if measure == "save" else way.load
        meter = Meter(watch_memory=number == WARM_UP)
        dist.barrier()
        start_s = time.monotonic()
        operation(folder)
        span = Span(start_s, time.monotonic())
        usage = meter.stop()
        # No rank's digests take time from a rank that still loads.
        dist.barrier()
        if measure == "load":
            require_same(self._digests[id(way.memory)], way.memory.digests(), name=name)
        yield name, measure, {"seconds": span, **usage}

    def _keep(self, name: str) -> None:
        folder = self._job.folder / name
        if self._leads:
            folder.mkdir()
        dist.barrier()
        self._ways[name].save(folder)
        # Not all contenders wait for each other.
        dist.barrier()

    def _round_folder(self, number: int) -> Path:
        return self._job.folder / f"round-{number}"
