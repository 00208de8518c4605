"""Hundreds of saves into memory leave nothing behind: no memory, no descriptors, no threads, no files in memory."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import signal
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final, NamedTuple

import pytest
import torch

from holdfast import Checkpointer, Memory
from holdfast.checkpointer.staging import Stager
from holdfast.snapshot import capture as snapshot
from tests.faults.engine_job import Spec, Training, Truth
from tests.support.keepers import keepers
from tests.support.nursery import until

WARM_UP: Final = 40
FEW_SAVES: Final = 40
MANY_SAVES: Final = 500
#: The bytes that caches, allocators and lists of measurements may take.
SLACK_NBYTES: Final = 4 << 20


class Held(NamedTuple):
    """The resources that a process holds."""

    private_nbytes: int
    num_descriptors: int
    num_threads: int
    num_slots_mapped: int

    @staticmethod
    def by(pid: int) -> Held:
        proc = Path(f"/proc/{pid}")
        rollup = (proc / "smaps_rollup").read_text()
        private = sum(int(found) << 10 for found in re.findall(r"^Private_\w+: +(\d+) kB", rollup, re.MULTILINE))
        mapped = [line for line in (proc / "maps").read_text().splitlines() if "/slot-" in line]
        return Held(private, len(os.listdir(proc / "fd")), len(os.listdir(proc / "task")), len(mapped))


def check_no_growth(before: Held, after: Held) -> None:
    assert after.private_nbytes < before.private_nbytes + SLACK_NBYTES
    assert after[1:] == before[1:]


def save_steps(training: Training, checkpointer: Checkpointer, first: int, count: int) -> None:
    """Save so many steps; all is durable and quiet when it returns."""
    for step in range(first, first + count):
        training.step(step)
        checkpointer.save(step)
    checkpointer.wait(60)
    gc.collect()


def kinds(spec: Spec) -> Counter[str]:
    """The number of files of each kind in the memory of the node."""
    with spec.folder(spec.node_dirs[0]) as folder:
        return Counter(name.partition("-")[0] for name in folder.names())


def check_saves(spec: Spec, count: int) -> None:
    training = Training(spec.numel)
    with Checkpointer(spec.run, training.state, memory=Memory(node_dir=spec.node_dirs[0])) as checkpointer:
        save_steps(training, checkpointer, 0, WARM_UP)
        (keeper,) = keepers(spec.node_dirs[0])
        processes = (os.getpid(), keeper)
        before = [settled(pid) for pid in processes]
        save_steps(training, checkpointer, WARM_UP, count)
        for pid, held in zip(processes, before, strict=True):
            check_no_growth(held, settled(pid))
        until(lambda: kinds(spec)["generation"] == 2)
        assert {kind: count for kind, count in kinds(spec).items() if "." not in kind} == {"slot": 2, "generation": 2}
    assert Truth(spec.numel).loaded(spec.run) == WARM_UP + count - 1


def settled(pid: int) -> Held:
    """The resources of an idle process, measured once the helpers of the last request have ended."""
    last = Held.by(pid)
    for _ in range(100):
        gc.collect()
        os.sched_yield()
        if last[1:] == (last := Held.by(pid))[1:]:
            break
    return last


@pytest.mark.slow
def test_dozens_of_saves_leave_nothing_behind(spec: Spec) -> None:
    check_saves(spec, FEW_SAVES)


@pytest.mark.slow
def test_hundreds_of_saves_leave_nothing_behind(spec: Spec) -> None:
    check_saves(spec, MANY_SAVES)


@pytest.mark.slow
def test_checkpointers_that_are_closed_leave_nothing_behind(spec: Spec) -> None:
    training = Training(spec.numel)
    # Not always none: pytest keeps what the last test that failed referred to.
    num_mapped_before = settled(os.getpid()).num_slots_mapped
    counts = []
    for step in range(6):
        with Checkpointer(spec.run, training.state, memory=Memory(node_dir=spec.node_dirs[0])) as checkpointer:
            assert checkpointer.restore().next_step == step
            training.step(step)
            checkpointer.save(step).durable.wait(60)
        counts.append(settled(os.getpid()))
    check_no_growth(counts[1], counts[-1])
    assert counts[-1].num_slots_mapped == num_mapped_before
    assert kinds(spec)["slot"] == 2


def in_use_nbytes() -> int:
    """Anonymous memory of this process. First, the C library gives back the freed memory that it keeps: it makes the
    figure of a loop without any save swing by tens of megabytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rollup = Path("/proc/self/smaps_rollup").read_text()
    (found,) = re.findall(r"^Anonymous: +(\d+) kB", rollup, re.MULTILINE)
    return int(found) << 10


def test_what_a_save_set_aside_is_let_go_before_anybody_hears_that_it_is_staged(
    spec: Spec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cloned(memory: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        clones = clone(memory)
        aside.extend(map(weakref.ref, clones))
        return clones

    def finish(*args: Any) -> None:
        num_held.append(sum(clone() is not None for clone in aside))
        original(*args)

    aside, num_held = list["weakref.ref[torch.Tensor]"](), list[int]()
    clone, original = snapshot._cloned, Stager.finish
    monkeypatch.setattr(snapshot, "_cloned", cloned)
    monkeypatch.setattr(Stager, "finish", finish)
    training = Training(spec.numel)
    training.module.register_buffer("counts", torch.ones(8))  # a buffer, which is set aside
    with Checkpointer(spec.run, training.state, memory=Memory(node_dir=spec.node_dirs[0])) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step).staged.wait(60)
    assert aside
    assert num_held == [0, 0]


@contextmanager
def slow(keeper: int) -> Iterator[None]:
    """Have a keeper work for a tenth of the time only."""
    over = Event()

    def hold_up() -> None:
        while not over.is_set():
            os.kill(keeper, signal.SIGSTOP)
            over.wait(0.18)
            os.kill(keeper, signal.SIGCONT)
            time.sleep(0.02)

    thread = Thread(target=hold_up)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def check_saves_beside_slow_storage(spec: Spec, count: int) -> None:
    training = Training(spec.numel)
    # A buffer, which is set aside by every save; a copy that anybody kept would be seen.
    training.module.register_buffer("large", torch.ones(2 * SLACK_NBYTES, dtype=torch.uint8))
    with Checkpointer(spec.run, training.state, memory=Memory(node_dir=spec.node_dirs[0])) as checkpointer:
        for step in (0, 1):
            checkpointer.save(step).durable.wait(60)
        before = in_use_nbytes()
        (keeper,) = keepers(spec.node_dirs[0])
        num_late = 0
        with slow(keeper):
            for step in range(2, 2 + count):
                training.step(step)
                handle = checkpointer.save(step)
                handle.staged.wait(60)
                assert in_use_nbytes() < before + SLACK_NBYTES
                num_late += not handle.durable.is_over
        assert num_late, "storage was not slow"


@pytest.mark.slow
def test_beside_slow_storage_the_trainer_holds_no_more_than_before(spec: Spec) -> None:
    check_saves_beside_slow_storage(spec, 6)


@pytest.mark.slow
def test_beside_slow_storage_the_trainer_holds_no_more_than_before_after_many_saves(spec: Spec) -> None:
    check_saves_beside_slow_storage(spec, 200)
