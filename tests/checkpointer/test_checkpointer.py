"""`Checkpointer`: saves that a loop does not wait for, and that survive its death."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Checkpointer, ConfigurationError, FencedError, Memory, StateError, StorageError
from holdfast.format.records import Place
from holdfast.node_memory.keeper_lock import is_kept
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot, slot_names
from holdfast.observing import JsonLines
from holdfast.run.history import Run
from holdfast.snapshot import capture as snapshot_module
from holdfast.snapshot.routes import Pair
from holdfast.store.base import Location
from holdfast.store.linux import is_on_disk
from holdfast.store.urls import open_store
from tests.store.test_posix_storage import mounted
from tests.support import nursery
from tests.support.bound import bits
from tests.support.keepers import end_keepers, keeper_of
from tests.support.models import start_new_job
from tests.support.nursery import run_script, until

Rows = dict[str, torch.Tensor]


def folder_of(run: str, node_dir: Path) -> NodeFolder:
    return NodeFolder(open_store(Location(run)).location.url, node_dir=node_dir)


class Loop:
    """A small model that is trained, one step at a time."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.state: dict[str, object] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "progress": {"epoch": 0},
        }

    def step(self, seed: int = 0) -> None:
        inputs = torch.randn(8, 30, generator=torch.Generator().manual_seed(seed))
        self.model(inputs).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def bits(self) -> dict[str, bytes]:
        found = {f"model/{name}": bits(tensor) for name, tensor in self.model.state_dict().items()}
        for number, slots in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer/{number}/{name}": bits(tensor) for name, tensor in slots.items()}
        return found


@contextmanager
def late_copies() -> Iterator[None]:
    """Copies in the background begin a while after the save."""
    copy = snapshot_module._copy

    def late(pairs: Iterable[Pair]) -> None:
        time.sleep(0.3)
        copy(pairs)

    with patch.object(snapshot_module, "_copy", late):
        yield


def test_a_save_is_staged_then_durable_and_loads_like_any_other(run: str, memory: Memory) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        loop.step()
        saved = loop.bits()
        handle = checkpointer.save(1)
        loop.step()
        handle.staged.wait(60)
        handle.durable.wait(60)
        assert handle.durable.nbytes == handle.staged.nbytes > 0
        assert 0 < handle.staged.seconds <= handle.durable.seconds  # type: ignore[operator]
        assert handle.blocked_s > 0
    other = Loop(seed=1)
    report = holdfast.load(run, other.state)
    assert (report.step, report.place) == (1, str(handle.place))
    assert other.bits() == saved


def test_every_save_is_of_its_instant_while_training_goes_on(run: str, memory: Memory) -> None:
    loop = Loop()
    saved = {}
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        for step in range(1, 9):
            loop.step()
            saved[step] = loop.bits()
            checkpointer.save(step)
    for step, wanted in saved.items():
        other = Loop(seed=1)
        holdfast.load(f"{run}@step={step}", other.state)
        assert other.bits() == wanted


def test_a_run_without_checkpoints_begins_at_step_0(run: str, memory: Memory) -> None:
    loop = Loop()
    before = loop.bits()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        report = checkpointer.restore()
    assert (report.step, report.next_step, report.tier) == (None, 0, None)
    assert loop.bits() == before


def restored(run: str, memory: Memory | None) -> tuple[str | None, int, dict[str, bytes]]:
    """The state that another job would restore."""
    start_new_job()
    other = Loop(seed=1)
    with Checkpointer(run, other.state, memory=memory) as checkpointer:
        report = checkpointer.restore()
    return report.tier, report.next_step, other.bits()


def test_what_is_in_memory_is_restored_from_there(run: str, memory: Memory) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        loop.step()
        checkpointer.save(1)
    assert restored(run, memory) == ("node memory", 2, loop.bits())
    assert restored(run, None) == ("storage", 2, loop.bits())


def test_what_was_rolled_back_in_memory_is_not_restored(run: str, memory: Memory) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        loop.step()
        first = loop.bits()
        checkpointer.save(1)
        loop.step()
        checkpointer.save(2)
    holdfast_rollback(run, "step=1")
    tier, next_step, found = restored(run, memory)
    assert (next_step, found) == (2, first)
    assert tier == "node memory"  # the first one is there, too


@pytest.mark.parametrize("to", [1, 2])
@pytest.mark.parametrize("restores", [True, False])
def test_snapshots_that_a_rollback_left_behind_do_not_hold_up_saves(
    run: str, memory: Memory, to: int, restores: bool
) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step)
    holdfast_rollback(run, f"step={to}")
    holdfast.load(run, loop.state)
    with Checkpointer(run, loop.state, memory=memory, timeout_s=10.0) as checkpointer:
        if restores:
            assert checkpointer.restore().tier == ("storage" if to == 1 else "node memory")
        for step in range(to + 1, to + 4):
            loop.step()
            checkpointer.save(step).staged.wait(60)
    assert restored(run, memory) == ("node memory", to + 4, loop.bits())


