"""The runner of all benchmarks with ranks: processes that stay warm, take turns and send samples."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.errors import BenchError, RankFailedError, SetupError, WrongBytesError
from bench.schema import WARM_UP, Sample, StateSize
from bench.state import Recipe, State
from bench.statistics import rotated

#: What torchrun gives each of several ranks of a node.
TORCH_THREADS = 1
HOST = "127.0.0.1"
_EXIT_TIMEOUT_S = 10.0

J = TypeVar("J")


class Span(NamedTuple):
    """The begin and the end of something on one rank, by the machine-wide monotonic clock."""

    start_s: float
    end_s: float


#: What one rank found: spans become seconds from the first rank's start to the last rank's end.
Found = Mapping[str, float | Span]


class Turns:
    """The turns of one rank of a run. All methods are collective."""

    #: In each round, every entrant takes one turn for each of these.
    measures: tuple[str, ...] = ("",)

    def entrants(self, number: int) -> tuple[str, ...]:
        """The entrants that take a turn in round `number`."""
        raise NotImplementedError

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, str, Found]]:
        """Take a turn of `name`; of all that is measured in it, the contender, the measure and what was found."""
        raise NotImplementedError

    def begin_round(self, number: int) -> None:
        """Prepare round `number`."""

    def end_round(self, number: int) -> None:
        """Remove what round `number` leaves behind."""

    def close(self) -> None:
        """Let go of everything."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The job of a run's ranks: they use the state that `recipe` makes, `folder`, and a store that outlives them."""

    world: int
    rounds: int
    recipe: Recipe
    folder: Path = Path()
    store_port: int = 0

    def turns(self, state: State) -> Turns:
        """The turns that this rank takes with its part of the state."""
        raise NotImplementedError

    def num_samples(self) -> int:
        """The number of samples that the job will give."""
        raise NotImplementedError


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder below `folder` that ends with the block."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as path:
        yield Path(path)


def require_room(what: str, nbytes: int, *, free: int) -> None:
    """SetupError where there is less `free` than a run needs."""
    if free < nbytes:
        raise SetupError(
            f"{nbytes / 1e9:.1f} GB {what} are needed, {free / 1e9:.1f} GB are free. "
            "Ask for a smaller state, or for another folder."
        )


def new_store(world: int) -> dist.TCPStore:
    """A store for `world` ranks: here, where the kernel can choose the port before any rank starts."""
    return dist.TCPStore(HOST, 0, world, is_master=True, wait_for_workers=False)


def run(job: Job, folder: Path, *, on_sample: Callable[[Sample], None]) -> tuple[StateSize, tuple[Sample, ...]]:
    """Run `job` in `folder`: the size of its state and all samples, the warm-up's too. `on_sample` sees each one as it
    comes. RankFailedError when a rank raises or dies; no process outlives the call."""
    if job.rounds < 1 or job.world < 1:
        raise SetupError("A run needs at least one round and one rank.")
    store = new_store(job.world)
    job = msgspec.structs.replace(job, folder=folder, store_port=store.port)
    with started(run_rank, job, world=job.world) as ranks:
        return collect(ranks, on_sample=on_sample)


@contextmanager
def started(
    target: Callable[[int, J, Connection], None], job: J, *, world: int
) -> Iterator[dict[Connection, SpawnProcess]]:
    """Processes that run `target` with their rank, `job` and the channel they send on, by that channel; kills all of
    them at the end."""
    context = multiprocessing.get_context("spawn")
    ranks: dict[Connection, SpawnProcess] = {}
    try:
        for rank in range(world):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=target, args=(rank, job, sender), name=f"bench-rank-{rank}")
            process.start()
            # With the parent's copy closed, the death of a rank reads as the end of its channel.
            sender.close()
            ranks[receiver] = process
        yield ranks
    finally:
        for receiver, process in ranks.items():
            process.kill()
            process.join()
            receiver.close()


def collect(
    ranks: dict[Connection, SpawnProcess], *, on_sample: Callable[[Sample], None]
) -> tuple[StateSize, tuple[Sample, ...]]:
    """Receive until every rank has closed its channel."""
    sizes: list[StateSize] = []
    samples: list[Sample] = []
    for message in messages(ranks):
        if isinstance(message, StateSize):
            sizes.append(message)
        elif isinstance(message, Sample):
            samples.append(message)
            on_sample(message)
    (size,) = sizes
    return size, tuple(samples)


