"""Training loops with and without saves, for ``bench engine``: the cost of saves when no core is idle.

Every rank keeps one core busy with the arithmetic of a forward and a backward, and all ranks meet at the end of a step,
as they do when they reduce gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import engine_contenders
from bench.caches import settle
from bench.engine_contenders import Site
from bench.engine_results import NO_SAVES, LoopSample
from bench.harness import messages, started
from bench.live import Live, Work
from bench.pending import Pending
from bench.rank import joined
from bench.results import WARM_UP, StateSize
from bench.saver import Saver
from bench.state import LlamaLike
from bench.statistics import rotated

#: Floating-point operations of a forward and a backward, per parameter and token (Kaplan et al., 2020), and bytes of a
#: parameter with its two moments.
_OPERATIONS = 6
_PARAMETER_NBYTES = 12


class LoopJob(msgspec.Struct, frozen=True):
    """What the ranks do together, and where: `folder` is on the device, `node_dir` in memory. A loop has `steps` of
    `tokens` per rank, and a save after the first one and every `every` from there."""

    world: int
    rounds: int
    recipe: LlamaLike
    contenders: tuple[str, ...]
    steps: int
    every: int
    tokens: int
    folder: Path
    node_dir: Path
    store_port: int


def run_loops(job: LoopJob, *, on_sample: Callable[[LoopSample], None]) -> tuple[StateSize, tuple[LoopSample, ...]]:
    """Run all loops, the warm-up's too. `on_sample` sees each sample as it comes."""
    sizes: list[StateSize] = []
    samples: list[LoopSample] = []
    with started(run_rank, job, world=job.world) as ranks:
        for message in messages(ranks):
            if isinstance(message, StateSize):
                sizes.append(message)
            elif isinstance(message, LoopSample):
                samples.append(message)
                on_sample(message)
    (size,) = sizes
    return size, tuple(samples)


def run_rank(rank: int, job: LoopJob, channel: Connection) -> None:
    """Do `job` as `rank`. Rank 0 sends the state's size and every sample; any rank sends what ended it."""
    with joined(rank, channel, world=job.world, store_port=job.store_port):
        _Rank(job, channel).run()


class _Rank:
    def __init__(self, job: LoopJob, channel: Connection) -> None:
        self._job = job
        self._channel = channel
        self._leads = dist.get_rank() == 0
        self._state = job.recipe.build(init_device_mesh("cpu", (job.world,)))
        self._live = Live(self._state)
        self._work = Work()
        self._savers: dict[str, Saver] = {}
        for name in job.contenders:
            run = engine_contenders.folder_of(name, "run", job.folder)
            self._savers[name] = engine_contenders.build(name, Site(self._state, self._live, run, job.node_dir))
        size = self._state.size()
        num_operations = _OPERATIONS * job.tokens * size.nbytes // _PARAMETER_NBYTES
        self._num_products = max(1, num_operations // Work.OPERATIONS)
        if self._leads:
            channel.send(size)

    def run(self) -> None:
        """Every contender's loop and the one without saves, once per round, beginning with another one each round."""
        for number in range(WARM_UP, self._job.rounds + 1):
            for name in rotated((NO_SAVES, *self._job.contenders), number):
                self._take_turn(number, name)
        for saver in self._savers.values():
            saver.close()

    def _take_turn(self, number: int, name: str) -> None:
        folders = self._folders(name, number)
        if self._leads:
            settle(self._job.folder)
        dist.barrier()
        start_s = time.monotonic()
        begun = self._loop(self._savers.get(name), folders)
        end_s = time.monotonic()
        for pending in begun:
            pending.wait()
        times: list[tuple[float, float, float]] | None = [(0.0, 0.0, 0.0)] * self._job.world if self._leads else None
        dist.gather_object((start_s, end_s, time.monotonic()), times)
        if times is not None:
            starts, ends, durables = zip(*times, strict=True)
            seconds, lag_s = max(ends) - min(starts), max(durables) - max(ends)
            self._channel.send(LoopSample(contender=name, round=number, seconds=seconds, lag_s=lag_s))
            for folder in dict.fromkeys(folders):
                engine_contenders.discard(name, folder)

    def _loop(self, saver: Saver | None, folders: Sequence[Path]) -> list[Pending]:
        """One loop; returns what it has begun."""
        begun: list[Pending] = []
        reduced = torch.zeros(1)
        for step in range(self._job.steps):
            self._work.products(self._num_products)
            dist.all_reduce(reduced)
            if saver is None:
                self._live.step()
                continue
            with saver.unlocked():
                self._live.step()
            if step % self._job.every == 0:
                begun.append(saver.begin(folders[len(begun)]))
        return begun

    def _folders(self, name: str, number: int) -> list[Path]:
        """Where the saves of a loop go."""
        if name == NO_SAVES:
            return []
        saves = range(0, self._job.steps, self._job.every)
        folders = [engine_contenders.folder_of(name, f"{number}-{step}", self._job.folder) for step in saves]
        if self._leads:
            for folder in folders:
                folder.mkdir(parents=True, exist_ok=True)
        return folders
