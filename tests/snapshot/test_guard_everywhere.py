"""The guard protects a state that is being copied from everything but steps, too: our own verbs, forks, interrupts,
other jobs, and calls after the end."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import holdfast
from holdfast import Checkpointer, ConfigurationError, DeadlineError, HoldfastError, Memory, StateError, StorageError
from holdfast.latch import Latch
from holdfast.node_memory.slots import Slot, SlotState, slot_names
from holdfast.snapshot import capture as snapshot_module
from holdfast.snapshot import device
from holdfast.snapshot.device import Queued
from holdfast.snapshot.guard import Guard, changing
from holdfast.snapshot.routes import Pair
from tests.checkpointer.test_checkpointer import Loop, folder_of, late_copies
from tests.support import nursery
from tests.support.keepers import end_keepers
from tests.support.nursery import until


def loaded(run: str, loop: Loop) -> None:
    holdfast.load(run, loop.state)


def transferred(_: str, loop: Loop) -> None:
    holdfast.transfer(Loop(seed=7).state, loop.state, select="model")


def restored_by_another(run: str, loop: Loop) -> None:
    with Checkpointer(run, loop.state, memory=None) as other:
        other.restore()


@pytest.mark.parametrize("verb", [loaded, transferred, restored_by_another])
def test_a_verb_that_fills_a_state_being_copied_waits_and_mixes_nothing(
    run: str, memory: Memory, verb: Callable[[str, Loop], None]
) -> None:
    before, loop = Loop(seed=3), Loop()
    before.step(3)
    other_run = run + "-other"
    holdfast.save(other_run, before.state, 1)
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        loop.step()
        checkpointer.save(1).durable.wait(60)
        loop.step(2)
        wanted = loop.bits()
        with late_copies():
            handle = checkpointer.save(2)
            verb(other_run, loop)
        assert handle.staged.is_over, "the verb has waited"
        assert loop.bits() != wanted, "and filled the state"
    found = Loop(seed=1)
    assert holdfast.load(run, found.state).step == 2
    assert found.bits() == wanted


def test_a_verb_waits_for_a_copy_no_longer_than_its_timeout(run: str) -> None:
    loop = Loop()
    holdfast.save(run, loop.state, 1)
    with ThreadPoolExecutor(1) as pool:
        hold = pool.submit(Guard().hold, timeout_s=1).result()
        with pytest.raises(DeadlineError) as raised:
            holdfast.load(run, loop.state, timeout_s=0.5)
        assert raised.value.code == "timeout.copy"
        hold.release()
    assert holdfast.load(run, loop.state).step == 1


def test_a_hold_is_over_when_the_thread_that_answers_for_it_is_gone() -> None:
    guard = Guard()
    thread = threading.Thread(target=lambda: guard.hold(timeout_s=1))
    thread.start()
    thread.join()
    guard.wait()
    hold = guard.hold(timeout_s=1)
    copier = threading.Thread(target=time.sleep, args=(0.2,))
    copier.start()
    assert copier.native_id is not None
    hold.pass_on(copier.native_id)
    guard.wait()
    assert hold.is_over
    assert not copier.is_alive()


def test_a_hold_that_was_not_passed_on_is_over_when_its_thread_does_something_else() -> None:
    guard = Guard()
    first = guard.hold(timeout_s=1)
    guard.wait()
    assert first.is_over
    second = guard.hold(timeout_s=1)
    guard.hold(timeout_s=1).release()
    assert second.is_over


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_save_waits_until_another_thread_has_ended_its_changes_under_the_guard(
    run: str, memory: Memory, in_memory: bool
) -> None:
    loop = Loop()
    entered, done = threading.Event(), threading.Event()

    def change(checkpointer: Checkpointer) -> None:
        with checkpointer.guard(), torch.no_grad():
            for number, parameter in enumerate(loop.model.parameters()):
                parameter.fill_(7)
                if not number:
                    entered.set()
                    time.sleep(0.3)
                    loop.optimizer.step()  # a step in there waits for nothing
            done.set()

    with Checkpointer(run, loop.state, memory=memory if in_memory else None) as checkpointer:
        loop.step()
        checkpointer.save(1)
        checkpointer.wait()
        with ThreadPoolExecutor(1) as pool:
            changed = pool.submit(change, checkpointer)
            assert entered.wait(10)
            checkpointer.save(2)
            assert done.is_set()
            changed.result()
            wanted = loop.bits()
    found = Loop(seed=1)
    holdfast.load(run, found.state)
    assert found.bits() == wanted


def test_a_thread_that_stays_under_the_guard_is_named_when_a_save_gives_up(run: str, memory: Memory) -> None:
    loop, leave = Loop(), threading.Event()

    def stay(checkpointer: Checkpointer) -> None:
        with checkpointer.guard():
            leave.wait(20)

    with Checkpointer(run, loop.state, memory=memory, timeout_s=1) as checkpointer, ThreadPoolExecutor(1) as pool:
        staying = pool.submit(stay, checkpointer)
        with pytest.raises(DeadlineError, match=r"another thread held the guard") as raised:
            checkpointer.save(1)
        assert raised.value.code == "timeout.guard"
        with checkpointer.guard():  # of several threads, none keeps the others out
            leave.set()
        staying.result()
        checkpointer.save(1)
        with checkpointer.guard():
            checkpointer.save(2)  # nor a thread itself
    assert holdfast.open(run).step == 2


def test_blocks_of_several_threads_that_overlap_without_end_do_not_hold_up_saves(run: str, memory: Memory) -> None:
    loop, over = Loop(), threading.Event()

    def change(checkpointer: Checkpointer) -> int:
        num = 0
        while not over.is_set():
            with checkpointer.guard():
                num += 1
                with checkpointer.guard():
                    time.sleep(0.01)
        return num

    with Checkpointer(run, loop.state, memory=memory, timeout_s=10) as checkpointer, ThreadPoolExecutor(3) as pool:
        changing_ = [pool.submit(change, checkpointer) for _ in range(3)]
        try:
            for step in range(5):
                loop.step(step)
                checkpointer.save(step)
        finally:
            over.set()
        assert all(each.result() > 1 for each in changing_)
    assert holdfast.open(run).step == 4


def test_a_thread_that_ended_under_the_guard_keeps_nobody_from_saving() -> None:
    guard, left = Guard(), []

    def leave() -> None:
        block = changing([guard])
        block.__enter__()
        left.append(block)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    guard.hold(timeout_s=5).release()
    assert left


@pytest.mark.parametrize("aside", [True, False])
def test_a_buffer_that_another_thread_changes_while_it_is_set_aside_voids_the_save(
    run: str, memory: Memory, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    loop = Loop()
    name = "_cloned" if aside else "_copy"
    copied = getattr(snapshot_module, name)

    def change() -> None:
        loop.model[1].running_mean.add_(1)  # type: ignore[operator]

    def beside(what: object) -> object:
        done = copied(what)
        thread = threading.Thread(target=change)
        thread.start()
        thread.join()
        return done

    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        loop.step()
        checkpointer.save(1).durable.wait(60)
        with monkeypatch.context() as patched:
            patched.setattr(snapshot_module, name, beside)
            if not aside:
                patched.setattr(snapshot_module, "_ASIDE_NBYTES", 0)
            with pytest.raises(StateError, match=r"model/1\.running_mean") as raised:
                checkpointer.save(2).durable.wait(60)
        assert raised.value.code == "state.changed"
        checkpointer.save(3)
    assert holdfast.open(run).step == 3


def test_an_interrupted_save_is_void_even_if_the_copy_goes_on(
    run: str, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_module, "_ASIDE_NBYTES", 0)
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.save(1).durable.wait(60)
        with late_copies(), patch.object(Latch, "wait", interrupted_once(Latch.wait)):
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(2)
            loop.step()
            loop.state["progress"]["epoch"] = 9  # type: ignore[index]
            checkpointer.save(3)
    assert holdfast.open(run).step == 3
    with pytest.raises(holdfast.NotFoundError):
        holdfast.open(f"{run}@step=2")


def interrupted_once(wait: Callable[..., bool]) -> Callable[..., bool]:
    """As `wait`, but the first time that the main thread waits it is interrupted."""
    due = [KeyboardInterrupt]

    def interrupted(latch: Latch, timeout_s: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread() and due:
            raise due.pop()
        return wait(latch, timeout_s)

    return interrupted


def test_a_worker_forked_beside_a_copy_inherits_no_setting_and_no_guard(run: str, memory: Memory) -> None:
    loop = Loop()
    before = settings()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.save(1).durable.wait(60)
        loop.step()
        with late_copies():
            checkpointer.save(2)
            reading, writing = os.pipe()
            if (child := os.fork()) == 0:
                torch.set_num_threads(1)
                loop.optimizer.step()  # the copy by the parent's thread is no concern of a child
                os.write(writing, repr(settings()).encode())
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert os.read(reading, 1000).decode() == repr(before)
            assert settings() == before


def settings() -> tuple[object, ...]:
    return gc.isenabled(), gc.get_threshold(), sys.getswitchinterval(), torch.is_grad_enabled()


def queued_on_a_device(self: Queued, _: object) -> None:
    self._events = dict.fromkeys([torch.device("cuda")])


class Stream:
    """Stands in for a stream of a device: what was queued on it goes on until somebody waits for it."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.is_over = False
        self._error = error

    def synchronize(self) -> None:
        if self._error is not None:
            raise self._error
        self.is_over = True