def messages(ranks: dict[Connection, SpawnProcess]) -> Iterator[object]:
    """The messages of the ranks, until every rank has closed its channel. RankFailedError when one fails, or dies."""
    channels = dict(ranks)
    while channels:
        for channel in wait(list(channels)):
            assert isinstance(channel, Connection)
            try:
                message = channel.recv()
            except EOFError:
                process = channels.pop(channel)
                channel.close()
                process.join(_EXIT_TIMEOUT_S)
                if process.exitcode != 0:
                    raise RankFailedError(
                        f"{process.name} ended with status {process.exitcode} and no report."
                    ) from None
                continue
            if isinstance(message, Failure):
                raise RankFailedError(f"{channels[channel].name} failed: {message.text}")
            yield message


class Failure(msgspec.Struct, frozen=True):
    """The error that ended a rank."""

    text: str


def run_rank(rank: int, job: Job, channel: Connection) -> None:
    """Do `job` as `rank`. Rank 0 sends the state's size and every sample; any rank sends what ended it.

    In each round every entrant takes its turn, beginning with another one each round.
    """
    with joined(rank, channel, world=job.world, store_port=job.store_port):
        state = job.recipe.build(init_device_mesh("cpu", job.recipe.mesh_shape(job.world)))
        turns = job.turns(state)
        if rank == 0:
            channel.send(state.size())
        for number in range(WARM_UP, job.rounds + 1):
            turns.begin_round(number)
            for measure in turns.measures:
                for turn, name in enumerate(rotated(turns.entrants(number), number)):
                    for contender, what, found in turns.take(name, number, measure):
                        every = _gathered(found, job.world)
                        if every is not None:
                            channel.send(Sample(contender, number, together(every), what, turn))
            turns.end_round(number)
        turns.close()


@contextmanager
def joined(rank: int, channel: Connection, *, world: int, store_port: int) -> Iterator[None]:
    """Be `rank` for the time of a ``with`` block, as under torchrun on one node, and send what ended it, if it did."""
    try:
        for name in ("RANK", "LOCAL_RANK"):
            os.environ[name] = str(rank)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            os.environ[name] = str(world)
        # Processes that ranks start make groups of their own.
        os.environ["MASTER_ADDR"] = HOST
        torch.set_num_threads(TORCH_THREADS)
        store = dist.TCPStore(HOST, store_port, world, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        yield
        dist.destroy_process_group()
    except BaseException as error:  # DCP's own exception is no Exception
        text = str(error) if isinstance(error, BenchError) else traceback.format_exc()
        channel.send(Failure(text=text))
        raise SystemExit(1) from error


def together(found: Sequence[Found]) -> dict[str, tuple[float, ...]]:
    """The values of a sample, of what each rank found."""
    values: dict[str, tuple[float, ...]] = {}
    for key in found[0]:
        every = [each[key] for each in found]
        spans = [each for each in every if isinstance(each, Span)]
        numbers = tuple(each for each in every if not isinstance(each, Span))
        values[key] = (seconds_of(spans),) if spans else numbers
    return values


def seconds_of(spans: Sequence[Span]) -> float:
    """From the first rank's start to the last rank's end."""
    return max(span.end_s for span in spans) - min(span.start_s for span in spans)


def require_same(expected: Mapping[str, str], found: Mapping[str, str], *, name: str) -> None:
    """WrongBytesError when what contender `name` loaded (`found`) differs from what it saved."""
    wrong = [path for path in expected if found.get(path) != expected[path]]
    if wrong:
        raise WrongBytesError(
            f"{name} loaded other bytes than it saved: "
            f"{len(wrong)} of {len(expected)} parts differ, the first is {wrong[0]}."
        )


def _gathered(found: Found, world: int) -> list[Found] | None:
    """Gather the findings of all ranks on rank 0."""
    every: list[Found] | None = [found] * world if dist.get_rank() == 0 else None
    dist.gather_object(found, every)
    return every
