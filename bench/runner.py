"""The runner of all benchmarks: contenders take turns, in one process or in ranks that stay warm and send samples."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

import msgspec
import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from torch.multiprocessing.spawn import ProcessException, start_processes

from bench.benchmark import Options
from bench.contenders import SAVING, Registry
from bench.costs import cpu_s, keepers, node_memory, read_nbytes, settle, tree
from bench.environment import package_versions
from bench.errors import RankFailedError, SetupError, WrongBytesError
from bench.raw import RAW_WAYS, takes_direct
from bench.schema import RAW, WARM_UP, Part, Sample, Scenario, StateSize, measured, rotated
from bench.state import Recipe, State
from bench.ways import GENERATIONS, HoldfastBackground, Site, Way

#: What torchrun gives each of several ranks of a node.
TORCH_THREADS = 1
HOST = "127.0.0.1"
#: How often messages are looked for.
_LOOK_S = 0.1
#: States are somewhat larger than asked for.
_HEADROOM = 1.15
#: States in memory at once, at most: the live one, snapshots, and what peers have of it; and all else.
_COPIES, _OTHER_NBYTES = 6, 2 << 30

P = ParamSpec("P")
R = TypeVar("R")


class Span(NamedTuple):
    """When something began and ended on one rank, by the machine-wide monotonic clock."""

    start_s: float
    end_s: float


#: What one rank found: spans become seconds from the first rank's start to the last rank's end; of several tries, those
#: of the best one.
Found = Mapping[str, float | Span | list[Span]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What ranks do together in a scenario, on what `recipe` makes: `turns`, of `contenders`. On the device there are
    `copies` of the state at once, at most. The rest is where, for the ranks alone: a store at `store_port` outlives
    them."""

    scenario: Scenario
    turns: type[Turns]
    recipe: Recipe
    contenders: tuple[str, ...]
    copies: int
    in_memory: bool = False
    folder: Path = Path()
    node_dir: Path | None = None
    direct: bool = False
    store_port: int = 0


class Turns:
    """What one rank of a job does. All methods are collective."""

    #: In each round, every entrant takes one turn for each of these.
    measures: tuple[str, ...] = ("",)
    registry: ClassVar[Registry] = SAVING
    #: The ranks of each round are new ones, which are killed at its end.
    mortal = False

    def __init__(self, job: Job, state: State) -> None:
        self.job = job
        self.state = state
        self.leads = dist.get_rank() == 0
        self.site = Site(state, job.folder, job.node_dir, direct=job.direct)
        self.ways: dict[str, Way] = {}

    def entrants(self, number: int) -> tuple[str, ...]:
        """Who takes a turn in round `number`: the raw limit in each of its ways, then the others."""
        raw = [f"{RAW} {way}" for way in RAW_WAYS if RAW in self.job.contenders]
        return (*raw, *(name for name in self.job.contenders if name != RAW))

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, str, Found]]:
        """Take a turn of `name`; of all that is measured in it, the contender, the measure and what was found."""
        raise NotImplementedError

    def way(self, name: str) -> Way:
        """What entrant `name` does."""
        if name not in self.ways:
            self.ways[name] = self.registry[RAW if name.startswith(RAW) else name](self.site, name)
        return self.ways[name]

    def cold(self, folder: Path) -> Path:
        """`folder`, made where it is not there, beside caches that are cold; when all ranks are here."""
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

    def observed(self, name: str, work: Callable[[], object]) -> dict[str, Any]:
        """What `work` takes, which is of entrant `name`. All ranks are here before and after, so that what others still
        do for it counts, and what they do next does not."""
        used_s, read = self._cpu_s(name), read_nbytes()
        start_s = time.monotonic()
        work()
        span = Span(start_s, time.monotonic())
        device_nbytes, asked_nbytes = (now - before for now, before in zip(read_nbytes(), read, strict=True))
        used_s = self._cpu_s(name) - used_s
        return {"seconds": span, "cpu_s": used_s, "device_nbytes": device_nbytes, "asked_nbytes": asked_nbytes}

    def _cpu_s(self, name: str) -> float:
        """CPU seconds so far of this rank and all that it started, and on rank 0 of holdfast's keeper."""
        dist.barrier()
        used_s = cpu_s(tree(os.getpid()))
        if self.leads and self.job.node_dir and isinstance(self.way(name), HoldfastBackground):
            used_s += cpu_s(keepers(self.job.node_dir))
        dist.barrier()
        return used_s


def measure(job: Job, options: Options, *, first: Job | None = None, absent: Mapping[str, str] | None = None) -> Part:
    """Run `job`, after `first` in the same folder. SetupError where there is no room for it. `absent` are contenders
    that cannot take part, and why."""
    scenario, nbytes, absent = job.scenario, _HEADROOM * job.recipe.min_nbytes, absent or {}
    require_room(f"in {options.folder}", job.copies * nbytes, free=shutil.disk_usage(options.folder).free)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch(options.folder))
        where: dict[str, Any] = {"folder": folder, "direct": takes_direct(folder)}
        if job.in_memory:
            require_room(f"in {options.memory}", GENERATIONS * nbytes, free=shutil.disk_usage(options.memory).free)
            require_room("of memory", _COPIES * nbytes + _OTHER_NBYTES, free=psutil.virtual_memory().available)
            where["node_dir"] = stack.enter_context(node_memory(options.memory))
        status = stack.enter_context(Console(stderr=True).status(f"{scenario.name}: starting the ranks"))

        def tell(sample: Sample) -> None:
            turn = f"round {sample.round} of {scenario.rounds}: {sample.measure} {sample.contender}"
            status.update(f"{scenario.name}, {turn} {max(sample.values['seconds']):.2f} s")

        if first is not None:
            run(replace(first, **where), on_sample=tell)
        size, samples = run(replace(job, **where), on_sample=tell)
    kinds = [kind for name, kind in job.turns.registry.items() if name in job.contenders or name in absent]
    refused = {} if where["direct"] else {RAW: {"io": "buffered: the filesystem refused O_DIRECT"}}
    return measured(
        msgspec.structs.replace(scenario, state=size),
        samples,
        options.folder,
        contenders=tuple(msgspec.structs.replace(kind.about(), **refused.get(kind.name, {})) for kind in kinds),
        not_possible=absent,
        raw_ways=tuple(way for way in RAW_WAYS if f"{RAW} {way}" in {sample.contender for sample in samples}),
        packages=package_versions(kind.package for kind in kinds if kind.package),
    )


