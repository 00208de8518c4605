"""Restores from the memory of the node after the death of all ranks, for ``bench engine``.

In each round, ranks that have saved are killed with SIGKILL, and new ones take their place. When those have everything
but the state, the restore is timed; then a copy of as many bytes, and a load from storage. They change the state, save,
and are killed in their turn.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import holdfast
from bench.caches import settle
from bench.engine_contenders import GENERATIONS
from bench.engine_results import RestoreSample
from bench.errors import BenchError, RankFailedError
from bench.harness import messages, started
from bench.live import Live
from bench.rank import HOST, joined, require_same
from bench.results import StateSize
from bench.state import LlamaLike, State
from holdfast.format.container import BLOCK_NBYTES
from holdfast.io.digest import digest_blocks
from holdfast.run.history import Run
from holdfast.store.base import Bytes, Location
from holdfast.store.urls import open_store

#: A copy is tried so often in a round; the best one counts.
_COPIES = 3
_COMMIT_TIMEOUT_S = 120.0

#: Start and end by the machine-wide monotonic clock.
Times = tuple[float, float]


class RestoreJob(msgspec.Struct, frozen=True):
    """What the ranks of one life do: restore step `number` - 1, unless there is none yet, and save step `number`, until
    it is staged or until it is durable. `folder` is on the device, `node_dir` in memory."""

    world: int
    number: int
    durable: bool
    recipe: LlamaLike
    folder: Path
    node_dir: Path
    store_port: int


class _Restored(msgspec.Struct, frozen=True):
    """One rank's view of one round: times, and what it found in the state after each way to fill it."""

    rank: int
    restore: Times
    copies: tuple[Times, ...]
    moves: tuple[Times, ...]
    moves_cpu_s: tuple[float, ...]
    load: Times
    restored: Mapping[str, str]
    loaded: Mapping[str, str]


class _Saved(msgspec.Struct, frozen=True):
    """What a rank has saved."""

    rank: int
    digests: Mapping[str, str]
    size: StateSize


def run_restores(
    world: int,
    rounds: int,
    recipe: LlamaLike,
    folder: Path,
    node_dir: Path,
    *,
    on_sample: Callable[[RestoreSample], None],
) -> tuple[StateSize, tuple[RestoreSample, ...]]:
    """Take all rounds. `on_sample` sees each sample as it comes. WrongBytesError when a state is not what was saved."""
    samples: list[RestoreSample] = []
    saved: dict[int, _Saved] = {}
    for number in range(rounds + 1):
        # Kept here, where it outlives the ranks.
        store = dist.TCPStore(HOST, 0, world, is_master=True, wait_for_workers=False)
        job = RestoreJob(world, number, number % 2 == 0, recipe, folder, node_dir, store.port)
        restored, now_saved = _one_life(job)
        if number:
            for rank, found in restored.items():
                for ways, digests in (("restore", found.restored), ("load", found.loaded)):
                    require_same(saved[rank].digests, digests, name=f"holdfast ({ways}, rank {rank})")
            sample = _sample(number, durable=(number - 1) % 2 == 0, restored=tuple(restored.values()))
            samples.append(sample)
            on_sample(sample)
        saved = now_saved
    return saved[0].size, tuple(samples)


def run_rank(rank: int, job: RestoreJob, channel: Connection) -> None:
    """Live one life as `rank`, to be killed at its end."""
    with joined(rank, channel, world=job.world, store_port=job.store_port):
        state = job.recipe.build(init_device_mesh("cpu", (job.world,)))
        live = Live(state)
        memory = holdfast.Memory(generations=GENERATIONS, node_dir=job.node_dir)
        checkpointer = holdfast.Checkpointer(job.folder, live.objects, memory=memory)
        if job.number:
            channel.send(_restored(job, state, live, checkpointer))
        _change(state)
        handle = checkpointer.save(job.number)
        handle.staged.wait()
        if job.durable:
            handle.durable.wait()
        channel.send(_Saved(rank, state.digests(), state.size()))
        signal.pause()


def _one_life(job: RestoreJob) -> tuple[dict[int, _Restored], dict[int, _Saved]]:
    """What the ranks found and what they saved; they are dead on return."""
    restored: dict[int, _Restored] = {}
    saved: dict[int, _Saved] = {}
    with started(run_rank, job, world=job.world) as ranks:
        for message in messages(ranks):
            if isinstance(message, _Restored):
                restored[message.rank] = message
            elif isinstance(message, _Saved):
                saved[message.rank] = message
            if len(saved) == job.world:
                return restored, saved
    raise RankFailedError("The ranks ended before they were killed.")


