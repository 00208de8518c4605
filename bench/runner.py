"""The runner of all benchmarks: contenders take turns, in one process or in ranks that stay warm and send samples."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console
from torch.multiprocessing.spawn import ProcessException, start_processes

import holdfast
from bench.benchmark import Options
from bench.contenders import HoldfastBackground, Registry, why_absent
from bench.costs import cpu_s, keepers, node_memory, read_nbytes, scratch, settle, tree
from bench.raw import RAW_WAYS
from bench.schema import RAW, WARM_UP, BenchError, Contender, Part, Sample, Scenario, StateSize, environment, rotated
from bench.state import Recipe
from bench.ways import Site, Way

#: The number of threads that torchrun gives each of several ranks of a node.
TORCH_THREADS = 1
HOST = "127.0.0.1"
#: The pause between two looks for messages.
_LOOK_S = 0.1

R = TypeVar("R")


#: The figures that one rank found.
Found: TypeAlias = dict[str, float]


class Job(NamedTuple):
    """`turns` that the ranks of a scenario take with what `recipe` makes, of all contenders of `registry` but those
    that are `impossible`, for a reason."""

    scenario: Scenario
    turns: type[Turns]
    recipe: Recipe
    registry: Registry
    impossible: Mapping[str, str] = {}

    @property
    def absent(self) -> dict[str, str]:
        """The contenders that cannot take part, each with the reason."""
        reasons = {name: self.impossible.get(name) or why_absent(kind.package) for name, kind in self.registry.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    @property
    def able(self) -> list[str]:
        return [name for name in self.registry if name not in self.absent]


class Turns:
    """The turns that one rank of a job takes. All methods are collective."""

    #: In each round, every entrant takes one turn for each of these.
    measures: tuple[str, ...] = ("",)
    #: The ranks of each round are new ones, which are killed at its end.
    mortal = False

    def __init__(self, job: Job, site: Site) -> None:
        self.job = job
        self.site = site
        self.state = site.state
        self.leads = dist.get_rank() == 0
        self.ways: dict[str, Way] = {}

    @property
    def entrants(self) -> list[str]:
        """The entrants that take a turn in each round: the raw limit in each of its ways, then the others."""
        able = self.job.able
        return [*(f"{RAW} {way}" for way in RAW_WAYS if RAW in able), *(name for name in able if name != RAW)]

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, Found]]:
        """Take a turn of `name`; yields (measure, found) for each sample of it."""
        raise NotImplementedError

    def way(self, name: str) -> Way:
        if name not in self.ways:
            self.ways[name] = self.job.registry[RAW if name.startswith(RAW) else name](self.site, name)
        return self.ways[name]

    def cold(self, folder: Path) -> Path:
        """Make `folder` if it is missing, and drop caches, when all ranks are here."""
        if self.leads:
            folder.mkdir(parents=True, exist_ok=True)
            settle(folder)
        dist.barrier()
        return folder

    def discard(self, name: str, folder: Path) -> None:
        """Give back what a save takes on the device, when all ranks have done with it."""
        dist.barrier()
        if self.leads:
            self.way(name).discard(folder)

    def observed(self, name: str, work: Callable[[], object]) -> Found:
        """Measure the time and bytes that `work` of entrant `name` takes. All ranks meet before and after it, so that
        the figures include what others still do for it, and exclude what they do next."""
        used_s, read = self._cpu_s(name), read_nbytes()
        start_s = time.monotonic()
        work()
        seconds = time.monotonic() - start_s
        device_nbytes, asked_nbytes = (now - before for now, before in zip(read_nbytes(), read, strict=True))
        used_s = self._cpu_s(name) - used_s
        return {"seconds": seconds, "cpu_s": used_s, "device_nbytes": device_nbytes, "asked_nbytes": asked_nbytes}

    def _cpu_s(self, name: str) -> float:
        """CPU seconds so far of this rank and all that it started, and on rank 0 of holdfast's keeper."""
        dist.barrier()
        used_s = cpu_s(tree(os.getpid()))
        if self.leads and isinstance(self.way(name), HoldfastBackground):
            used_s += cpu_s(keepers(self.site.node_dir))
        dist.barrier()
        return used_s


def measured(scenario: Scenario, samples: Sequence[Sample], options: Options, **about: Any) -> Part:
    """A part that was measured here and now."""
    date, here = datetime.now(UTC).isoformat(timespec="seconds"), environment(options.folder)
    return Part(scenario=scenario, date=date, environment=here, samples=tuple(samples), **about)


def measure(options: Options, *jobs: Job) -> Part:
    """Run `jobs` in one folder, of the contenders that were asked for; the last one makes the part."""
    wanted = options.contenders
    jobs = tuple(
        job._replace(
            registry={name: kind for name, kind in job.registry.items() if not wanted or name in (RAW, *wanted)}
        )
        for job in jobs
    )
    job, size, samples = jobs[-1], StateSize(), list[Sample]()
    scenario = job.scenario
    with (
        scratch(options.folder) as folder,
        node_memory(options.memory) as node_dir,
        Console(stderr=True).status(f"{scenario.name}: starting the ranks") as status,
    ):
        for message in itertools.chain.from_iterable(run(each, Site(each.recipe, folder, node_dir)) for each in jobs):
            if isinstance(message, StateSize):
                size = message
                continue
            samples.append(message)
            turn = f"round {message.round} of {scenario.rounds}: {message.measure} {message.contender}"
            status.update(f"{scenario.name}, {turn} {max(message.values['seconds']):.2f} s")
    packages = [package for name in job.able if (package := job.registry[name].package)]
    return measured(
        msgspec.structs.replace(scenario, state=size),
        samples,
        options,
        contenders=tuple(kind.about() for kind in job.registry.values()),
        not_possible=job.absent,
        packages={package: version(package) for package in packages},
    )


