"""Odd content of a run's folder in a node's memory: it may cost a snapshot, and never the ability to save."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import holdfast
from holdfast import Checkpointer, Memory
from holdfast.keeper import client
from holdfast.keeper.client import ensure_keeper
from holdfast.node_memory import keeper_starts
from holdfast.node_memory.inventory import LOG_NAME
from holdfast.node_memory.keeper_lock import is_kept, try_lock
from holdfast.node_memory.keeper_starts import MAX_STARTS, Starts, note_start, starts
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.slots import Slot, SlotState, slot_names
from tests.checkpointer.test_checkpointer import Loop, folder_of
from tests.faults.test_memory_trouble import FALLEN_BACK, saved
from tests.support.command_line import holdfast_command
from tests.support.keepers import end_keepers, keeper_of
from tests.support.models import start_new_job
from tests.support.nursery import until


def put(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    if kind == "readable by others":
        path.chmod(0o644)
        return
    if kind == "garbage":
        path.write_bytes(os.urandom(4096))
        return
    path.unlink()
    if kind == "queue":
        os.mkfifo(path, 0o600)
    elif kind.endswith("folder"):
        path.mkdir(0o700)
        if kind == "full folder":
            (path / "something").touch()
    elif kind == "empty":
        path.touch(0o600)
    elif kind == "link":
        path.symlink_to("/dev/zero")


class Left(NamedTuple):
    """A run, and the memory of its node, which a killed job has left: step 0 is durable, and step 1 lies sealed in
    memory alone. The keeper is dead too."""

    run: str
    node_dir: Path

    @property
    def folder(self) -> Path:
        """The folder in memory."""
        return folder_of(self.run, self.node_dir).path


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of what a killed job has left. Its originals lay beside it, in `now`."""
    parent = tmp_path_factory.mktemp("killed")
    run, node_dir = str(parent / "now" / "run"), parent / "now" / "node"
    node_dir.mkdir(parents=True)
    loop = Loop()
    checkpointer = Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir), timeout_s=20)
    saved(loop, checkpointer, 0).durable.wait(60)
    stored = Path(run) / "checkpoints"
    stored.rename(run + ".away")
    stored.touch()
    handle = saved(loop, checkpointer, 1)
    until(lambda: bool(handle.trouble))
    end_keepers(node_dir)
    with pytest.raises(holdfast.HoldfastError):
        checkpointer.wait(0.1)
    checkpointer.__exit__(RuntimeError, RuntimeError(), None)
    end_keepers(node_dir)
    stored.unlink()
    Path(run + ".away").rename(stored)
    (parent / "now").rename(parent / "kept")
    return parent / "kept"


@pytest.fixture
def left(kept: Path) -> Iterator[Left]:
    """The remains of a killed job: a copy for each test, in the place of the originals, whose bytes name that path."""
    start_new_job()
    now = Path(shutil.copytree(kept, kept.with_name("now")))
    yield Left(str(now / "run"), now / "node")
    end_keepers(now / "node")
    shutil.rmtree(now)


def sealed(path: Path) -> Path:
    """The file of the slot that is sealed."""
    with NodeFolder.at(path) as folder:
        for name in slot_names(folder):
            with Slot(folder, name) as slot:
                if slot.state == SlotState.SEALED:
                    return path / name
    raise AssertionError("no slot is sealed")


def goes_on(left: Left) -> tuple[int | None, list[bool]]:
    """The step that a new job restores, and whether each of its saves became durable."""
    loop = Loop(seed=1)
    with Checkpointer(left.run, loop.state, memory=Memory(node_dir=left.node_dir), timeout_s=20) as checkpointer:
        step = checkpointer.restore().step
        handles = [saved(loop, checkpointer, number) for number in range(10, 13)]
    return step, [handle.durable.is_done for handle in handles]


@pytest.mark.parametrize("kind", ["lost", "full folder", "garbage", "readable by others"])
def test_a_damaged_generation_of_a_sealed_slot_does_not_block_all_later_saves(left: Left, kind: str) -> None:
    newest = max(left.folder.glob("generation-*"), key=lambda path: path.stat().st_mtime_ns)
    put(newest, kind)
    assert goes_on(left) == (0, [True] * 3)
    assert "nothing is known of its checkpoint" in (left.folder / "keeper.log").read_text()


