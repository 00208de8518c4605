"""Saves beside a loop of Python, for ``bench engine``: the share of the interpreter that a save takes from the loop.

One rank counts, in plain Python, which nothing but the interpreter can do for it, and there is a core to spare for
whoever writes. Its rate while a save is under way is compared with its rate just before and just after.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec
from torch.distributed.device_mesh import init_device_mesh

from bench import engine_contenders
from bench.caches import settle
from bench.engine_contenders import Site
from bench.engine_results import PythonSample
from bench.harness import messages, started
from bench.live import Live
from bench.rank import joined
from bench.results import WARM_UP, StateSize
from bench.saver import Saver
from bench.state import LlamaLike
from bench.statistics import rotated

#: Counted between two looks at the save: a millisecond or so.
_SLICE = 20_000


class PythonJob(msgspec.Struct, frozen=True):
    """What the rank does, and where: `folder` is on the device, `node_dir` in memory. It counts for `calm_s` before
    and after each save."""

    rounds: int
    recipe: LlamaLike
    contenders: tuple[str, ...]
    calm_s: float
    folder: Path
    node_dir: Path
    store_port: int


class _Counted(NamedTuple):
    total: int
    seconds: float

    @property
    def per_s(self) -> float:
        return self.total / self.seconds


def run_python(
    job: PythonJob, *, on_sample: Callable[[PythonSample], None]
) -> tuple[StateSize, tuple[PythonSample, ...]]:
    """Take all turns, the warm-up's too. `on_sample` sees each sample as it comes."""
    sizes: list[StateSize] = []
    samples: list[PythonSample] = []
    with started(run_rank, job, world=1) as ranks:
        for message in messages(ranks):
            if isinstance(message, StateSize):
                sizes.append(message)
            elif isinstance(message, PythonSample):
                samples.append(message)
                on_sample(message)
    (size,) = sizes
    return size, tuple(samples)


def run_rank(rank: int, job: PythonJob, channel: Connection) -> None:
    """Do `job`, and send the state's size and every sample, or what ended it."""
    with joined(rank, channel, world=1, store_port=job.store_port):
        state = job.recipe.build(init_device_mesh("cpu", (1,)))
        channel.send(state.size())
        live = Live(state)
        savers: dict[str, Saver] = {}
        for name in job.contenders:
            run = engine_contenders.folder_of(name, "run", job.folder)
            savers[name] = engine_contenders.build(name, Site(state, live, run, job.node_dir))
        for number in range(WARM_UP, job.rounds + 1):
            for name in rotated(job.contenders, number):
                folder = engine_contenders.folder_of(name, str(number), job.folder)
                folder.mkdir(parents=True, exist_ok=True)
                settle(folder)
                channel.send(_sample(name, number, savers[name], folder, calm_s=job.calm_s))
                engine_contenders.discard(name, folder)
        for saver in savers.values():
            saver.close()


def _sample(name: str, number: int, saver: Saver, folder: Path, *, calm_s: float) -> PythonSample:
    before = _counted_for(calm_s)
    start_s = time.monotonic()
    pending = saver.begin(folder)
    copying = _counted_until(pending.is_copied)
    persisting = _counted_until(pending.is_over)
    durable_s = time.monotonic() - start_s
    pending.wait()  # raises why it failed
    after = _counted_for(calm_s)
    saving = _Counted(copying.total + persisting.total, copying.seconds + persisting.seconds)
    return PythonSample(
        contender=name,
        round=number,
        before_per_s=before.per_s,
        saving_per_s=saving.per_s,
        persisting_per_s=persisting.per_s,
        after_per_s=after.per_s,
        durable_s=durable_s,
    )


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