@pytest.mark.parametrize("error", [None, RuntimeError("the device is lost")])
def test_an_error_in_the_middle_of_a_copy_frees_the_slot_only_when_nothing_writes_to_it(
    run: str, memory: Memory, error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream(error=error)
    advance, were_over = Slot.advance, []

    def broken(_: Iterable[Pair]) -> None:
        raise RuntimeError("in the middle")

    def watched(slot: Slot, record: object) -> None:
        if slot.state == SlotState.WRITING:
            were_over.append(stream.is_over)
        advance(slot, record)  # type: ignore[arg-type]

    checkpointer = Checkpointer(run, Loop().state, memory=memory)
    checkpointer.save(1).durable.wait(60)
    with monkeypatch.context() as patching:
        patching.setattr(snapshot_module, "_copy", broken)
        patching.setattr(Slot, "advance", watched)
        patching.setattr(device, "_stream", lambda _: stream)
        patching.setattr(Queued, "__init__", queued_on_a_device)
        patching.setattr(Queued, "passed", lambda _: nullcontext())
        with pytest.raises(StorageError, match="in the middle"):
            checkpointer.save(2).staged.wait(60)
    with folder_of(run, memory.node_dir) as folder:
        states = [Slot(folder, name).state for name in slot_names(folder)]
    assert were_over == ([True] if error is None else [])
    assert (SlotState.WRITING in states) == (error is not None)
    if error is None:
        checkpointer.save(3).durable.wait(60)
    with suppress(StorageError):  # of step 2
        checkpointer.close()


def take_over(run: str, node_dir: Path, orders: Path, answers: Path) -> None:
    """A job that takes over, and saves the steps that it receives; answers with the place, or the error's code."""
    loop = Loop()
    checkpointer = Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir), takeover=True)
    with orders.open() as lines, answers.open("w", buffering=1) as said:
        for line in lines:
            loop.step()
            try:
                handle = checkpointer.save(int(line))
                handle.durable.wait(60)
                said.write(f"{handle.place}\n")
            except HoldfastError as error:
                said.write(f"{error.code}\n")


