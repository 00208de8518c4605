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
from bench.engine_contenders import GENERATIONS, OURS
from bench.engine_job import EngineJob
from bench.errors import BenchError, RankFailedError
from bench.live import Live
from bench.runner import Span, joined, messages, new_store, require_same, seconds_of, started
from bench.schema import Sample, StateSize
from bench.state import State
from holdfast.format.container import BLOCK_NBYTES
from holdfast.io.digest import digest_blocks
from holdfast.run.history import Run
from holdfast.store.base import Bytes, Location
from holdfast.store.urls import open_store

#: A copy is tried so often in a round; the best one counts.
_COPIES = 3
_COMMIT_TIMEOUT_S = 120.0


class Restores(EngineJob, frozen=True, kw_only=True):
    """Restores from the memory of the node, after SIGKILL of all ranks.

    A sample has the seconds of a restore, of a copy of as many bytes, of a copy of each tensor with the digests of its
    bytes and nothing else (``moved_cpu_s``: the CPU seconds of all ranks for it), and of a load from storage. Its
    measure is whether the save was staged or durable when the ranks died.

    In each life the ranks restore step `number` - 1, unless there is none yet, and save step `number`.
    """

    number: int = 0

    @property
    def durable(self) -> bool:
        """Whether the ranks of this life are killed when their save is durable, or when it is staged."""
        return self.number % 2 == 0

    def num_saves(self) -> int:
        """All of them."""
        return self.rounds + 1

    def num_samples(self) -> int:
        """One for each round."""
        return self.rounds

    def measure(self, folder: Path, *, on_sample: Callable[[Sample], None]) -> tuple[StateSize, tuple[Sample, ...]]:
        """Take all rounds. WrongBytesError when a state is not what was saved."""
        samples: list[Sample] = []
        saved: dict[int, _Saved] = {}
        for number in range(self.rounds + 1):
            # Kept here, where it outlives the ranks.
            store = new_store(self.world)
            job = msgspec.structs.replace(self, number=number, folder=folder / "run", store_port=store.port)
            restored, now_saved = _one_life(job)
            if number:
                for rank, found in restored.items():
                    for ways, digests in (("restore", found.restored), ("load", found.loaded)):
                        require_same(saved[rank].digests, digests, name=f"holdfast ({ways}, rank {rank})")
                measure = "durable" if (number - 1) % 2 == 0 else "staged"
                values = {key: (figure,) for key, figure in _figures(tuple(restored.values())).items()}
                samples.append(Sample(OURS, number, values, measure))
                on_sample(samples[-1])
            saved = now_saved
        return saved[0].size, tuple(samples)


class _Restored(msgspec.Struct, frozen=True):
    """One rank's view of one round: times, and what it found in the state after each way to fill it."""

    rank: int
    restore: Span
    copies: tuple[Span, ...]
    moves: tuple[Span, ...]
    moves_cpu_s: tuple[float, ...]
    load: Span
    restored: Mapping[str, str]
    loaded: Mapping[str, str]


class _Saved(msgspec.Struct, frozen=True):
    """The saves of a rank."""

    rank: int
    digests: Mapping[str, str]
    size: StateSize


def run_rank(rank: int, job: Restores, channel: Connection) -> None:
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


def _one_life(job: Restores) -> tuple[dict[int, _Restored], dict[int, _Saved]]:
    """Run the ranks once, and return their restores and saves; the ranks are dead on return."""
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


def _restored(job: Restores, state: State, live: Live, checkpointer: holdfast.Checkpointer) -> _Restored:
    leads = dist.get_rank() == 0
    _await_commit(job)  # what a keeper still does would take its time from the restore
    state.clear()
    dist.barrier()
    start_s = time.monotonic()
    report = checkpointer.restore()
    restore = Span(start_s, time.monotonic())
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
    load = Span(start_s, time.monotonic())
    return _Restored(dist.get_rank(), restore, copies, moves, moves_cpu_s, load, restored, state.digests())


def _await_commit(job: Restores) -> None:
    """Return when the last save is in the history of the run."""
    run = Run.open(open_store(Location(str(job.folder))))
    end_s = time.monotonic() + _COMMIT_TIMEOUT_S
    while (head := run.head()) is None or head.step != job.number - 1:
        if time.monotonic() > end_s:
            raise BenchError(f"Step {job.number - 1} was not committed within {_COMMIT_TIMEOUT_S:.0f} s.")
        time.sleep(0.05)


def _copies(nbytes: int) -> tuple[Span, ...]:
    """Times of copies of `nbytes` from touched memory to other touched memory, by all ranks at once."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    taken = []
    for _ in range(_COPIES):
        dist.barrier()
        start_s = time.monotonic()
        np.copyto(target, source)
        taken.append(Span(start_s, time.monotonic()))
    return tuple(taken)


def _moves(sources: Sequence[torch.Tensor]) -> tuple[tuple[Span, ...], tuple[float, ...]]:
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
        taken.append(Span(start_s, time.monotonic()))
        cpu_s.append(time.process_time() - start_cpu_s)
    return tuple(taken), tuple(cpu_s)


def _change(state: State) -> None:
    """Make every tensor another one."""
    with torch.no_grad():
        for tensor in state.tensors().values():
            tensor.add_(1)


def _figures(restored: Sequence[_Restored]) -> dict[str, float]:
    return {
        "seconds": seconds_of([each.restore for each in restored]),
        "memcpy_s": min(seconds_of([each.copies[index] for each in restored]) for index in range(_COPIES)),
        "moved_s": min(seconds_of([each.moves[index] for each in restored]) for index in range(_COPIES)),
        "moved_cpu_s": min(sum(each.moves_cpu_s[index] for each in restored) for index in range(_COPIES)),
        "load_s": seconds_of([each.load for each in restored]),
    }
