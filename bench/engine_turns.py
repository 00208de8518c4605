"""Turns in which a live training state is saved: the time that a loop waits for it, what a save costs the loop, and a
restore from the memory of the node after the death of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import holdfast
from bench.contenders import HoldfastBackground
from bench.costs import Watch, give_back, settle
from bench.runner import Found, Job, Turns, require_same
from bench.schema import OURS, RAW, WARM_UP, BenchError
from bench.state import State, Work
from bench.ways import Pending, Site, opened
from holdfast.format.container import BLOCK_NBYTES
from holdfast.io.digest import digest_blocks
from holdfast.store.base import Bytes

#: The measures of `Saves`: saves beside which ranks do nothing, and saves beside work and a step. ``seconds`` are until
#: all is durable, ``blocked_s`` those of the call, ``persist_s`` from the end of the copy; ``step_wait_s`` is what the
#: next step took longer than one without a save. Memory counts from before the first save, whose times have its set-up.
MEASURES = ALONE, BESIDE_WORK = ("save", "save beside work")
#: The loop that saves nothing; the steps of a training loop, and the tokens of each on a rank.
NO_SAVES, NUM_STEPS, NUM_TOKENS = "no saves", 10, 512

#: Counted between two looks at the save: a millisecond or so.
_SLICE = 20_000
#: Floating-point operations of a forward and a backward, per parameter and token (Kaplan et al., 2020), and bytes of a
#: parameter with its two moments.
_OPERATIONS, _PARAMETER_NBYTES = 6, 12
#: A copy is tried so often in a round; the best one counts.
_TRIES = 3
_COMMIT_TIMEOUT_S = 120.0


class Saves(Turns):
    """Saves of all contenders; a step comes after ``work_s`` of work. The raw limit saves alone only."""

    def __init__(self, job: Job, site: Site) -> None:
        super().__init__(job, site)
        self._work = Work()
        self._work_s: float = job.scenario.facts["work_s"]
        self.site.live.step()  # the first one of a process takes longer

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, Found]]:
        way, saves_alone = self.way(name), name.startswith(RAW)
        watch = self._watched(name) if number == WARM_UP and not saves_alone else None
        self._work.for_seconds(0 if saves_alone else self._work_s)
        plain_step_s = self.site.live.step()
        for saving in (ALONE,) if saves_alone else MEASURES:
            folder = self.cold(way.place(f"{number}-{saving}"))
            is_last = saving == BESIDE_WORK and number == self.job.scenario.rounds
            expected = self.state.digests() if is_last else {}
            found = self._save(name, folder, plain_step_s if saving == BESIDE_WORK else None)
            if watch and saving == BESIDE_WORK:
                found["peak_extra_nbytes"] = watch.stop()
            yield saving, found
            if is_last:
                # The save must not contain what a step changed meanwhile.
                self.state.clear()
                way.load(folder)
                require_same(expected, self.state.digests(), name=name)
            self.discard(name, folder)

    def _save(self, name: str, folder: Path, plain_step_s: float | None) -> Found:
        """A save; beside work and a step, if a step without a save takes `plain_step_s`."""
        way, found = self.way(name), Found()

        def save() -> None:
            called_s = time.monotonic()
            pending = way.begin(folder)
            found["blocked_s"] = time.monotonic() - called_s
            if plain_step_s is not None:
                self._work.for_seconds(self._work_s)
                ready_s = time.monotonic()
                pending.unlock()
                self.site.live.step()
                found["step_wait_s"] = time.monotonic() - ready_s - plain_step_s
            pending.wait()
            if (persist_s := pending.persist_s()) is not None:
                found["persist_s"] = persist_s

        return self.observed(name, save) | found

    def _watched(self, name: str) -> Watch:
        """A watch of the memory from before there is anything of contender `name`."""
        give_back()
        dist.barrier()
        return Watch(node_dir=self.site.node_dir, world=self.job.scenario.world) if name == OURS else Watch()


class PythonLoop(Turns):
    """Saves beside a loop that counts in Python, with a core to spare for whoever writes.

    A sample has what it counted per second for ``work_s`` before, during the whole save, while the save only wrote, and
    for ``work_s`` after; and ``seconds`` until the save was durable.
    """

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, Found]]:
        calm_s: float = self.job.scenario.facts["work_s"]
        folder = self.cold(self.way(name).place(number))
        before = _counted_for(calm_s)
        start_s = time.monotonic()
        pending = self.way(name).begin(folder)
        copying = _counted_until(pending.is_copied)
        persisting = _counted_until(pending.is_over)
        seconds = time.monotonic() - start_s
        pending.wait()  # raises why it failed
        found = {
            "before_per_s": _per_s(before),
            "saving_per_s": _per_s(copying, persisting),
            "persisting_per_s": _per_s(persisting),
            "after_per_s": _per_s(_counted_for(calm_s)),
            "seconds": seconds,
        }
        yield measure, found
        self.discard(name, folder)


class TrainingLoop(Turns):
    """Training loops, without a save and with one after the first step. Every rank keeps one core busy, and all ranks
    meet at the end of a step, as when they reduce gradients.

    A sample has the ``seconds`` of a loop, and ``durable_s``, until its save was durable.
    """

    def __init__(self, job: Job, site: Site) -> None:
        super().__init__(job, site)
        self._work = Work()
        num_operations = _OPERATIONS * NUM_TOKENS * site.state.size().nbytes // _PARAMETER_NBYTES
        self._num_products = max(1, num_operations // Work.OPERATIONS)
        _ = site.live

    @property
    def entrants(self) -> list[str]:
        return [NO_SAVES, *self.job.able]

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, Found]]:
        folder = self.cold(self.site.folder if name == NO_SAVES else self.way(name).place(number))
        pending, reduced = Pending(), torch.zeros(1)
        start_s = time.monotonic()
        for step in range(NUM_STEPS):
            self._work.products(self._num_products)
            dist.all_reduce(reduced)
            pending.unlock()
            self.site.live.step()
            if step == 0 and name != NO_SAVES:
                pending = self.way(name).begin(folder)
        seconds = time.monotonic() - start_s
        pending.wait()
        yield measure, {"seconds": seconds, "durable_s": time.monotonic() - start_s}
        if name != NO_SAVES:
            self.discard(name, folder)


class Restores(Turns):
    """Restores from the memory of the node, after SIGKILL of all ranks.

    In each round, new ranks restore the step of the last round, change the state, save it and are killed. A sample has
    the seconds of a restore, of a memcpy of as many bytes, of a copy of each tensor with the digests of its bytes
    (``moved_cpu_s``: the CPU seconds for it), and of a load from storage. Its measure is whether the save was staged or
    durable when the ranks died.
    """

    mortal = True

    def take(self, name: str, number: int, measure: str) -> Iterator[tuple[str, Found]]:
        way, tensors = self.way(OURS), list(self.state.tensors().values())
        assert isinstance(way, HoldfastBackground)
        run, checkpointer = way.place(""), way.checkpointer
        if number != WARM_UP:
            _add(tensors, number)  # as the ranks before have saved them
            yield "staged" if number % 2 == 0 else "durable", self._restored(checkpointer, run, step=number - 1)
        _add(tensors, 1)
        handle = checkpointer.save(number)
        (handle.durable if number % 2 == 0 else handle.staged).wait()

    def _restored(self, checkpointer: holdfast.Checkpointer, run: Path, *, step: int) -> Found:
        expected = self.state.digests()

        def restore() -> None:
            report = checkpointer.restore()
            if (report.tier, report.step) != ("node memory", step):
                raise BenchError(f"Step {report.step} was restored from {report.tier}, not {step} from node memory.")

        _await_commit(run, step)  # the keeper's work would take time from the restore
        self.state.clear()
        restore_s, _ = _timed(restore)
        require_same(expected, self.state.digests(), name="holdfast (restore)")
        copy_s, (moved_s, moved_cpu_s) = _copied_s(self.state), _moved_s(self.state)
        self.state.clear()
        if self.leads:
            settle(run)
        load_s, _ = _timed(lambda: holdfast.load(run, into=self.site.live.objects))
        require_same(expected, self.state.digests(), name="holdfast (load)")
        return {
            "seconds": restore_s,
            "memcpy_s": copy_s,
            "moved_s": moved_s,
            "moved_cpu_s": moved_cpu_s,
            "load_s": load_s,
        }


def _add(tensors: list[torch.Tensor], times: int) -> None:
    with torch.no_grad():
        for _ in range(times):
            torch._foreach_add_(tensors, 1)


def _counted_for(seconds: float) -> tuple[int, float]:
    end_s = time.perf_counter() + seconds
    return _counted_until(lambda: time.perf_counter() >= end_s)


def _counted_until(is_over: Callable[[], bool]) -> tuple[int, float]:
    """Count until `is_over`, at least one slice; returns the count and its seconds."""
    start_s, total = time.perf_counter(), 0
    while True:
        for _ in range(_SLICE):
            total += 1
        if is_over():
            return total, time.perf_counter() - start_s


def _per_s(*counted: tuple[int, float]) -> float:
    return sum(total for total, _ in counted) / sum(seconds for _, seconds in counted)


def _await_commit(root: Path, step: int) -> None:
    """Return when the last save is in the history of the run."""
    run = opened(root)
    end_s = time.monotonic() + _COMMIT_TIMEOUT_S
    while (head := run.head()) is None or head.step != step:
        if time.monotonic() > end_s:
            raise BenchError(f"Step {step} was not committed within {_COMMIT_TIMEOUT_S:.0f} s.")
        time.sleep(0.05)


def _timed(work: Callable[[], object], tries: int = 1) -> tuple[float, float]:
    """The least seconds and CPU seconds of `work`, which all ranks do at once, `tries` times."""
    found = []
    for _ in range(tries):
        dist.barrier()
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        work()
        found.append((time.monotonic() - start_s, time.process_time() - start_cpu_s))
    return min(found)


def _copied_s(state: State) -> float:
    """Seconds of a memcpy of as many bytes from touched memory to touched memory."""
    nbytes = sum(tensor.nbytes for tensor in state.tensors().values())
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    return _timed(lambda: np.copyto(target, source), _TRIES)[0]


def _moved_s(state: State) -> tuple[float, float]:
    """Seconds and CPU seconds of a copy of each tensor to touched memory, with the digests of each block or more while
    the processor still has it."""
    sources = list(state.tensors().values())
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