def holdfast_rollback(run: str, to: str) -> None:
    command = [sys.executable, "-m", "holdfast.cli", "rollback", run, "--to", to, "--yes"]
    subprocess.run(command, check=True, capture_output=True)


def test_damaged_memory_is_noticed_and_storage_is_used(
    run: str, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        loop.step()
        checkpointer.save(1)
    with folder_of(run, memory.node_dir) as folder:
        for name in slot_names(folder):
            with Slot(folder, name) as slot:
                slot.data[5000] ^= 1
    assert restored(run, memory) == ("storage", 2, loop.bits())
    assert "the snapshots in memory cannot be used" in caplog.text


@pytest.mark.parametrize("prefix", ["slot-", "generation-"])
def test_files_in_memory_that_others_may_write_to_are_passed_over_and_storage_is_used(
    run: str, memory: Memory, prefix: str
) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        loop.step()
        checkpointer.save(1)
    start_new_job()
    with folder_of(run, memory.node_dir) as folder:
        opened_up = [folder.path / name for name in folder.names() if name.startswith(prefix)]
    assert opened_up
    for path in opened_up:
        path.chmod(0o666)
    assert restored(run, memory)[1:] == (2, loop.bits())
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.restore()
        checkpointer.save(2)
    assert restored(run, memory)[:2] == ("node memory", 3)


def test_the_next_save_goes_on_from_what_was_restored(run: str, memory: Memory) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.save(1)
    start_new_job()
    other = Loop(seed=1)
    with Checkpointer(run, other.state, memory=memory) as checkpointer:
        step = checkpointer.restore().next_step
        other.step()
        assert str(checkpointer.save(step).place) == "2.1"
    assert holdfast.open(run).step == 2


@pytest.mark.parametrize("num_before", [1, 3])
def test_a_run_that_was_removed_and_begun_anew_has_room_in_memory(run: str, memory: Memory, num_before: int) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        for step in range(num_before):
            checkpointer.save(step)
            checkpointer.wait()
    shutil.rmtree(run)
    start_new_job()
    with Checkpointer(run, loop.state, memory=memory, timeout_s=20) as checkpointer:
        for step in range(10, 14):
            loop.step()
            checkpointer.save(step)
    assert restored(run, memory) == ("node memory", 14, loop.bits())
    assert len(slot_names(folder_of(run, memory.node_dir))) == 2


def test_a_run_with_history_must_be_restored_first(run: str, memory: Memory) -> None:
    with Checkpointer(run, Loop().state, memory=memory) as checkpointer:
        checkpointer.save(1)
    start_new_job()
    checkpointer = Checkpointer(run, Loop().state, memory=memory)
    with pytest.raises(ConfigurationError, match="has a history"):
        checkpointer.save(2)
    checkpointer.close()


def stage_and_die(run: str, node_dir: Path) -> None:
    checkpointer = Checkpointer(run, {"w": torch.arange(1 << 20)}, memory=Memory(node_dir=node_dir))
    checkpointer.save(1).staged.wait(60)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_whose_checkpoints_are_all_in_memory_is_not_begun_anew_by_a_job_that_restored_nothing(
    memory: Memory, tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=1m") as disk:  # it takes the records, and no data
        run = str(disk / "run")
        killed = nursery.start(stage_and_die, run, memory.node_dir, err=tmp_path / "err")
        assert killed.wait() == -signal.SIGKILL, killed.err
        into = {"w": torch.zeros(1 << 20, dtype=torch.int64)}
        second = Checkpointer(run, into, memory=memory)
        for _ in range(2):
            with pytest.raises(
                ConfigurationError, match=r"saved step 1 of .*restore\(\) before the first save"
            ) as caught:
                second.save(5)
            assert caught.value.code == "config.unloaded_history"
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        assert second.restore().step == 1
        assert torch.equal(into["w"], torch.arange(1 << 20))
        second.save(2)
        second.close()
        assert [commit.step for commit in Run.open(open_store(Location(run))).lineage()] == [2, 1]


def test_without_memory_a_save_goes_to_storage_and_returns_when_that_is_done(run: str) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=None) as checkpointer:
        handle = checkpointer.save(1)
        assert handle.durable.is_done
        assert holdfast.open(run).step == 1
        assert repr(handle) == "<Handle step 1 at 1.1: staged, durable>"


def test_where_memory_does_not_suffice_saves_go_to_storage_and_say_so(
    run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # As the 64 MiB of /dev/shm in a container.
    with mounted(tmp_path / "shm", "tmpfs", "size=64m") as node_dir:
        loop = Loop()
        loop.state["large"] = torch.ones(10 << 20)
        with Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir)) as checkpointer:
            handles = [checkpointer.save(step) for step in (1, 2)]
            assert all(handle.durable.is_done for handle in handles)
            assert [handle.place for handle in handles] == sorted(Run.open(open_store(Location(run))).places())
        assert "saves go to storage, and training waits for them" in caplog.text
        assert "the size of the file system" in caplog.text
        end_keepers(node_dir)
    assert holdfast.open(run).step == 2