@pytest.mark.parametrize("kind", ["queue", "full folder", "empty", "readable by others"])
@pytest.mark.parametrize(
    "name", ["keeper.lock", "keeper.log", "keeper.protocol", "keeper.run", "trainers.lock", "slot"]
)
@pytest.mark.few(10)
def test_what_lies_in_place_of_a_file_of_the_folder_does_not_keep_a_job_from_saving(
    left: Left, name: str, kind: str
) -> None:
    put(sealed(left.folder) if name == "slot" else left.folder / name, kind)
    step, are_durable = goes_on(left)
    assert step in (0, 1)
    assert are_durable == [True] * 3


@pytest.mark.parametrize("name", ["slot-7-0123456789abcdef", "generation-00", "given-up-00", "new-0123456789abcdef"])
@pytest.mark.parametrize("kind", ["folder", "full folder", "queue"])
@pytest.mark.few(5)
def test_a_name_in_the_folder_that_cannot_be_used_does_not_end_the_keeper(
    run: str, node_dir: Path, name: str, kind: str
) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir), timeout_s=20) as checkpointer:
        saved(loop, checkpointer, 0).durable.wait(60)
        with folder_of(run, node_dir) as folder:
            keeper = keeper_of(folder.path)
            os.close(folder.create(name))
            put(folder.path / name, kind)
            for step in range(1, 4):
                saved(loop, checkpointer, step).durable.wait(60)
            assert keeper_of(folder.path) == keeper
            assert (name in folder.names()) == (kind == "full folder")
            assert (folder.path / "keeper.log").stat().st_size < 4096


def broken_keepers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepers that start from now on crash at their first look at the folder."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'holdfast.keeper' in sys.orig_argv:\n"
        "    import holdfast.keeper.daemon as daemon\n"
        "    def look(self):\n"
        "        raise ZeroDivisionError('a defect')\n"
        "    daemon.Keeper.look = look\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"), prepend=os.pathsep)


@pytest.mark.slow
def test_a_keeper_that_always_crashes_is_not_started_for_ever_and_saves_go_to_storage(
    run: str, node_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    checkpointer = Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir), timeout_s=30)
    saved(loop, checkpointer, 0).durable.wait(60)
    end_keepers(node_dir)
    broken_keepers(tmp_path, monkeypatch)
    monkeypatch.setattr(keeper_starts, "_FIRST_PAUSE_S", 0.02)  # the next test has the usual one
    for step in range(1, 8):
        saved(loop, checkpointer, step)
    assert FALLEN_BACK in caplog.text
    assert "of them died before they had made anything durable" in caplog.text
    assert "a defect" in caplog.text
    assert holdfast.open(run).step == 7
    with folder_of(run, node_dir) as folder:
        log = folder.path / "keeper.log"
        until(lambda: log.read_text().count("Traceback") >= MAX_STARTS)
        time.sleep(2.0)  # the start after the next would be due, and its keeper would be dead
        # The save and its watcher may start one each.
        assert MAX_STARTS <= log.read_text().count("Traceback") <= MAX_STARTS + 1
    checkpointer.__exit__(RuntimeError, RuntimeError(), None)