def run(job: Job, *, on_sample: Callable[[Sample], None]) -> tuple[StateSize, tuple[Sample, ...]]:
    """Run `job` in its folder: the size of its state and all samples, the warm-up's too. `on_sample` sees each one as
    it comes. RankFailedError when a rank raises or dies; no process outlives the call."""
    size, samples, world = StateSize(), list[Sample](), job.scenario.world
    rounds = range(WARM_UP, job.scenario.rounds + 1)
    for life in [range(number, number + 1) for number in rounds] if job.turns.mortal else [rounds]:
        # Here, where the kernel can choose the port before any rank starts.
        store = dist.TCPStore(HOST, 0, world, is_master=True, wait_for_workers=False)
        for message in messages(run_rank, replace(job, store_port=store.port), life, world=world):
            if isinstance(message, StateSize):
                size = message
            else:
                samples.append(message)
                on_sample(message)
    return size, tuple(samples)


def messages(target: Callable[..., None], *arguments: Any, world: int) -> Iterator[Any]:
    """What processes send that run `target` with their rank, `arguments`, and a queue to send by, until all have ended
    or sent None, which is not yielded; then they are killed. RankFailedError when one raises or dies before."""
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    ranks = start_processes(target, (*arguments, queue), world, join=False)  # type: ignore[no-untyped-call]
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
        raise RankFailedError(f"A rank failed: {error}") from error
    finally:
        for process in ranks.processes:
            process.kill()
            process.join()


def run_rank(rank: int, job: Job, rounds: range, queue: Any) -> None:
    """Do `rounds` of `job` as `rank`, as under torchrun on one node. Rank 0 sends the state's size and every sample.

    In each round every entrant takes its turn, beginning with another one each round.
    """
    world = job.scenario.world
    about = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    # Processes that ranks start make groups of their own.
    os.environ.update({name: str(value) for name, value in about.items()}, MASTER_ADDR=HOST)
    torch.set_num_threads(TORCH_THREADS)
    store = dist.TCPStore(HOST, job.store_port, world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    state = job.recipe.build(world)
    turns = job.turns(job, state)
    if rank == 0:
        queue.put(state.size())
    for number in rounds:
        for measure in turns.measures:
            for turn, name in enumerate(rotated(turns.entrants(number), number)):
                for contender, what, found in turns.take(name, number, measure):
                    every: list[Found] | None = [found] * world if rank == 0 else None
                    dist.gather_object(found, every)
                    if every is not None:
                        queue.put(Sample(contender, number, together(every), what, turn))
    if turns.mortal:
        queue.put(None)
        signal.pause()
    for way in turns.ways.values():
        way.close()
    dist.destroy_process_group()


def together(found: Sequence[Found]) -> dict[str, tuple[float, ...]]:
    """The values of a sample, of what each rank found."""
    values: dict[str, tuple[float, ...]] = {}
    for key in found[0]:
        every = [each[key] for each in found]
        if isinstance(every[0], float | int):
            values[key] = tuple(every)  # type: ignore[arg-type]  # so are the others
        else:
            tries = zip(*(each if isinstance(each, list) else [each] for each in every), strict=True)
            seconds = (max(span.end_s for span in spans) - min(span.start_s for span in spans) for spans in tries)
            values[key] = (min(seconds),)
    return values


def require_same(expected: Mapping[str, str], found: Mapping[str, str], *, name: str) -> None:
    """WrongBytesError when what contender `name` loaded (`found`) differs from what it saved."""
    wrong = [path for path in expected if found.get(path) != expected[path]]
    if wrong:
        raise WrongBytesError(
            f"{name} loaded other bytes than it saved: "
            f"{len(wrong)} of {len(expected)} parts differ, the first is {wrong[0]}."
        )


def require_room(what: str, nbytes: float, *, free: int) -> None:
    if free < nbytes:
        raise SetupError(
            f"{nbytes / 1e9:.1f} GB {what} are needed, {free / 1e9:.1f} GB are free. "
            "Ask for a smaller state, or for another folder."
        )


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as path:
        yield Path(path)


def in_a_process(call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """`call` in a new process, in which nothing is warm, and whose peak of memory is its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *args, **kwargs).result()


def in_turns(rounds: range, takes: Mapping[str, Callable[[], Mapping[str, float]]]) -> tuple[Sample, ...]:
    """A sample of each of `takes` in each of `rounds`, which begins with another one each time."""
    return tuple(
        Sample(name, number, {key: (value,) for key, value in takes[name]().items()}, turn=turn)
        for number in rounds
        for turn, name in enumerate(rotated(tuple(takes), number))
    )


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
