"""Saves of a live training state, for ``bench engine``: the time that a loop waits, and the progress of the save after.

In its turn a contender saves twice. Once ranks do nothing meanwhile, which shows how fast it is and what it costs; once
they go on with work and a step, which shows what they wait for. Before both, a step without a save is timed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import engine_contenders
from bench.caches import settle
from bench.contenders import Raw
from bench.engine_contenders import OURS, Site
from bench.engine_results import Beside, SaveSample
from bench.harness import messages, started
from bench.live import Live, Work
from bench.meter import give_back
from bench.processes import cpu_s, keepers, tree
from bench.rank import joined, require_same
from bench.raw import RAW_WAYS, RawImage
from bench.results import RAW, WARM_UP, StateSize, raw_name
from bench.saver import Saver
from bench.state import LlamaLike
from bench.statistics import rotated
from bench.watch import Watch


class SavesJob(msgspec.Struct, frozen=True):
    """What the ranks do together, and where: `folder` is on the device, `node_dir` in memory."""

    world: int
    rounds: int
    recipe: LlamaLike
    contenders: tuple[str, ...]
    work_s: float
    folder: Path
    node_dir: Path
    direct: bool
    store_port: int


class _Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's view of one save; times are of the machine-wide monotonic clock."""

    called_s: float
    returned_s: float
    over_s: float
    persist_s: float | None = None
    step_wait_s: float | None = None
    cpu_s: float | None = None
    peak_extra_nbytes: int | None = None


def num_samples(job: SavesJob) -> int:
    """How many samples `run_saves` takes."""
    return (job.rounds + 1) * sum(len(RAW_WAYS) if name == RAW else 2 for name in job.contenders)


def run_saves(job: SavesJob, *, on_sample: Callable[[SaveSample], None]) -> tuple[StateSize, tuple[SaveSample, ...]]:
    """Take all turns, the warm-up's too. `on_sample` sees each sample as it comes."""
    sizes: list[StateSize] = []
    samples: list[SaveSample] = []
    with started(run_rank, job, world=job.world) as ranks:
        for message in messages(ranks):
            if isinstance(message, StateSize):
                sizes.append(message)
            elif isinstance(message, SaveSample):
                samples.append(message)
                on_sample(message)
    (size,) = sizes
    return size, tuple(samples)


def run_rank(rank: int, job: SavesJob, channel: Connection) -> None:
    """Do `job` as `rank`. Rank 0 sends the state's size and every sample; any rank sends what ended it."""
    with joined(rank, channel, world=job.world, store_port=job.store_port):
        _Rank(job, channel).run()


