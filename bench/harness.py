"""Process management of a run: start the ranks, collect what they send, end them together."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import TypeVar

import msgspec
import torch.distributed as dist

from bench.contenders import LATER, entrants
from bench.errors import RankFailedError, SetupError
from bench.order import Order
from bench.rank import HOST, Failure, Job, run_rank
from bench.raw import takes_direct
from bench.results import Sample, StateSize

J = TypeVar("J")

_EXIT_TIMEOUT_S = 10.0
_DISK_HEADROOM = 1.1


class Outcome(msgspec.Struct, frozen=True):
    """What a run measured, the warm-up too."""

    state: StateSize
    samples: tuple[Sample, ...]
    direct: bool


def run(order: Order, folder: Path, *, on_turn: Callable[[Sample], None]) -> Outcome:
    """Run `order` in a temporary folder below `folder`, and wait for it. `on_turn` sees each turn as it ends.

    SetupError when it cannot start, RankFailedError when a rank raises or dies; no process outlives the call.
    """
    if order.rounds < 1 or order.world < 1:
        raise SetupError("A run needs at least one round and one rank.")
    require_space(order, folder)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as scratch:
        return run_in(order, Path(scratch), on_turn=on_turn)


def run_in(order: Order, scratch: Path, *, on_turn: Callable[[Sample], None]) -> Outcome:
    """`run` right in the folder `scratch`, where what is kept stays."""
    direct = takes_direct(scratch)
    # Kept here, where the kernel can choose the port before any rank starts.
    store = dist.TCPStore(HOST, 0, order.world, is_master=True, wait_for_workers=False)
    job = Job(order=order, folder=scratch, direct=direct, store_port=store.port)
    with started(run_rank, job, world=order.world) as ranks:
        return collect(ranks, direct=direct, on_turn=on_turn)


def require_space(order: Order, folder: Path, *, num_more: int = 0) -> None:
    """Refuse a run whose last round does not fit: before its loads, every entrant's files exist at once, and those of
    all rounds where they go into one run. `num_more` copies of the state are to fit as well."""
    num_copies = len(entrants(order.contenders)) + (order.rounds if LATER in order.contenders else 0) + num_more
    needed = int(_DISK_HEADROOM * order.recipe.nbytes(order.world) * num_copies)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise SetupError(
            f"A round needs {needed / 1e9:.1f} GB in {folder}, {free / 1e9:.1f} GB are free. "
            "Ask for a smaller state or pass --dir for another disk."
        )


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


def collect(ranks: dict[Connection, SpawnProcess], *, direct: bool, on_turn: Callable[[Sample], None]) -> Outcome:
    """Receive until every rank has closed its channel."""
    sizes: list[StateSize] = []
    samples: list[Sample] = []
    for message in messages(ranks):
        if isinstance(message, StateSize):
            sizes.append(message)
        elif isinstance(message, Sample):
            samples.append(message)
            on_turn(message)
    (size,) = sizes
    return Outcome(state=size, samples=tuple(samples), direct=direct)


def messages(ranks: dict[Connection, SpawnProcess]) -> Iterator[object]:
    """What the ranks send, until every rank has closed its channel. RankFailedError when one fails, or dies."""
    channels = dict(ranks)
    while channels:
        for channel in wait(list(channels)):
            assert isinstance(channel, Connection)
            try:
                message = channel.recv()
            except EOFError:
                _require_success(channels.pop(channel))
                channel.close()
                continue
            if isinstance(message, Failure):
                raise RankFailedError(f"{channels[channel].name} failed: {message.text}")
            yield message


def _require_success(process: SpawnProcess) -> None:
    """RankFailedError unless `process`, whose channel has ended, ends well."""
    process.join(_EXIT_TIMEOUT_S)
    if process.exitcode != 0:
        raise RankFailedError(f"{process.name} ended with status {process.exitcode} and no report.")