def _restored(job: RestoreJob, state: State, live: Live, checkpointer: holdfast.Checkpointer) -> _Restored:
    leads = dist.get_rank() == 0
    _await_commit(job)  # what a keeper still does would take its time from the restore
    state.clear()
    dist.barrier()
    start_s = time.monotonic()
    report = checkpointer.restore()
    restore = (start_s, time.monotonic())
    if (report.tier, report.step) != ("node memory", job.number - 1):
        raise BenchError(f"Step {report.step} was restored from {report.tier}, not {job.number - 1} from node memory.")
    restored = state.digests()
    copies = _copies(sum(tensor.nbytes for tensor in state.tensors().values()))
    moves, moves_cpu_s = _moves(list(state.tensors().values()))
    state.clear()
    if leads:
        settle(job.folder)
    dist.barrier()
    start_s = time.monotonic()
    holdfast.load(job.folder, into=live.objects)
    load = (start_s, time.monotonic())
    return _Restored(dist.get_rank(), restore, copies, moves, moves_cpu_s, load, restored, state.digests())


def _await_commit(job: RestoreJob) -> None:
    """Return when the last save is in the history of the run."""
    run = Run.open(open_store(Location(str(job.folder))))
    end_s = time.monotonic() + _COMMIT_TIMEOUT_S
    while (head := run.head()) is None or head.step != job.number - 1:
        if time.monotonic() > end_s:
            raise BenchError(f"Step {job.number - 1} was not committed within {_COMMIT_TIMEOUT_S:.0f} s.")
        time.sleep(0.05)


def _copies(nbytes: int) -> tuple[Times, ...]:
    """Times of copies of `nbytes` from touched memory to other touched memory, by all ranks at once."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    taken = []
    for _ in range(_COPIES):
        dist.barrier()
        start_s = time.monotonic()
        np.copyto(target, source)
        taken.append((start_s, time.monotonic()))
    return tuple(taken)


def _moves(sources: Sequence[torch.Tensor]) -> tuple[tuple[Times, ...], tuple[float, ...]]:
    """Times, and CPU seconds, of a copy of each of `sources` to touched memory, with the digests of what was copied
    while the processor still has it."""
    groups: list[tuple[list[torch.Tensor], list[torch.Tensor], Bytes]] = []
    group: list[torch.Tensor] = []
    for number, source in enumerate(sources, 1):
        group.append(source)
        nbytes = sum(each.nbytes for each in group)
        if nbytes >= BLOCK_NBYTES or number == len(sources):
            memory = torch.ones(nbytes, dtype=torch.uint8)
            parts = torch.split(memory, [each.nbytes for each in group])
            targets = [part.view(each.dtype).view(each.shape) for part, each in zip(parts, group, strict=True)]
            groups.append((targets, group, memory.numpy()))
            group = []
    taken, cpu_s = [], []
    for _ in range(_COPIES):
        dist.barrier()
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        for targets, moved, data in groups:
            torch._foreach_copy_(targets, moved)
            digest_blocks(data)
        taken.append((start_s, time.monotonic()))
        cpu_s.append(time.process_time() - start_cpu_s)
    return tuple(taken), tuple(cpu_s)


def _change(state: State) -> None:
    """Make every tensor another one."""
    with torch.no_grad():
        for tensor in state.tensors().values():
            tensor.add_(1)


def _sample(number: int, *, durable: bool, restored: Sequence[_Restored]) -> RestoreSample:
    return RestoreSample(
        round=number,
        durable=durable,
        restore_s=_seconds([each.restore for each in restored]),
        memcpy_s=min(_seconds([each.copies[index] for each in restored]) for index in range(_COPIES)),
        moved_s=min(_seconds([each.moves[index] for each in restored]) for index in range(_COPIES)),
        moved_cpu_s=min(sum(each.moves_cpu_s[index] for each in restored) for index in range(_COPIES)),
        load_s=_seconds([each.load for each in restored]),
    )


def _seconds(times: Sequence[Times]) -> float:
    """From the first rank's start to the last rank's end."""
    return max(end_s for _, end_s in times) - min(start_s for start_s, _ in times)