def run(job: Job, site: Site) -> Iterator[StateSize | Sample]:
    """Run `job`: yields the size of its state and every sample, the warm-up's too, as they come. BenchError when a rank
    raises or dies; no process outlives the call."""
    rounds = range(WARM_UP, job.scenario.rounds + 1)
    for life in [range(number, number + 1) for number in rounds] if job.turns.mortal else [rounds]:
        yield from messages(run_rank, job, site, life, world=job.scenario.world)


def messages(target: Callable[..., None], *arguments: Any, world: int) -> Iterator[Any]:
    """Yield what the ranks of a new group send. They run `target` with `arguments` and a queue to send by, until all
    have ended or sent None, which is not yielded; then they are killed. BenchError when one raises or dies before."""
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    # Here, where the kernel can choose the port before any rank starts.
    store = dist.TCPStore(HOST, 0, world, is_master=True, wait_for_workers=False)
    ranks = start_processes(  # type: ignore[no-untyped-call]
        as_rank, (world, store.port, target, *arguments, queue), world, join=False
    )
    num_done, ended = 0, False
    try:
        while num_done < world and not ended:
            ended = ranks.join(_LOOK_S)
            while not queue.empty():
                message = queue.get()
                num_done += message is None
                if message is not None:
                    yield message
    except ProcessException as error:
        raise BenchError(f"A rank failed: {error}") from error
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def as_rank(rank: int, world: int, store_port: int, target: Callable[..., None], *arguments: Any) -> None:
    """Run `target` as `rank`, as under torchrun on one node."""
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    # Processes that ranks start make groups of their own.
    os.environ.update({name: str(value) for name, value in about.items()}, MASTER_ADDR=HOST)
    torch.set_num_threads(TORCH_THREADS)
    store = dist.TCPStore(HOST, store_port, world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    target(*arguments)
    dist.destroy_process_group()


def run_rank(job: Job, site: Site, rounds: range, queue: Any) -> None:
    """Do `rounds` of `job`. Rank 0 sends the state's size and every sample."""
    turns = job.turns(job, site)
    if turns.leads:
        queue.put(site.state.size())
    for number in rounds:
        for measure in turns.measures:
            for turn, name in enumerate(rotated(turns.entrants, number)):
                for what, found in turns.take(name, number, measure):
                    every = [found] * job.scenario.world
                    dist.gather_object(found, every if turns.leads else None)
                    if turns.leads:
                        values = {key: tuple(each[key] for each in every) for key in found}
                        queue.put(Sample(name, number, values, what, turn))
    if turns.mortal:
        queue.put(None)
        signal.pause()
    for way in turns.ways.values():
        way.close()


def require_same(expected: Mapping[str, str], found: Mapping[str, str], *, name: str) -> None:
    """BenchError when the digests that contender `name` loaded differ from those that it saved."""
    if wrong := [path for path in expected if found.get(path) != expected[path]]:
        raise BenchError(
            f"{name} loaded other bytes than it saved: "
            f"{len(wrong)} of {len(expected)} parts differ, the first is {wrong[0]}."
        )


def in_ranks(world: int, call: Callable[..., R], *arguments: Any) -> R:
    """Return what `call` returns on rank 0 of so many new processes, in which nothing is warm."""
    found: R
    (found,) = messages(send_result, call, arguments, world=world)
    return found


def send_result(call: Callable[..., object], arguments: tuple[object, ...], queue: Any) -> None:
    found = call(*arguments)
    if dist.get_rank() == 0:
        queue.put(found)


def in_turns(scenario: Scenario, takes: Mapping[str, Callable[[], Mapping[str, float]]], options: Options) -> Part:
    """A part with a sample of each of `takes` in each round, which begins with another one each time."""
    samples = [
        Sample(name, number, {key: (value,) for key, value in takes[name]().items()}, turn=turn)
        for number in range(WARM_UP, scenario.rounds + 1)
        for turn, name in enumerate(rotated(tuple(takes), number))
    ]
    return measured(scenario, samples, options, contenders=tuple(map(Contender, takes)))


@contextmanager
def grown_run(state: Mapping[str, Any], length: int, options: Options) -> Iterator[Callable[[], Path]]:
    """Yield a function that makes a copy, on the device, of a run that has so many checkpoints of `state`."""
    with scratch(options.memory) as memory, scratch(options.folder) as folder:
        for step in range(1, length + 1):
            holdfast.save(memory / "run", state, step)  # no save waits for a disk there

        def copy() -> Path:
            root = shutil.copytree(memory / "run", folder / "run")
            os.sync()  # else the first fsync has to wait for all that was written
            return root

        yield copy


def timed(call: Callable[[], object], key: str = "seconds") -> dict[str, float]:
    """Seconds of `call`, without those of freeing its result."""
    start_s = time.perf_counter()
    found = call()
    seconds = time.perf_counter() - start_s
    del found
    return {key: seconds}


def command(*words: str | Path) -> dict[str, float]:
    """Seconds and processor seconds of a command of holdfast, its start included."""
    before = os.times()
    line = (sys.executable, "-m", "holdfast.cli", *words)
    found = timed(lambda: subprocess.run(line, check=True, capture_output=True))
    return found | {"cpu_s": sum(os.times()[2:4]) - sum(before[2:4])}  # of children, user and system