@pytest.mark.slow
def test_a_keeper_that_works_again_is_started_and_until_then_the_error_says_why_the_last_died(
    run: str, node_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(run).mkdir()
    with folder_of(run, node_dir) as folder:
        with monkeypatch.context() as broken:
            broken_keepers(tmp_path, broken)
            began_s = time.monotonic()
            for _ in range(MAX_STARTS):
                ensure_keeper(folder, run)
                until(lambda: not is_kept(folder))
            with (folder.path / LOG_NAME).open("a") as log:
                log.write("2026-11-25 02:44:47,075 INFO another keeper is at work\n")
            with pytest.raises(holdfast.ConfigurationError, match=r"did not start .5 of them died.*: a defect"):
                ensure_keeper(folder, run)
            assert time.monotonic() - began_s > 2.0
        with pytest.raises(holdfast.ConfigurationError, match="did not start"):
            ensure_keeper(folder, run)
        monkeypatch.setattr(keeper_starts, "FORGOTTEN_S", 0.0)
        ensure_keeper(folder, run)
        assert is_kept(folder)


def test_the_last_start_is_not_called_dead_while_the_keeper_that_another_process_started_lives(
    run: str, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(run).mkdir()
    with folder_of(run, node_dir) as folder:
        locks: list[int | None] = []

        def started_meanwhile(_: NodeFolder) -> Starts:
            if not locks:
                locks.append(try_lock(folder))
            return Starts(MAX_STARTS, 0.0)

        monkeypatch.setattr(client, "starts", started_meanwhile)
        ensure_keeper(folder, run)
        (lock,) = locks
        assert lock is not None
        os.close(lock)


@pytest.mark.slow
def test_starts_of_a_keeper_that_makes_checkpoints_durable_are_not_counted(run: str, node_dir: Path) -> None:
    loop = Loop()
    with Checkpointer(run, loop.state, memory=Memory(node_dir=node_dir), timeout_s=30) as checkpointer:
        for step in range(MAX_STARTS + 2):
            saved(loop, checkpointer, step).durable.wait(60)
            with folder_of(run, node_dir) as folder:
                until(lambda: starts(folder).number == 0)
                os.kill(keeper_of(folder.path), signal.SIGKILL)
                until(lambda: not is_kept(folder))
    assert holdfast.open(run).step == MAX_STARTS + 1


def test_starts_are_forgotten_in_time_although_the_clock_was_set_back(
    run: str, node_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They counted until the clock had caught up: saves went to storage for so long."""
    with folder_of(run, node_dir) as folder:
        with monkeypatch.context() as ahead:
            ahead.setattr(time, "time", lambda: 4e9)
            note_start(folder)
        assert starts(folder).number == 1
        monkeypatch.setattr(keeper_starts, "FORGOTTEN_S", 0.05)
        time.sleep(0.1)
        assert starts(folder).number == 0


def test_a_folder_that_is_not_private_costs_what_is_in_it_and_a_restore_goes_to_storage(
    left: Left, caplog: pytest.LogCaptureFixture
) -> None:
    left.folder.chmod(0o755)
    assert goes_on(left) == (0, [True] * 3)
    assert "the snapshots in memory cannot be used, restoring from storage instead: [config.not_private]" in caplog.text


def by_a_link(run: str, tmp_path: Path) -> str:
    """Another path of `run`, through a link."""
    (tmp_path / "link").symlink_to(Path(run).parent)
    return str(tmp_path / "link" / Path(run).name)


def test_a_restart_by_another_path_of_the_run_finds_its_memory(left: Left, tmp_path: Path) -> None:
    run, node_dir = left
    other = by_a_link(run, tmp_path)
    listed = holdfast_command("node", "--json", "--node-dir", node_dir, other).json["runs"]
    assert [each["run"] for each in listed] == [run]
    loop = Loop(seed=1)
    with Checkpointer(other, loop.state, memory=Memory(node_dir=node_dir), timeout_s=20) as checkpointer:
        report = checkpointer.restore()
        assert (report.tier, report.step) == ("node memory", 1)
        saved(loop, checkpointer, 2).durable.wait(60)
    assert len(list(node_dir.glob("holdfast-*/*"))) == 1
    assert [holdfast.open(f"{run}@step={step}").step for step in range(3)] == [0, 1, 2]


def test_a_job_that_restored_nothing_by_another_path_does_not_begin_a_run_anew_that_memory_holds(
    run: str, node_dir: Path, tmp_path: Path
) -> None:
    checkpointer = Checkpointer(run, Loop().state, memory=Memory(node_dir=node_dir), timeout_s=20)
    (Path(run) / "checkpoints").parent.mkdir()
    with folder_of(run, node_dir) as folder:
        ensure_keeper(folder, run)
        os.kill(keeper_of(folder.path), signal.SIGSTOP)
        checkpointer.save(0).staged.wait(60)
        os.kill(keeper_of(folder.path), signal.SIGKILL)
        until(lambda: not is_kept(folder))
        stored = Path(run) / "checkpoints"
        stored.touch()  # so that the next keeper seals it and cannot make it durable
    checkpointer.__exit__(RuntimeError, RuntimeError(), None)
    start_new_job()
    other = Checkpointer(by_a_link(run, tmp_path), Loop().state, memory=Memory(node_dir=node_dir), timeout_s=20)
    with pytest.raises(holdfast.ConfigurationError, match="is in the memory of this job") as caught:
        other.save(0)
    assert caught.value.code == "config.unloaded_history"
    other.__exit__(RuntimeError, RuntimeError(), None)


def test_a_keeper_that_is_started_by_another_path_keeps_the_same_memory(
    run: str, node_dir: Path, tmp_path: Path
) -> None:
    Path(run).mkdir()
    command = [sys.executable, "-m", "holdfast.cli", "keeper", by_a_link(run, tmp_path), "--node-dir", str(node_dir)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        with folder_of(run, node_dir) as folder:
            until(lambda: is_kept(folder))
        process.terminate()
        assert process.wait(30) == 0
