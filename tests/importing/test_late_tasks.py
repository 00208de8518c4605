"""Tasks that run late, twice or on a source that was replaced: no mixture, and no file of a later call is touched."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast.errors import ErrorWire
from holdfast.exporting import file_tasks
from holdfast.exporting.file_tasks import FilesTask
from holdfast.importing import data_file_task
from holdfast.interop import stored_source
from holdfast.store.posix import PosixStore
from holdfast.workers import on_processes
from tests.support.command_line import damage
from tests.support.executor_work import check_export, check_run, exported, imported, write_source

WAIT_S = 60.0


class TaskByTask(Executor):
    """Runs each task at once, `times` times, as in a process of its own; then calls `after` with their number."""

    def __init__(self, after: Callable[[int], object] = lambda _: None, *, times: int = 1) -> None:
        self.after = after
        self.times = times
        self.number = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        results = []
        for _ in range(self.times):
            stored_source._opened.cache_clear()
            results.append(fn(*args, **kwargs))
        future.set_result(results[-1])
        self.number += 1
        self.after(self.number)
        return future


class FirstResultOnly(TaskByTask):
    """Runs the first task only, and gives its result for all."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if not self.number:
            self.first = super().submit(fn, *args, **kwargs)
        future = Future[Any]()
        future.set_result(self.first.result())
        return future


class InterruptedPool(ThreadPoolExecutor):
    """One thread, whose second task halts; then Ctrl-C comes while the third is submitted."""

    def __init__(self) -> None:
        super().__init__(1)
        self.halted, self.go = Event(), Event()
        self.futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if len(self.futures) == 2:
            assert self.halted.wait(WAIT_S)
            raise KeyboardInterrupt
        self.futures.append(super().submit(fn, *args, **kwargs))
        return self.futures[-1]

    def halt(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        """Halt the second task when it calls the function, or, where that looks at a file, when it has looked."""
        work, caller, calls = getattr(owner, name), get_ident(), list[int]()
        is_write = name.startswith("write_")

        def halting(*args: Any, **kwargs: Any) -> Any:
            found = None if is_write else work(*args, **kwargs)
            if get_ident() != caller and (name != "nbytes" or "/data-" in args[1]):
                calls.append(1)
                if len(calls) == 2:
                    self.halted.set()
                    assert self.go.wait(WAIT_S)
            return work(*args, **kwargs) if is_write else found

        monkeypatch.setattr(owner, name, halting)

    def late_code(self) -> str:
        """Let the task go on, and return the code of its error."""
        self.go.set()
        outcome = self.futures[1].result(WAIT_S)
        assert isinstance(outcome, ErrorWire)
        return outcome.code


def replace_file(source: Path) -> None:
    """Write a file of `source` anew, with the same size and metadata, and other values."""
    path = source / "model-00002-of-00002.safetensors"
    other = path.with_suffix(".new")
    shutil.copyfile(path, other)
    damage(other, 0.5)
    os.replace(other, path)


def written(folder: Path, pattern: str) -> dict[str, tuple[int, int]]:
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob(pattern)}


@pytest.mark.parametrize("read_back", [False, True])
@pytest.mark.parametrize("number", [1, 4, 6])
def test_a_source_that_is_replaced_while_workers_run_is_an_error_and_no_mixture(
    tmp_path: Path, number: int, read_back: bool
) -> None:
    source = write_source(tmp_path / "source")

    def replace(done: int) -> None:
        if done == number:
            replace_file(source)

    with pytest.raises(holdfast.CorruptError, match="was replaced or changed after it was opened") as caught:
        exported(source, tmp_path / "hf", "hf", TaskByTask(replace), read_back=read_back)
    assert "begin anew" in caught.value.action
    assert str(caught.value.path).startswith(str(source))
    assert not (tmp_path / "hf" / "model.safetensors.index.json").exists()
    with pytest.raises(holdfast.CorruptError, match="was replaced or changed after it was opened"):
        imported(source, tmp_path / "run", TaskByTask(replace), read_back=read_back)
    with pytest.raises(holdfast.NotFoundError):
        holdfast.open(tmp_path / "run")


