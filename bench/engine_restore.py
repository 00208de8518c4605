"""Restores from the memory of the node after the death of all ranks.

In each round, ranks that have saved are killed with SIGKILL, and new ones take their place. When those have everything
but the state, the restore is timed; then a copy of as many bytes, and a load from storage. They change the state, save,
and are killed in their turn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist

import holdfast
from bench.contenders import BACKGROUND, OURS
from bench.costs import settle
from bench.runner import Found, Span, Turns, require_same
from bench.schema import WARM_UP, BenchError
from bench.ways import HoldfastBackground
from holdfast.format.container import BLOCK_NBYTES
from holdfast.io.digest import digest_blocks
from holdfast.run.history import Run
from holdfast.store.base import Bytes, Location
from holdfast.store.urls import open_store

#: A copy is tried so often in a round; the best one counts.
_TRIES = 3
_COMMIT_TIMEOUT_S = 120.0


class Restores(Turns):
    """Restores from the memory of the node, after SIGKILL of all ranks.

    A sample has the seconds of a restore, of a copy of as many bytes, of a copy of each tensor with the digests of its
    bytes and nothing else (``moved_cpu_s``: the CPU seconds for it), and of a load from storage. Its measure is whether
    the save was staged or durable when the ranks died.

    In round `number` the ranks restore step `number` - 1, unless there is none yet, and save step `number`.
    """

    registry: ClassVar = {OURS: BACKGROUND[OURS]}
    mortal = True

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, str, Found]]:
        """Restore, and save to be killed."""
        run, way = self.place(OURS, ""), self.way(OURS)
        assert isinstance(way, HoldfastBackground)
        way.steps = itertools.count(number)
        _ = self.site.live
        if number != WARM_UP:
            found = self._restored(way.checkpointer, run, step=number - 1)
            yield name, "durable" if _is_durable(number - 1) else "staged", found
        with torch.no_grad():
            for tensor in self.state.tensors().values():
                tensor.add_(1)
        pending = way.begin(run)
        (pending.wait if _is_durable(number) else pending.wait_copied)()
        self._saved(number).write_bytes(msgspec.json.encode(self.state.digests()))

    def _restored(self, checkpointer: holdfast.Checkpointer, run: Path, *, step: int) -> Found:
        expected = msgspec.json.decode(self._saved(step).read_bytes(), type=dict[str, str])
        _await_commit(run, step)  # what a keeper still does would take its time from the restore
        self.state.clear()
        (restore,), _ = _timed(lambda: _restore(checkpointer, step))
        require_same(expected, self.state.digests(), name="holdfast (restore)")
        copies = _copies(sum(tensor.nbytes for tensor in self.state.tensors().values()))
        moves, moved_cpu_s = _moves(list(self.state.tensors().values()))
        self.state.clear()
        if self.leads:
            settle(run)
        (load,), _ = _timed(lambda: holdfast.load(run, into=self.site.live.objects))
        require_same(expected, self.state.digests(), name="holdfast (load)")
        return {"seconds": restore, "memcpy_s": copies, "moved_s": moves, "moved_cpu_s": moved_cpu_s, "load_s": load}

    def _saved(self, step: int) -> Path:
        """Where the digests of a step are, of this rank: they outlive it."""
        return self.job.folder / f"digests-{step}-{dist.get_rank()}"


def _is_durable(step: int) -> bool:
    """Whether the ranks are killed when the save of `step` is durable, or when it is staged."""
    return step % 2 == 0


def _restore(checkpointer: holdfast.Checkpointer, step: int) -> None:
    report = checkpointer.restore()
    if (report.tier, report.step) != ("node memory", step):
        raise BenchError(f"Step {report.step} was restored from {report.tier}, not {step} from node memory.")


def _await_commit(root: Path, step: int) -> None:
    """Return when the last save is in the history of the run."""
    run = Run.open(open_store(Location(str(root))))
    end_s = time.monotonic() + _COMMIT_TIMEOUT_S
    while (head := run.head()) is None or head.step != step:
        if time.monotonic() > end_s:
            raise BenchError(f"Step {step} was not committed within {_COMMIT_TIMEOUT_S:.0f} s.")
        time.sleep(0.05)


def _timed(work: Callable[[], object], tries: int = 1) -> tuple[list[Span], float]:
    """When `work` was done, by all ranks at once, so often; and the least CPU seconds that it took."""
    spans, cpu_s = [], []
    for _ in range(tries):
        dist.barrier()
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        work()
        spans.append(Span(start_s, time.monotonic()))
        cpu_s.append(time.process_time() - start_cpu_s)
    return spans, min(cpu_s)


def _copies(nbytes: int) -> list[Span]:
    """Times of copies of `nbytes` from touched memory to other touched memory, by all ranks at once."""
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return _timed(lambda: np.copyto(target, source), _TRIES)[0]


def _moves(sources: Sequence[torch.Tensor]) -> tuple[list[Span], float]:
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

    def move() -> None:
        for targets, moved, data in groups:
            torch._foreach_copy_(targets, moved)
            digest_blocks(data)

    return _timed(move, _TRIES)
