"""One rank of a run: a process that stays warm and takes every contender's turns."""

from __future__ import annotations

import os
import shutil
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench import contenders
from bench.caches import settle
from bench.contenders import Contender
from bench.errors import BenchError, WrongBytesError
from bench.meter import Meter, Usage
from bench.order import Order
from bench.results import WARM_UP, Measure, Sample, StateSize
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
    usage: Usage


def run_rank(rank: int, job: Job, channel: Connection) -> None:
    """Do `job` as `rank`. Rank 0 sends the state's size and every sample; any rank sends what ended it."""
    with joined(rank, channel, world=job.order.world, store_port=job.store_port):
        _Rank(job, channel).run()


@contextmanager
def joined(rank: int, channel: Connection, *, world: int, store_port: int) -> Iterator[None]:
    """Be `rank` for the time of a ``with`` block, as under torchrun on one node, and send what ended it, if it did."""
    try:
        _join(rank, world=world, store_port=store_port)
        yield
        dist.destroy_process_group()
    except BaseException as error:  # DCP's own exception is no Exception
        text = str(error) if isinstance(error, BenchError) else traceback.format_exc()
        channel.send(Failure(text=text))
        raise SystemExit(1) from error


def _join(rank: int, *, world: int, store_port: int) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ[name] = str(world)
    # Processes that ranks start make groups of their own.
    os.environ["MASTER_ADDR"] = HOST
    torch.set_num_threads(TORCH_THREADS)
    store = dist.TCPStore(HOST, store_port, world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


class _Rank:
    def __init__(self, job: Job, channel: Connection) -> None:
        order = job.order
        state = order.recipe.build(init_device_mesh("cpu", order.recipe.mesh_shape(order.world)))
        self._order = order
        self._folder = job.folder
        self._channel = channel
        self._leads = dist.get_rank() == 0
        self._contenders = contenders.build(order.contenders, state, direct=job.direct)
        memories = {id(contender.memory): contender.memory for contender in self._contenders.values()}
        self._digests = {key: memory.digests() for key, memory in memories.items()}
        self._send(state.size())

    def run(self) -> None:
        """What is kept, then every entrant of a round once per measure, beginning with another one each round."""
        for name in self._order.kept:
            self._save_kept(name)
        for number in range(WARM_UP, self._order.rounds + 1):
            folder = contenders.round_folder(number, self._folder)
            if self._leads:
                folder.mkdir()
            names = rotated(self._order.entrants(number), number)
            for measure in self._order.measures:
                for turn, name in enumerate(names):
                    self._take_turn(measure, number, turn, name)
            if self._leads:
                shutil.rmtree(folder)

    def _save_kept(self, name: str) -> None:
        folder = contenders.kept_folder(name, self._folder)
        if self._leads:
            folder.mkdir()
        dist.barrier()
        self._contenders[name].save(folder)
        # Not all contenders wait for each other.
        dist.barrier()

    def _take_turn(self, measure: Measure, number: int, turn: int, name: str) -> None:
        contender = self._contenders[name]
        folder = self._order.folder_of(name, number, self._folder)
        if measure == "load":
            contender.memory.clear()
        elif self._leads:
            folder.mkdir(exist_ok=True)
        timing = self._timed(contender, measure, folder, watch_memory=number == WARM_UP)
        # No rank's digests take time from a rank that still loads.
        dist.barrier()
        if measure == "load":
            require_same(self._digests[id(contender.memory)], contender.memory.digests(), name=name)
        timings: list[_Timing] | None = [timing] * self._order.world if self._leads else None
        dist.gather_object(timing, timings)
        if timings is not None:
            self._send(_sample(measure, number, turn, name, timings))

    def _timed(self, contender: Contender, measure: Measure, folder: Path, *, watch_memory: bool) -> _Timing:
        if self._leads:
            settle(folder)
        operation = contender.save if measure == "save" else contender.load
        meter = Meter(watch_memory=watch_memory)
        dist.barrier()
        start_s = time.monotonic()
        operation(folder)
        end_s = time.monotonic()
        return _Timing(start_s=start_s, end_s=end_s, usage=meter.stop())

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
        cpu_s=tuple(timing.usage.cpu_s for timing in timings),
        peak_extra_nbytes=tuple(timing.usage.peak_extra_nbytes for timing in timings),
        device_nbytes=tuple(timing.usage.device_nbytes for timing in timings),
        asked_nbytes=tuple(timing.usage.asked_nbytes for timing in timings),
    )