@pytest.mark.parametrize("at", [(FilesTask, "_is_sound"), (file_tasks, "write_together")])
@pytest.mark.parametrize("is_other", [False, True], ids=["same export", "another export"])
def test_a_task_of_an_interrupted_export_does_not_touch_the_files_of_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: tuple[Any, str], is_other: bool
) -> None:
    source, folder = write_source(tmp_path / "source"), tmp_path / "hf"
    with InterruptedPool() as pool:
        pool.halt(monkeypatch, *at)
        with pytest.raises(KeyboardInterrupt):
            exported(source, folder, "hf", pool)
        if is_other:
            shutil.rmtree(folder)
            replace_file(source)
        report = exported(source, folder, "hf")
        assert len(report.kept) == (0 if is_other else 1)
        before = written(folder, "*")
        assert pool.late_code() in ("config.destination", "storage.not_shared")
    assert written(folder, "*") == before
    if is_other:
        found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
        stored = {name: tensor for path in source.iterdir() for name, tensor in load_file(path).items()}
        assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    else:
        check_export(folder)


@pytest.mark.parametrize("at", [(PosixStore, "nbytes"), (data_file_task, "write_file")])
def test_a_task_of_an_interrupted_import_does_not_take_a_file_out_of_the_committed_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: tuple[Any, str]
) -> None:
    source, run = write_source(tmp_path / "source"), tmp_path / "run"
    with InterruptedPool() as pool:
        pool.halt(monkeypatch, *at)
        with pytest.raises(KeyboardInterrupt):
            imported(source, run, pool)
        assert len(imported(source, run).kept) == 1
        before = written(run, "data-*")
        pool.go.set()
        pool.futures[1].exception(WAIT_S)
    assert written(run, "data-*") == before
    check_run(run)


def test_tasks_that_an_executor_runs_twice_write_the_same(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    exported(source, tmp_path / "hf", "hf", TaskByTask(times=2))
    check_export(tmp_path / "hf")
    imported(source, tmp_path / "run", TaskByTask(times=2))
    check_run(tmp_path / "run")


def test_a_file_that_a_worker_finds_damaged_is_written_again(tmp_path: Path) -> None:
    source, folder, run = write_source(tmp_path / "source"), tmp_path / "hf", tmp_path / "run"

    def stop(done: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exported(source, folder, "hf", TaskByTask(stop))
    damage(folder / "model-00002-of-00006.safetensors", 0.5)
    assert len(exported(source, folder, "hf", TaskByTask()).kept) == 2
    check_export(folder)
    with pytest.raises(KeyboardInterrupt):
        imported(source, run, TaskByTask(stop))
    (data,) = run.rglob("data-00001.safetensors")
    damage(data, 0.5)
    assert len(imported(source, run, TaskByTask()).kept) == 2
    check_run(run)


def test_an_executor_that_loses_results_is_an_error_and_no_half_folder(tmp_path: Path) -> None:
    source = write_source(tmp_path / "source")
    for work in (
        lambda: exported(source, tmp_path / "hf", "hf", FirstResultOnly()),
        lambda: imported(source, tmp_path / "run", FirstResultOnly()),
    ):
        with pytest.raises(holdfast.StorageError, match="did not write all files") as caught:
            work()
        assert caught.value.code == "storage.worker"
    assert not (tmp_path / "hf" / "model.safetensors.index.json").exists()


def test_a_worker_that_dies_does_not_end_the_command_by_sigpipe() -> None:
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as the command line does
    try:
        with on_processes(2)([1, 1]):
            reader, writer = os.pipe()
            os.close(reader)
            with pytest.raises(BrokenPipeError):
                os.write(writer, b"a task")
            os.close(writer)
        assert signal.getsignal(signal.SIGPIPE) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGPIPE, before)