def test_a_change_under_the_guard_waits_and_one_without_voids_the_save(
    run: str, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    loop.step()
    weight = loop.model.get_parameter("0.weight")
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.save(1).durable.wait(60)
        saved = loop.bits()
        with late_copies():
            handle = checkpointer.save(2)
            with checkpointer.guard(), torch.no_grad():
                weight.mul_(2)
            handle.durable.wait(60)
            voided = checkpointer.save(3)
            with torch.no_grad():
                weight.mul_(2)
            with pytest.raises(StateError, match=r"model/0\.weight.*was changed"):
                voided.staged.wait(60)
        checkpointer.save(4).durable.wait(60)
        checkpointer._handles._handles.remove(voided) if voided in checkpointer._handles._handles else None
    assert "step 3 is not saved" in caplog.text
    with pytest.raises(holdfast.NotFoundError):
        holdfast.open(f"{run}@step=3")
    other = Loop(seed=1)
    holdfast.load(f"{run}@step=2", other.state)
    assert other.bits() == saved


def test_a_copy_that_fails_in_the_background_is_told_and_the_next_save_works(
    run: str, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise OSError(5, "no such luck")

    checkpointer = Checkpointer(run, Loop().state, memory=memory)
    checkpointer.save(1).durable.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.checkpointer.staging.write_generation", broken)
        failed = checkpointer.save(2)
        with pytest.raises(StorageError, match="cannot be used: no such luck"):
            failed.staged.wait(60)
    checkpointer.save(3).durable.wait(60)
    assert "step 2 is not saved" in caplog.text
    checkpointer.close()
    assert holdfast.open(run).step == 3


@pytest.mark.parametrize("when_full", ["wait", "skip"])
def test_while_storage_is_slow_saves_wait_or_are_skipped(run: str, memory: Memory, when_full: str) -> None:
    loop = Loop()
    checkpointer = Checkpointer(run, loop.state, memory=memory, when_full=when_full)  # type: ignore[arg-type]
    checkpointer.save(1).durable.wait(60)
    with folder_of(run, memory.node_dir) as folder:
        keeper = keeper_of(folder.path)
        os.kill(keeper, signal.SIGSTOP)
        first = [checkpointer.save(step) for step in (2, 3)] if when_full == "skip" else [checkpointer.save(2)]
        if when_full == "skip":
            handle = checkpointer.save(4)
            assert handle.skipped
            with pytest.raises(StorageError, match="step 4 was skipped: the snapshots of rank 0"):
                handle.durable.wait()
        os.kill(keeper, signal.SIGCONT)
    for each in first:
        if not each.skipped:
            each.durable.wait(60)
    last = checkpointer.save(5)
    last.durable.wait(60)
    checkpointer.close()  # a skipped save is no failure
    assert holdfast.open(run).step == 5


def test_a_save_that_waits_for_memory_says_so(
    tmp_path: Path, run: str, memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.checkpointer.memory_tier._PATIENCE_S", 0.2)
    records = tmp_path / "records"
    with (
        Checkpointer(run, Loop().state, memory=memory, listeners=[JsonLines(records)]) as checkpointer,
        folder_of(run, memory.node_dir) as folder,
        ThreadPoolExecutor(1) as pool,
    ):
        checkpointer.save(1).durable.wait(60)
        keeper = keeper_of(folder.path)
        os.kill(keeper, signal.SIGSTOP)
        checkpointer.save(2)
        waiting = pool.submit(checkpointer.save, 3)
        until(lambda: "save of step 3 waits for memory: the snapshots of rank 0 are not durable yet" in caplog.text)
        os.kill(keeper, signal.SIGCONT)
        waiting.result(60)
    told = [json.loads(line) for path in records.iterdir() for line in path.read_text().splitlines()]
    waits = [(each["step"], each["message"]) for each in told if each["event"] == "SaveWaiting"]
    assert waits == [(3, "the snapshots of rank 0 are not durable yet")]


def test_restoring_in_the_middle_waits_for_the_copy_and_leaves_it_as_it_was(run: str, memory: Memory) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        loop.step(1)
        first = loop.bits()
        checkpointer.save(1).durable.wait(60)
        loop.step(2)
        second = loop.bits()
        with late_copies():
            checkpointer.save(2)
            report = checkpointer.restore()
        assert report.step in (1, 2)
        assert loop.bits() == (first if report.step == 1 else second)
    other = Loop(seed=1)
    holdfast.load(f"{run}@step=2", other.state)
    assert other.bits() == second


def test_a_keeper_that_died_is_replaced_at_the_next_save(run: str, memory: Memory) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer, folder_of(run, memory.node_dir) as folder:
        checkpointer.save(1).durable.wait(60)
        keeper = keeper_of(folder.path)
        os.kill(keeper, signal.SIGKILL)
        until(lambda: not is_kept(folder))
        for step in (2, 3, 4):
            loop.step()
            checkpointer.save(step)
    assert holdfast.open(run).step == 4


def test_memory_that_somebody_removed_is_taken_anew(run: str, memory: Memory) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.save(1)
        checkpointer.wait()
        folder = folder_of(run, memory.node_dir)
        for name in slot_names(folder):
            folder.remove(name)
        loop.step()
        checkpointer.save(2)
        checkpointer.wait()
        assert slot_names(folder)
    assert restored(run, memory) == ("node memory", 3, loop.bits())


def test_a_job_whose_run_was_taken_over_is_told(run: str, memory: Memory) -> None:
    checkpointer = Checkpointer(run, Loop().state, memory=memory)
    checkpointer.save(1).durable.wait(60)
    of = Run.open(open_store(Location(run)))
    of.open_epoch(after=1, opened_from=Place(1, 1), why="takeover", world_size=1, incarnation="1" * 32)
    fenced = checkpointer.save(2)
    with pytest.raises(FencedError):
        fenced.durable.wait(60)
    with pytest.raises(FencedError):
        checkpointer.save(3)
    checkpointer.close()


def test_of_jobs_that_save_in_turn_none_fails_because_another_one_came_first(run: str, memory: Memory) -> None:
    loop = Loop()
    checkpointer = Checkpointer(run, loop.state, memory=memory, takeover="always")
    checkpointer.save(1).durable.wait(60)
    with folder_of(run, memory.node_dir) as folder:
        keeper = keeper_of(folder.path)
    os.kill(keeper, signal.SIGSTOP)
    under_way = checkpointer.save(2)
    under_way.staged.wait(60)
    of = Run.open(open_store(Location(run)))
    of.open_epoch(after=1, opened_from=Place(1, 1), why="takeover", world_size=1, incarnation="1" * 32)
    os.kill(keeper, signal.SIGCONT)
    checkpointer.wait()
    assert isinstance(under_way.durable.error, FencedError)
    loop.step()
    checkpointer.save(3)
    checkpointer.close()
    assert [(each.step, each.place) for each in holdfast.ls(run)] == [(3, "3.1"), (1, "1.1")]
    assert restored(run, memory)[1:] == (4, loop.bits())


TRAINER = """
import os, signal, sys
from pathlib import Path
from holdfast import Checkpointer, Memory
from tests.checkpointer.test_checkpointer import Loop

loop = Loop()
with Checkpointer(sys.argv[1], loop.state, memory=Memory(node_dir=Path(sys.argv[2]))) as checkpointer:
    start = checkpointer.restore().next_step
    for step in range(start, start + 1000):
        loop.step(step)
        handle = checkpointer.save(step)
        handle.staged.wait(60)
        print(step, flush=True)
        if step - start == int(sys.argv[3]):
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_was_staged_before_the_trainer_was_killed_is_restored_from_memory(run: str, memory: Memory) -> None:
    for _ in range(2):
        done = run_script(TRAINER, run, str(memory.node_dir), "3")
        assert done.status == -signal.SIGKILL, done.err
        last = int(done.out.split()[-1])
        tier, next_step, found = restored(run, memory)
        assert (tier, next_step) == ("node memory", last + 1)
        assert found == expected(last + 1)


def expected(num_steps: int) -> dict[str, bytes]:
    """A loop that was never interrupted."""
    loop = Loop()
    for step in range(num_steps):
        loop.step(step)
    return loop.bits()


def test_a_node_dir_on_a_disk_is_used_with_a_warning(
    run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        on_disk = is_on_disk(folder)
    finally:
        os.close(folder)
    with Checkpointer(run, Loop().state, memory=Memory(node_dir=tmp_path)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step)
    end_keepers(tmp_path)
    assert caplog.text.count(f"node_dir '{tmp_path}' is on a disk") == on_disk