class _Rank:
    def __init__(self, job: SavesJob, channel: Connection) -> None:
        self._job = job
        self._channel = channel
        self._leads = dist.get_rank() == 0
        self._state = job.recipe.build(init_device_mesh("cpu", (job.world,)))
        self._live = Live(self._state)
        self._work = Work()
        self._savers: dict[str, Saver] = {}
        self._live.step()  # the first one of a process takes longer
        if self._leads:
            channel.send(self._state.size())

    def run(self) -> None:
        """Every contender once per round, beginning with another one each round."""
        for number in range(WARM_UP, self._job.rounds + 1):
            for turn, name in enumerate(rotated(self._job.contenders, number)):
                if name == RAW:
                    self._take_raw_turn(number, turn)
                else:
                    self._take_turn(number, turn, name)
        for saver in self._savers.values():
            saver.close()

    def _take_raw_turn(self, number: int, turn: int) -> None:
        """All ways to write the same bytes. Their memory is there for this turn only."""
        image = RawImage(self._state.share(dist.get_rank(), self._job.world))
        for way in rotated(tuple(RAW_WAYS), number):
            raw = Raw(image, RAW_WAYS[way], direct=self._job.direct)
            folder = self._fresh(self._job.folder / RAW / f"{number}-{way.replace(' ', '-')}")
            cpu_before_s = self._cpu_s(RAW)
            start_s = time.monotonic()
            raw.save(folder)
            end_s = time.monotonic()
            timing = _Timing(called_s=start_s, returned_s=end_s, over_s=end_s, cpu_s=self._cpu_s(RAW) - cpu_before_s)
            self._report(raw_name(way), number, turn, "nothing", timing)
            self._discard(RAW, folder)

    def _take_turn(self, number: int, turn: int, name: str) -> None:
        watch = self._watched(name) if number == WARM_UP else None
        if name in self._savers:
            self._savers[name].ready()
        plain_step_s = self._worked_step_s()
        folder = self._folder(name, f"{number}-beside-nothing")
        timing = self._timed_alone(name, folder)
        self._report(name, number, turn, "nothing", timing)
        self._discard(name, folder)

        folder = self._folder(name, f"{number}-beside-work")
        expected = self._state.digests() if number == self._job.rounds else None
        timing = self._timed_beside_work(name, folder, plain_step_s)
        if watch is not None:
            timing = msgspec.structs.replace(timing, peak_extra_nbytes=watch.stop())
        self._report(name, number, turn, "work", timing)
        if expected is not None:
            # What a step changed meanwhile must not be in it.
            self._state.clear()
            self._savers[name].load(folder)
            require_same(expected, self._state.digests(), name=name)
        self._discard(name, folder)
        self._savers[name].rest()

    def _watched(self, name: str) -> Watch:
        """A watch of the memory from before there is anything of contender `name`."""
        give_back()
        dist.barrier()
        return Watch(node_dir=self._job.node_dir, world=self._job.world) if name == OURS else Watch()

    def _timed_alone(self, name: str, folder: Path) -> _Timing:
        """A save beside which ranks do nothing. The first one of a contender sets it up, within its time."""
        cpu_before_s = self._cpu_s(name)
        called_s = time.monotonic()
        saver = self._saver(name)
        pending = saver.begin(folder)
        returned_s = time.monotonic()
        pending.wait()
        over_s = time.monotonic()
        return _Timing(
            called_s=called_s,
            returned_s=returned_s,
            over_s=over_s,
            persist_s=pending.persist_s,
            cpu_s=self._cpu_s(name) - cpu_before_s,
        )

    def _timed_beside_work(self, name: str, folder: Path, plain_step_s: float) -> _Timing:
        saver = self._savers[name]
        dist.barrier()
        called_s = time.monotonic()
        pending = saver.begin(folder)
        returned_s = time.monotonic()
        self._work.for_seconds(self._job.work_s)
        ready_s = time.monotonic()
        with saver.unlocked():
            self._live.step()
        step_wait_s = time.monotonic() - ready_s - plain_step_s
        pending.wait()
        over_s = time.monotonic()
        return _Timing(called_s=called_s, returned_s=returned_s, over_s=over_s, step_wait_s=step_wait_s)

    def _worked_step_s(self) -> float:
        """Seconds of a step after work, while nothing is saved."""
        self._work.for_seconds(self._job.work_s)
        return self._live.step()

    def _saver(self, name: str) -> Saver:
        if name not in self._savers:
            run = engine_contenders.folder_of(name, "run", self._job.folder)
            self._savers[name] = engine_contenders.build(name, Site(self._state, self._live, run, self._job.node_dir))
        return self._savers[name]

    def _cpu_s(self, name: str) -> float:
        """CPU seconds so far of this rank and all that it started, and on rank 0 of holdfast's keeper. All ranks are
        here for it, so that what others still do for a save counts, and what they do next does not."""
        dist.barrier()
        used_s = cpu_s(tree(os.getpid()))
        if self._leads and name == OURS:
            used_s += cpu_s(keepers(self._job.node_dir))
        dist.barrier()
        return used_s

    def _folder(self, name: str, what: str) -> Path:
        return self._fresh(engine_contenders.folder_of(name, what, self._job.folder))

    def _fresh(self, folder: Path) -> Path:
        """`folder`, made where it is not there, beside caches that are cold; when all ranks are here."""
        if self._leads:
            folder.mkdir(parents=True, exist_ok=True)
            settle(folder)
        dist.barrier()
        return folder

    def _discard(self, name: str, folder: Path) -> None:
        """Give back what a save takes on the device, when all ranks have done with it."""
        dist.barrier()
        if self._leads:
            engine_contenders.discard(name, folder)

    def _report(self, name: str, number: int, turn: int, beside: Beside, timing: _Timing) -> None:
        timings: list[_Timing] | None = [timing] * self._job.world if self._leads else None
        dist.gather_object(timing, timings)
        if timings is not None:
            self._channel.send(_sample(name, number, turn, beside, timings))


def _sample(name: str, number: int, turn: int, beside: Beside, timings: Sequence[_Timing]) -> SaveSample:
    return SaveSample(
        contender=name,
        round=number,
        turn=turn,
        beside=beside,
        blocked_s=max(timing.returned_s - timing.called_s for timing in timings),
        durable_s=max(timing.over_s for timing in timings) - min(timing.called_s for timing in timings),
        persist_s=max((timing.persist_s for timing in timings if timing.persist_s is not None), default=None),
        step_wait_s=max((timing.step_wait_s for timing in timings if timing.step_wait_s is not None), default=None),
        cpu_s=None if timings[0].cpu_s is None else sum(timing.cpu_s or 0.0 for timing in timings),
        peak_extra_nbytes=tuple(timing.peak_extra_nbytes for timing in timings if timing.peak_extra_nbytes is not None),
    )
