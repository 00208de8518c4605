"""Faults around saves into memory, beside deaths: processes that stand still, full places, lost files."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, DeadlineError, Memory, StorageError
from holdfast.checkpointer import watcher
from holdfast.keeper import client
from holdfast.node_memory.slots import Slot, slot_names
from tests.faults.engine_job import WORLD_SIZE, Job, Restored, Spec, Training, Truth, job, whole_in_memory
from tests.faults.engine_points import Deed, Log
from tests.store.test_posix_storage import mounted
from tests.support import nursery
from tests.support.keepers import end_keepers, keepers, kill
from tests.support.nursery import until

TRAINERS = ("rank-0", "rank-1")


def after(spec: Spec, *, stop: int = 0) -> Spec:
    """A job that comes after it, and makes no step before `stop` is more."""
    return Spec(spec.run, spec.node_dirs, spec.log.with_name("next"), numel=spec.numel, stop=stop)


def memory_of(spec: Spec) -> Memory:
    return Memory(node_dir=spec.node_dirs[0])


def lose(spec: Spec) -> None:
    """Lose the memory of all nodes, whose processes are dead."""
    for node_dir in spec.node_dirs:
        for folder in node_dir.iterdir():
            shutil.rmtree(folder)


# Processes that stand still.


@pytest.mark.parametrize("what", ["a keeper that is stopped", "slow storage", "slow storage and the node is lost"])
def test_a_death_while_the_third_is_copied_leaves_the_second_in_memory_and_the_first_on_disk(
    spec: Spec, truth: Truth, what: str
) -> None:
    # The schedule of DLRover's loss: there the tracker moves on to the second, and nothing of it is anywhere.
    is_slow = what.startswith("slow storage")
    copying = Deed("trainer", "copy", nth=1, kills=TRAINERS)
    slow = Deed("keeper", "data.opened", stalls=True)
    with job(
        replace(
            spec,
            pauses={2: "durable", 3: "staged"},
            deeds=(copying, slow) if is_slow else (copying,),
            generations=2 if is_slow else 3,
        ),
        keeper=True,
    ) as training:
        assert training.keeper is not None
        training.until_told("paused", step=2)
        training.arm("trainer", "keeper")
        if not is_slow:
            training.keeper.stop()
        training.log.let("pass-2")
        training.until_told("paused", step=3)
        training.log.let("pass-3")
        training.ended_killed()
        assert training.durable() == 1
        assert max(whole_in_memory(spec)) == 2
        assert truth.loaded(spec.run) == 1  # the head
        training.keeper.kill()
        if what.endswith("lost"):
            lose(spec)
    with job(after(spec), keeper=True) as following:
        wanted = Restored(1, "storage") if what.endswith("lost") else Restored(2, "node memory")
        assert following.restored(truth) == wanted
        following.ended_well()


@pytest.mark.slow
def test_beside_a_rank_that_is_stopped_another_one_never_overwrites_what_is_whole(spec: Spec, truth: Truth) -> None:
    stopped = Deed("trainer", "copy", rank=1, stalls=True)
    with job(replace(spec, pauses={2: "durable"}, deeds=(stopped,), timeout_s=3.0), keeper=True) as training:
        training.until_told("paused", step=2)
        training.arm("trainer", "keeper")
        training.log.let("pass-2")
        training.until_told("stalled", ranks=[1])
        training.ranks[1].stop()
        training.until_told("failed", ranks=[0])  # it goes on until it must wait for the other
        (failed,) = training.log.told("rank-0", "failed")
        assert failed["code"].startswith("timeout.")
        assert "rank 1" in failed["text"]
        assert [each["step"] for each in training.log.told("rank-0", "staged")][-1] == 2
        assert max(whole_in_memory(spec)) == 1
        training.kill_ranks()
        assert max(whole_in_memory(spec)) == 1
        with job(after(spec, stop=4)) as following:
            assert following.restored(truth) == Restored(1, "node memory")
            following.ended_well()
    assert truth.loaded(spec.run) == 3


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def saved(training: Training, checkpointer: Checkpointer, step: int) -> holdfast.Handle:
    """Go on to a step, and save it."""
    training.step(step)
    return checkpointer.save(step)


def keeper_of(spec: Spec) -> int:
    """The process that keeps the run."""
    (found,) = keepers(spec.node_dirs[0])
    return found


def test_while_the_keeper_is_stopped_saves_are_skipped_and_it_is_said(
    spec: Spec, truth: Truth, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(spec.numel)
    with Checkpointer(spec.run, training.state, memory=memory_of(spec), when_full="skip") as checkpointer:
        saved(training, checkpointer, 0).durable.wait(60)
        with stopped(keeper_of(spec)):
            handles = [saved(training, checkpointer, step) for step in range(1, 5)]
            assert [handle.skipped for handle in handles] == [False, True, True, True]
            assert handles[2].durable.error is not None
            assert handles[2].durable.error.code == "storage.slow"
            assert "step 3 was skipped" in caplog.text
        handles[0].durable.wait(60)
        last = saved(training, checkpointer, 5)
        assert not last.skipped
    assert truth.loaded(spec.run) == 5


@pytest.mark.slow
def test_while_the_keeper_is_stopped_a_save_waits_no_longer_than_it_may(spec: Spec, truth: Truth) -> None:
    training = Training(spec.numel)
    with Checkpointer(spec.run, training.state, memory=memory_of(spec)) as checkpointer:
        saved(training, checkpointer, 0).durable.wait(60)
        checkpointer._timeout_s = 1.5  # the first save may take longer, beside other work of the machine
        with stopped(keeper_of(spec)):
            first = saved(training, checkpointer, 1)
            begun_s = time.monotonic()
            error = saved(training, checkpointer, 2).durable.error
            assert "No slot of rank 0 became free" in str(error)
            assert isinstance(error, DeadlineError)
            assert error.code == "timeout.slot"
            assert 1.0 < time.monotonic() - begun_s < 15.0
        checkpointer._timeout_s = 60.0
        first.durable.wait(60)
        saved(training, checkpointer, 3).durable.wait(60)
    assert truth.loaded(spec.run) == 3


@pytest.mark.slow
def test_a_save_that_waited_in_vain_beside_a_full_disk_says_that_the_disk_is_full(spec: Spec, tmp_path: Path) -> None:
    training = Training(spec.numel)
    with (
        mounted(tmp_path / "disk", "tmpfs", "size=16m") as disk,
        Checkpointer(str(disk / "run"), training.state, memory=memory_of(spec)) as checkpointer,
    ):
        saved(training, checkpointer, 0).durable.wait(60)
        checkpointer._timeout_s = 3.0  # the first save may take longer, beside other work of the machine
        other = fill(disk)
        held = [saved(training, checkpointer, step) for step in (1, 2)]
        for handle in held:
            handle.staged.wait(60)
        error = saved(training, checkpointer, 3).durable.error
        assert "No slot of rank 0 became free" in str(error)
        assert "No space left" in str(error)
        other.unlink()
        checkpointer._timeout_s = 60.0
        for handle in held:
            handle.durable.wait(60)
        saved(training, checkpointer, 4)


def test_a_keeper_that_dies_while_the_end_of_training_waits_for_it_is_replaced(spec: Spec, truth: Truth) -> None:
    # There is no save any more that would do it.
    training = Training(spec.numel)
    with kept(spec, Deed("keeper", "data.opened", kills=("keeper",))) as log:
        with Checkpointer(spec.run, training.state, memory=memory_of(spec), timeout_s=10.0) as checkpointer:
            saved(training, checkpointer, 0).durable.wait(60)
            log.let("armed-keeper")
            saved(training, checkpointer, 1)
        assert truth.loaded(spec.run) == 1


def test_a_keeper_that_dies_after_a_restore_from_memory_is_replaced_by_the_next_save(spec: Spec, truth: Truth) -> None:
    leave_staged(spec)
    slow = Deed("keeper", "data.opened", stalls=True)
    following = replace(after(spec, stop=5), deeds=(slow,), pauses={3: "durable"}, timeout_s=10.0)
    with job(following, keeper=True, armed=("trainer", "keeper")) as training:
        assert training.restored(truth) == Restored(2, "node memory")
        training.until_told("paused", step=3)
        assert training.keeper is not None
        training.keeper.kill()
        training.log.let("pass-3")
        training.ended_well()
    assert truth.loaded(spec.run) == 4


def test_a_keeper_that_dies_while_a_restore_waits_for_it_is_replaced(spec: Spec, truth: Truth) -> None:
    leave_staged(spec)
    stands_still = Deed("keeper", "hash", stalls=True)
    waits = [Deed("trainer", "awaits STAGED", rank=rank, stalls=True) for rank in range(WORLD_SIZE)]
    following = replace(after(spec, stop=5), deeds=(stands_still, *waits), timeout_s=10.0)
    with job(following, keeper=True, armed=("trainer", "keeper")) as training:
        training.until_told("stalled")
        assert training.keeper is not None
        training.keeper.kill()
        training.log.let("go-on-awaits STAGED")
        assert training.restored(truth) == Restored(2, "node memory")
        training.ended_well()
    assert truth.loaded(spec.run) == 4


def leave_staged(spec: Spec) -> None:
    """Have step 1 durable, and step 2 in memory, staged and no more; no process is left."""
    with job(replace(spec, pauses={2: "durable", 3: "staged"}), keeper=True) as training:
        training.until_told("paused", step=2)
        assert training.keeper is not None
        training.keeper.stop()
        training.log.let("pass-2")
        training.until_told("paused", step=3)
        training.kill_ranks()
        training.keeper.kill()


@contextmanager
def kept(spec: Spec, *deeds: Deed) -> Iterator[Log]:
    """A keeper at work that does these deeds, which is killed in the end."""
    made = Job(replace(spec, deeds=deeds, log=spec.log.with_name("kept")))
    try:
        made.start_keeper()
        yield made.log
    finally:
        made.close()


def test_what_is_staged_is_committed_by_the_keeper_command_alone(spec: Spec, truth: Truth) -> None:
    leave_staged(spec)
    command = [sys.executable, "-m", "holdfast.cli", "keeper", spec.run, "--node-dir", str(spec.node_dirs[0])]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        until(lambda: truth.loaded(spec.run) == 2)
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.parametrize("text", ["1\n", "no number"])
def test_a_lock_file_that_nobody_holds_is_no_keeper(spec: Spec, truth: Truth, text: str) -> None:
    with spec.folder(spec.node_dirs[0]) as folder:
        os.close(folder.create("keeper.lock"))
        (folder.path / "keeper.lock").write_text(text)
    training = Training(spec.numel)
    with Checkpointer(spec.run, training.state, memory=memory_of(spec), timeout_s=20.0) as checkpointer:
        saved(training, checkpointer, 0)
    assert truth.loaded(spec.run) == 0
    assert (folder.path / "keeper.lock").read_text() == f"{keeper_of(spec)}\n"


@pytest.mark.parametrize("has_keeper", [pytest.param(True, marks=pytest.mark.slow), False])
def test_saves_go_on_where_the_file_that_says_the_version_of_the_memory_is_damaged(
    spec: Spec, truth: Truth, caplog: pytest.LogCaptureFixture, has_keeper: bool
) -> None:
    training = Training(spec.numel)
    with Checkpointer(spec.run, training.state, memory=memory_of(spec), timeout_s=60.0) as checkpointer:
        saved(training, checkpointer, 0).durable.wait(60)
        keeper = keeper_of(spec)
        with spec.folder(spec.node_dirs[0]) as folder:
            (folder.path / "keeper.protocol").write_bytes(bytes(2))
            (folder.path / "slot-of nobody").touch()
        if not has_keeper:
            kill(keeper)
        for step in (1, 2):
            saved(training, checkpointer, step).durable.wait(60)
    assert has_keeper == ("saves go to storage" not in caplog.text)
    assert has_keeper == ("keeper.protocol' is damaged" not in caplog.text)
    assert truth.loaded(spec.run) == 2


def cut(path: Path) -> None:
    os.truncate(path, 0)


def write_over(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(os.urandom(8192))


@pytest.mark.parametrize("damage", [cut, write_over])
@pytest.mark.parametrize("is_durable", [True, False])
@pytest.mark.few(2)
def test_a_slot_that_somebody_cuts_or_overwrites_costs_what_it_holds_alone(
    spec: Spec, truth: Truth, damage: Callable[[Path], object], is_durable: bool
) -> None:
    training = Training(spec.numel)
    with Checkpointer(spec.run, training.state, memory=memory_of(spec), timeout_s=60.0) as checkpointer:
        saved(training, checkpointer, 0).durable.wait(60)
        with spec.folder(spec.node_dirs[0]) as folder, nullcontext() if is_durable else stopped(keeper_of(spec)):
            handle = saved(training, checkpointer, 1)
            (handle.durable if is_durable else handle.staged).wait(60)
            for name in slot_names(folder):
                damage(folder.path / name)
            if not is_durable:
                with pytest.raises(StorageError, match=r"storage\.memory_removed"):
                    handle.durable.wait(60)
        for step in range(2, 5):
            saved(training, checkpointer, step).durable.wait(60)
    assert truth.loaded(spec.run) == 4


def test_saves_go_on_where_somebody_has_replaced_the_file_of_the_claims(spec: Spec, truth: Truth) -> None:
    training = Training(spec.numel)
    with Checkpointer(spec.run, training.state, memory=memory_of(spec), timeout_s=60.0) as checkpointer:
        saved(training, checkpointer, 0).durable.wait(60)
        with spec.folder(spec.node_dirs[0]) as folder:
            (folder.path / "trainers.lock").unlink()
            (folder.path / "trainers.lock").mkdir()
        for step in range(1, 6):
            saved(training, checkpointer, step).durable.wait(60)
    assert truth.loaded(spec.run) == 5


def test_a_watcher_goes_on_after_an_error_that_nobody_expected(
    spec: Spec, truth: Truth, monkeypatch: pytest.MonkeyPatch
) -> None:
    ensure, failed = client.ensure_keeper, threading.Event()

    def ensure_keeper(folder: Any, run: str) -> None:
        if threading.current_thread().name == "holdfast-watch" and not failed.is_set():
            failed.set()
            raise ValueError("a bug")
        ensure(folder, run)

    training = Training(spec.numel)
    with Checkpointer(spec.run, training.state, memory=memory_of(spec)) as checkpointer:
        saved(training, checkpointer, 0).durable.wait(60)
        monkeypatch.setattr(watcher, "ensure_keeper", ensure_keeper)
        with stopped(keeper_of(spec)):
            handle = saved(training, checkpointer, 1)
            assert failed.wait(30)
        handle.durable.wait(60)
    assert truth.loaded(spec.run) == 1


# Places that are full.


def fill(folder: Path) -> Path:
    """Fill a file system; the file that does it."""
    path = folder / "other"
    with open(path, "wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 20)) == 1 << 20:
            pass
        while file.write(b"x"):
            pass
    return path


def test_while_the_disk_is_full_training_goes_on_and_all_is_durable_when_there_is_room(
    spec: Spec, truth: Truth, tmp_path: Path
) -> None:
    training = Training(spec.numel)
    with mounted(tmp_path / "disk", "tmpfs", "size=16m") as disk:
        run = str(disk / "run")
        with Checkpointer(run, training.state, memory=memory_of(spec), when_full="skip") as checkpointer:
            saved(training, checkpointer, 0).durable.wait(60)
            other = fill(disk)
            first = saved(training, checkpointer, 1)
            until(lambda: bool(first.trouble))
            assert "No space left" in first.trouble
            assert run in first.trouble
            second = saved(training, checkpointer, 2)
            second.staged.wait(60)
            skipped = saved(training, checkpointer, 3)
            assert skipped.skipped
            assert "No space left" in str(skipped.durable.error)
            with pytest.raises(DeadlineError, match="No space left"):
                checkpointer.wait(timeout_s=0.1)
            assert holdfast.open(run).step == 0
            other.unlink()
            for handle in (first, second):
                handle.durable.wait(60)
            saved(training, checkpointer, 4)
        assert [truth.loaded(f"{run}@step={step}") for step in (1, 2, 4)] == [1, 2, 4]


@contextmanager
def small_node(tmp_path: Path) -> Iterator[Path]:
    """A node with hardly more memory than is left for others."""
    with mounted(tmp_path / "shm", "tmpfs", "size=320m") as node_dir:
        try:
            yield node_dir
        finally:
            end_keepers(node_dir)


def test_when_memory_fills_up_a_save_fails_clearly_and_nothing_is_lost(
    spec: Spec, truth: Truth, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(spec.numel)
    with small_node(tmp_path) as node_dir:
        with Checkpointer(spec.run, training.state, memory=Memory(node_dir=node_dir)) as checkpointer:
            for step in (0, 1):
                saved(training, checkpointer, step).durable.wait(60)
            other = fill(node_dir)
            failed = saved(training, checkpointer, 2)
            with pytest.raises(StorageError, match="cannot be used: No space left"):
                failed.staged.wait(60)
            assert holdfast.open(spec.run).step == 1
            other.unlink()
            saved(training, checkpointer, 3).durable.wait(60)
        assert truth.loaded(spec.run) == 3
        assert "step 2 is not saved" in caplog.text


def test_a_state_that_outgrows_the_memory_goes_to_storage(
    spec: Spec, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(spec.numel)
    with small_node(tmp_path) as node_dir:
        with Checkpointer(spec.run, training.state, memory=Memory(node_dir=node_dir), timeout_s=10.0) as checkpointer:
            first = saved(training, checkpointer, 0)
            training.state["more"] = torch.ones(40 << 20, dtype=torch.int8)
            assert saved(training, checkpointer, 1).durable.is_done
            assert saved(training, checkpointer, 2).durable.is_done
            first.durable.wait(10)
        assert "saves go to storage, and training waits for them" in caplog.text
        view = holdfast.open(spec.run)
        assert view.step == 2
        assert view["more"].shape == (40 << 20,)


def test_memory_that_a_killed_process_had_not_reserved_yet_is_reserved_by_the_next(spec: Spec, tmp_path: Path) -> None:
    # A write to memory that is not there ends a process, by SIGBUS.
    with small_node(tmp_path) as node_dir:
        spec = replace(spec, node_dirs=(node_dir,))
        with spec.folder(node_dir) as folder:
            for _ in range(2):
                Slot.create(folder, rank=0, nbytes=1 << 20).close()
        with kept(spec) as log:
            fill(node_dir)
            process = nursery.start(save_once, spec, err=log.folder / "err")
            assert process.wait() == 0, process.err
    assert holdfast.open(spec.run).step == 0


def save_once(spec: Spec) -> None:
    training = Training(spec.numel)
    with Checkpointer(spec.run, training.state, memory=memory_of(spec)) as checkpointer:
        saved(training, checkpointer, 0)
