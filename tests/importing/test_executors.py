"""Imports and exports on executors: the same files whoever writes them; deaths of processes at several points."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.cli import run as run_command
from holdfast.exporting import file_tasks
from holdfast.importing import first_checkpoint
from holdfast.interop.formats import find_state
from holdfast.interop.stored_source import StoredSource, shared_store
from holdfast.run.paths import parse
from holdfast.store.base import Bytes, Location
from holdfast.store.posix import PosixWriter
from tests.support.command_line import damage, holdfast_command
from tests.support.dying_writers import die_in_file
from tests.support.executor_work import (
    NBYTES,
    VALUES_NBYTES,
    check_export,
    check_run,
    check_work,
    exported,
    imported,
    tensors,
    write_source,
)
from tests.support.nursery import start

SPAWN = multiprocessing.get_context("spawn")
BEGAN_S = 60.0


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(2, mp_context=SPAWN) as pool:
        yield pool


@pytest.fixture
def run(tmp_path: Path) -> Path:
    imported(write_source(tmp_path / "source"), tmp_path / "run")
    return tmp_path / "run"


def test_threads_write_what_this_process_writes(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as threads:
        check_work(tmp_path, threads)


def test_processes_write_what_this_process_writes(tmp_path: Path, processes: ProcessPoolExecutor) -> None:
    check_work(tmp_path, processes)


def test_the_commands_start_processes_and_say_what_they_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_checkpoint, "FILE_NBYTES", NBYTES)
    source, run = write_source(tmp_path / "source"), tmp_path / "run"
    done = holdfast_command("import", source, run, "--step", "7", "--workers", "2", "--read-back", "--json")
    assert done.status == 0, done.err
    assert (done.json["kept"], done.json["written_nbytes"]) == ([], done.json["nbytes"])
    check_run(run)
    again = holdfast_command("import", source, run, "--step", "7", "--json")  # as after a kill behind the commit
    assert (len(again.json["kept"]), again.json["written_nbytes"], again.json["place"]) == (6, 0, "1.1")


def begun(source: str, run: str, number: int, at: float) -> None:
    """Begin an import, and die in one of its files."""
    die_in_file(number, at)
    imported(Path(source), Path(run))


def begun_export(run: str, folder: str, number: int, at: float) -> None:
    """Begin an export, and die in one of its files."""
    die_in_file(number, at)
    exported(Path(run), Path(folder), "hf")


def inodes(files: Iterator[Path]) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(("number", "at"), [(0, 0.0), (2, 0.5), (5, 0.0), (5, 0.9)])
def test_an_import_that_was_killed_goes_on_with_what_is_whole(tmp_path: Path, number: int, at: float) -> None:
    source, run = write_source(tmp_path / "source"), tmp_path / "run"
    process = start(begun, str(source), str(run), number, at, err=tmp_path / "err")
    assert process.wait() == -signal.SIGKILL, process.err
    with pytest.raises(holdfast.NotFoundError):
        holdfast.open(run)
    (folder,) = (run / "checkpoints").iterdir()
    before = inodes(folder.glob("data*"))
    assert len(before) == number
    report = imported(source, run)
    check_run(run)
    assert report.kept == tuple(sorted(before))
    assert {name: about for name, about in inodes(folder.glob("data*")).items() if name in before} == before
    sizes = {path.name: path.stat().st_size for path in folder.glob("data*")}
    assert report.written_nbytes == sum(size for name, size in sizes.items() if name not in before)
    assert holdfast_command("verify", run, "--deep").status == 0
    assert holdfast_command("doctor", run).status == 0


@pytest.mark.parametrize(("number", "at"), [(0, 0.5), (3, 0.5), (5, 0.9)])
def test_an_export_that_was_killed_goes_on_with_what_is_whole(
    tmp_path: Path, run: Path, number: int, at: float
) -> None:
    folder = tmp_path / "hf"
    process = start(begun_export, str(run), str(folder), number, at, err=tmp_path / "err")
    assert process.wait() == -signal.SIGKILL, process.err
    before = inodes(folder.glob("model*"))
    assert len(before) == number
    report = exported(run, folder, "hf")
    check_export(folder)
    assert report.kept == tuple(sorted(before))
    assert {name: about for name, about in inodes(folder.glob("model*")).items() if name in before} == before
    assert report.read_nbytes == (6 - number) * NBYTES + (VALUES_NBYTES if number == 0 else 0)
    assert report.written_nbytes < (6 - number) * (NBYTES + 4096) + 4096


def test_a_data_file_that_rotted_after_a_kill_is_written_again(tmp_path: Path) -> None:
    source, run = write_source(tmp_path / "source"), tmp_path / "run"
    assert start(begun, str(source), str(run), 3, 0.0, err=tmp_path / "err").wait() == -signal.SIGKILL
    (folder,) = (run / "checkpoints").iterdir()
    damage(folder / "data-00001.safetensors", 0.7)
    report = imported(source, run)
    assert report.kept == ("data-00000.safetensors", "data-00002.safetensors")
    check_run(run)


@pytest.mark.parametrize("keeps_time", [False, True], ids=["new time", "time set back"])
def test_another_source_does_not_go_on_with_what_was_begun(tmp_path: Path, keeps_time: bool) -> None:
    source, run = write_source(tmp_path / "source"), tmp_path / "run"
    assert start(begun, str(source), str(run), 3, 0.0, err=tmp_path / "err").wait() == -signal.SIGKILL
    shard = source / "model-00001-of-00002.safetensors"
    times = shard.stat().st_atime_ns, shard.stat().st_mtime_ns
    os.utime(shard)  # its bytes may be others now
    if keeps_time:
        os.utime(shard, ns=times)
    report = imported(source, run)
    assert (report.kept, report.place) == ((), "2.1")
    assert holdfast.open(run).place == "2.1"


def test_a_worker_that_dies_is_an_error_that_names_its_file_and_leaves_no_half(tmp_path: Path, run: Path) -> None:
    folder = tmp_path / "hf"
    with (
        ProcessPoolExecutor(1, mp_context=SPAWN, initializer=die_in_file, initargs=(2, 0.5)) as pool,
        pytest.raises(holdfast.StorageError, match=r"model-00003-of-00006\.safetensors") as caught,
    ):
        exported(run, folder, "hf", pool)
    assert (caught.value.code, caught.value.retryable) == ("storage.worker", True)
    assert caught.value.path == str(folder / "model-00003-of-00006.safetensors")
    assert "Repeat the call" in caught.value.action
    assert not list(folder.glob(".tmp*"))
    assert not list(folder.glob("model.safetensors.index.json"))
    assert len(exported(run, folder, "hf").kept) == 2
    check_export(folder)

    source = tmp_path / "source"
    with (
        ProcessPoolExecutor(1, mp_context=SPAWN, initializer=die_in_file, initargs=(1, 0.5)) as pool,
        pytest.raises(holdfast.StorageError, match=r"data-00001\.safetensors"),
    ):
        imported(source, tmp_path / "other", pool)
    assert not list((tmp_path / "other").rglob(".tmp*"))
    assert imported(source, tmp_path / "other").kept == ("data-00000.safetensors",)


def command_of(pid: str) -> bytes:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def with_two_workers(run: str, folder: str) -> None:
    file_tasks._RECORD_NBYTES = file_tasks._TASK_NBYTES = 0  # type: ignore[misc]
    run_command(["export", run, folder, "--to", "hf", "--shard-size", "1.2MB", "--workers", "2"])


def test_workers_end_with_a_command_that_is_killed(tmp_path: Path, run: Path) -> None:
    process = start(with_two_workers, str(run), str(tmp_path / "hf"), err=tmp_path / "err")
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    began = time.monotonic()
    found: list[str] = []
    while len(found) < 2:
        assert time.monotonic() - began < BEGAN_S, process.err
        time.sleep(0.02)
        found = [pid for pid in children.read_text().split() if b"spawn_main" in command_of(pid)]
    assert process.kill() == -signal.SIGKILL
    while any(Path(f"/proc/{pid}").exists() for pid in found):
        assert time.monotonic() - began < BEGAN_S
        time.sleep(0.01)
    exported(run, tmp_path / "hf", "hf")
    check_export(tmp_path / "hf")


def test_an_error_in_a_worker_is_the_error_of_the_call(
    tmp_path: Path, run: Path, processes: ProcessPoolExecutor
) -> None:
    (data,) = run.glob("checkpoints/*/data-00004.safetensors")
    damage(data, 0.9)
    with pytest.raises(holdfast.CorruptError) as caught:
        exported(run, tmp_path / "hf", "hf", processes)
    assert caught.value.code == "corrupt.file"
    assert caught.value.path == str(data)


def test_a_device_that_writes_other_bytes_is_found_by_reading_back(
    tmp_path: Path, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PosixWriter.write_at

    def flipped(writer: PosixWriter, offset: int, data: Bytes) -> None:
        if len(data) > 9000:  # not a head alone
            data[9000] ^= 1
        write(writer, offset, data)

    monkeypatch.setattr(PosixWriter, "write_at", flipped)
    with pytest.raises(holdfast.CorruptError, match="does not have the bytes that were written"):
        exported(run, tmp_path / "hf", "hf", read_back=True)
    with pytest.raises(holdfast.CorruptError, match="does not have the bytes that were written"):
        imported(tmp_path / "source", tmp_path / "other", read_back=True)


def test_a_pool_that_forks_is_refused(tmp_path: Path, run: Path) -> None:
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool,
        pytest.raises(holdfast.ConfigurationError, match=r"get_context\(\"spawn\"\)") as caught,
    ):
        exported(run, tmp_path / "hf", "hf", pool)
    assert caught.value.code == "config.executor"
    with pytest.raises(TypeError, match=r"must be a concurrent\.futures\.Executor"):
        exported(run, tmp_path / "hf", "hf", "processes")  # type: ignore[arg-type]
    assert not (tmp_path / "hf").exists()


def test_workers_open_any_source_that_a_path_can_name(tmp_path: Path, run: Path) -> None:
    torch.save(tensors(), tmp_path / "file.pt")
    (alone,) = (run / "checkpoints").iterdir()
    shutil.copytree(alone, tmp_path / "alone")
    with ThreadPoolExecutor(2) as threads:
        for number, source in enumerate(["file.pt", "alone", "source", "run@step=7", "run@1.1"]):
            exported(tmp_path / source, tmp_path / f"hf{number}", "hf", threads)
            check_export(tmp_path / f"hf{number}")
        imported(tmp_path / "file.pt", tmp_path / "other", threads)
    check_run(tmp_path / "other")


def test_a_worker_that_sees_another_checkpoint_says_so(tmp_path: Path, run: Path) -> None:
    source = StoredSource.of(find_state(parse(run)).state)
    with pytest.raises(holdfast.StorageError, match="finds another checkpoint at") as caught:
        source._replace(identity="0" * 16).open()
    assert caught.value.code == "storage.not_shared"
    with pytest.raises(holdfast.StorageError, match="sees other bytes in"):
        shared_store(Location(str(run)), "holdfast.json", b"{}")
    with pytest.raises(holdfast.StorageError, match="does not see"):
        shared_store(Location(str(tmp_path / "none")), "holdfast.json", b"{}")