class OtherJob:
    """A job in a process of its own."""

    def __init__(self, run: str, folder: Path) -> None:
        folder.mkdir()
        paths = folder / "orders", folder / "answers"
        for path in paths:
            os.mkfifo(path)
        self._process = nursery.start(take_over, run, folder, *paths, err=folder / "err")
        self._orders, self._answers = paths[0].open("w", buffering=1), paths[1].open()

    def save(self, step: int) -> str:
        """Have it save; what it answers."""
        self._orders.write(f"{step}\n")
        return self._answers.readline().strip()

    def end(self) -> None:
        self._orders.close()
        self._answers.close()
        assert self._process.wait() == 0, self._process.err


def test_a_job_that_took_over_is_fenced_when_another_takes_over_later(run: str, tmp_path: Path) -> None:
    holdfast.save(run, Loop().state, 0)
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    first, second = (OtherJob(run, node) for node in nodes)
    try:
        assert first.save(1) == "2.1"
        assert first.save(2) == "2.2"
        assert second.save(11) == "3.1"
        assert first.save(3) == "fenced.newer_epoch"
        assert first.save(4) == "fenced.newer_epoch"
        assert second.save(12) == "3.2"
        assert holdfast.open(run).step == 12
    finally:
        first.end()
        second.end()
        for node in nodes:
            end_keepers(node)


@pytest.mark.parametrize("in_memory", [True, False])
def test_every_verb_has_a_clear_outcome_after_close(run: str, memory: Memory, in_memory: bool) -> None:
    loop = Loop()
    checkpointer = Checkpointer(run, loop.state, memory=memory if in_memory else None)
    checkpointer.save(1)
    checkpointer.close()
    threads = threading.active_count()
    before = loop.bits()
    for verb in (lambda: checkpointer.save(2), checkpointer.restore, checkpointer.__enter__):
        with pytest.raises(ConfigurationError, match="closed Checkpointer") as raised:
            verb()
        assert raised.value.code == "config.closed"
    with checkpointer.guard():
        loop.step()
    checkpointer.wait()
    checkpointer.close()
    assert loop.bits() != before
    assert holdfast.open(run).step == 1
    until(lambda: threading.active_count() <= threads)


def test_a_with_block_that_an_exception_ends_closes(run: str, memory: Memory) -> None:
    with pytest.raises(ZeroDivisionError), Checkpointer(run, Loop().state, memory=memory) as checkpointer:
        raise ZeroDivisionError
    with pytest.raises(ConfigurationError, match="closed Checkpointer"):
        checkpointer.save(1)
