"""One rank of a run: a process that stays warm and takes every contender's turns."""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import contenders
from bench.caches import settle
from bench.contenders import Contender
from bench.errors import WrongBytesError
from bench.meter import Meter
from bench.order import WARM_UP, Order
from bench.results import MEASURES, Measure, Sample, StateSize
from bench.statistics import rotated

#: What torchrun gives each of several ranks of a node.
TORCH_THREADS = 1
HOST = "127.0.0.1"


class Job(msgspec.Struct, frozen=True):
    """What the ranks do together, and where."""

    order: Order
    folder: Path
    direct: bool
    store_port: int


class Failure(msgspec.Struct, frozen=True):
    """What ended a rank."""

    text: str


Message = StateSize | Sample | Failure


class _Timing(msgspec.Struct, frozen=True):
    """One rank's view of one operation; times are of the machine-wide monotonic clock."""

    start_s: float
    end_s: float
    cpu_s: float
    peak_extra_nbytes: int


def run_rank(rank: int, job: Job, channel: Connection) -> None:
    """Do `job` as `rank`. Rank 0 sends the state's size and every sample; any rank sends what ended it."""
    try:
        _join(rank, job)
        _Rank(job, channel).run()
        dist.destroy_process_group()
    except BaseException as error:  # DCP's own exception is no Exception
        text = str(error) if isinstance(error, WrongBytesError) else traceback.format_exc()
        channel.send(Failure(text=text))
        raise SystemExit(1) from error


def _join(rank: int, job: Job) -> None:
    """Become `rank` as under torchrun on one node."""
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(job.order.world)
    torch.set_num_threads(TORCH_THREADS)
    store = dist.TCPStore(HOST, job.store_port, job.order.world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=job.order.world)


class _Rank:
    def __init__(self, job: Job, channel: Connection) -> None:
        state = job.order.recipe.build(init_device_mesh("cpu", (job.order.world,)))
        self._order = job.order
        self._folder = job.folder
        self._channel = channel
        self._leads = dist.get_rank() == 0
        self._contenders = contenders.build(job.order.contenders, state, direct=job.direct)
        self._digests = {name: contender.memory.digests() for name, contender in self._contenders.items()}
        self._send(state.size())

    def run(self) -> None:
        """Every entrant of a round once per measure, beginning with another one each round."""
        for number in range(WARM_UP, self._order.rounds + 1):
            folder = contenders.round_folder(number, self._folder)
            if self._leads:
                folder.mkdir()
            names = rotated(self._order.entrants(number), number)
            for measure in MEASURES:
                for turn, name in enumerate(names):
                    self._take_turn(measure, number, turn, name)
            if self._leads:
                shutil.rmtree(folder)

    def _take_turn(self, measure: Measure, number: int, turn: int, name: str) -> None:
        contender = self._contenders[name]
        folder = contenders.folder_of(name, number, self._folder)
        if measure == "load":
            contender.memory.clear()
        elif self._leads:
            folder.mkdir(exist_ok=True)
        timing = self._timed(contender, measure, folder)
        if measure == "load":
            require_same(self._digests[name], contender.memory.digests(), name=name)
        timings: list[_Timing] | None = [timing] * self._order.world if self._leads else None
        dist.gather_object(timing, timings)
        if timings is not None:
            self._send(_sample(measure, number, turn, name, timings))

    def _timed(self, contender: Contender, measure: Measure, folder: Path) -> _Timing:
        if self._leads:
            settle(folder)
        operation = contender.save if measure == "save" else contender.load
        meter = Meter()
        dist.barrier()
        start_s = time.monotonic()
        operation(folder)
        end_s = time.monotonic()
        usage = meter.stop()
        return _Timing(start_s=start_s, end_s=end_s, cpu_s=usage.cpu_s, peak_extra_nbytes=usage.peak_extra_nbytes)

    def _send(self, message: Message) -> None:
        if self._leads:
            self._channel.send(message)


def require_same(expected: Mapping[str, str], found: Mapping[str, str], *, name: str) -> None:
    """WrongBytesError when what contender `name` loaded (`found`) differs from what it saved."""
    wrong = [path for path in expected if found.get(path) != expected[path]]
    if wrong:
        raise WrongBytesError(
            f"{name} loaded other bytes than it saved: "
            f"{len(wrong)} of {len(expected)} parts differ, the first is {wrong[0]}."
        )


def _sample(measure: Measure, number: int, turn: int, name: str, timings: list[_Timing]) -> Sample:
    return Sample(
        measure=measure,
        round=number,
        turn=turn,
        contender=name,
        seconds=max(timing.end_s for timing in timings) - min(timing.start_s for timing in timings),
        cpu_s=tuple(timing.cpu_s for timing in timings),
        peak_extra_nbytes=tuple(timing.peak_extra_nbytes for timing in timings),
    )
