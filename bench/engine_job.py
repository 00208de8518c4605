"""The common ground of the parts of ``bench engine``: their folders, and ranks with a live training state."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist

from bench import engine_contenders
from bench.engine_contenders import GENERATIONS, Site
from bench.live import Live, Work
from bench.processes import node_memory
from bench.raw import takes_direct
from bench.runner import Job, Turns, require_room, run, scratch
from bench.schema import Sample, StateSize
from bench.state import State
from bench.way import Way

#: States are somewhat larger than asked for.
_HEADROOM = 1.15
#: States in memory at once, at most: the live one, snapshots, and what peers have of it; and all else.
_COPIES, _OTHER_NBYTES = 6, 2 << 30


class EngineJob(Job, frozen=True, kw_only=True):
    """One part: `contenders` save a live state; `folder` is on the device, `node_dir` in memory."""

    contenders: tuple[str, ...]
    node_dir: Path = Path()
    direct: bool = False

    def num_saves(self) -> int:
        """Saves that are on the device at once, at most."""
        raise NotImplementedError

    def facts(self) -> dict[str, Any]:
        """The facts that only this part has."""
        return {}

    def measure(self, folder: Path, *, on_sample: Callable[[Sample], None]) -> tuple[StateSize, tuple[Sample, ...]]:
        """Take all turns, the warm-up's too."""
        return run(self, folder, on_sample=on_sample)

    @contextmanager
    def placed(self, folder: Path, memory: Path) -> Iterator[tuple[EngineJob, Path]]:
        """This job with a new folder in `memory`, and a new folder on the device; both end with the block. SetupError
        where there is no room for the saves, or for the snapshots in memory."""
        nbytes = _HEADROOM * self.recipe.nbytes(self.world)
        require_room(f"in {folder}", int(self.num_saves() * nbytes), free=shutil.disk_usage(folder).free)
        require_room(f"in {memory}", int(GENERATIONS * nbytes), free=shutil.disk_usage(memory).free)
        require_room("of memory", int(_COPIES * nbytes + _HEADROOM * _OTHER_NBYTES), free=_available_nbytes())
        with scratch(folder) as path, node_memory(memory) as node_dir:
            yield msgspec.structs.replace(self, node_dir=node_dir, direct=takes_direct(path)), path


class LiveTurns(Turns):
    """The turns of one rank with a live state."""

    def __init__(self, job: EngineJob, state: State) -> None:
        self.job = job
        self.state = state
        self.leads = dist.get_rank() == 0
        self.live = Live(state)
        self.work = Work()
        self._ways: dict[str, Way] = {}

    def entrants(self, number: int) -> tuple[str, ...]:
        """All contenders."""
        return self.job.contenders

    def close(self) -> None:
        """Close all that has been set up."""
        for way in self._ways.values():
            way.close()

    def is_set_up(self, name: str) -> bool:
        """Whether contender `name` has been set up."""
        return name in self._ways

    def way(self, name: str) -> Way:
        """The way in which contender `name` saves; set up at the first call."""
        if name not in self._ways:
            run_folder = self.folder_of(name, "run")
            site = Site(self.state, self.live, run_folder, self.job.node_dir, self.job.direct)
            self._ways[name] = engine_contenders.build(name, site)
        return self._ways[name]

    def folder_of(self, name: str, what: str) -> Path:
        """The folder where `name` saves `what`."""
        return engine_contenders.folder_of(name, what, self.job.folder)


def _available_nbytes() -> int:
    """Memory that the kernel could give to new processes."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None, "every kernel since 3.14 says so"
    return 1024 * int(found[1])
