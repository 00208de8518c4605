"""A store that is full, broken, read-only, gone or not shared: every rank hears what happened, where, and what to do;
no half checkpoint appears; the head stays; the next save works."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import holdfast
from holdfast import HoldfastError, StorageError
from holdfast.store import posix
from holdfast.store.posix_errors import check_creatable
from tests.faults.small_job import check_aftermath, failure, head, resumed, save, save_in_new_job, state, temporaries
from tests.store.test_posix_storage import mounted
from tests.support.faulty_storage import Count, FailAt, Watch, faulty_calls, watched_store
from tests.support.models import start_new_job
from tests.support.ranks import run_processes, run_ranks

PAGE = 4096


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of this process, with step 1."""
    save_in_new_job(str(tmp_path / "run"), 1)
    return tmp_path / "run"


# Full.


def kind_of(path: str | None) -> str:
    """The kind of the run's file at that path."""
    assert path is not None
    if "/checkpoints/" in path:
        return {".hfm": "manifest", ".json": "seal", ".safetensors": "data"}.get(Path(path).suffix, "folder")
    return "epoch" if "/epochs" in path else "commit" if "/history" in path else "marker"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "tmpfs", "size=4m,nr_inodes=1000") as folder:
        save_in_new_job(str(folder / "run"), 1)
        yield folder


@contextmanager
def free_pages(disk: Path, num_pages: int) -> Iterator[None]:
    """Leave only so much of the disk."""
    filler = disk / "filler"
    space = os.statvfs(disk)
    filler.write_bytes(bytes((space.f_bfree - num_pages) * PAGE))
    yield
    filler.unlink()


@contextmanager
def free_inodes(disk: Path, count: int) -> Iterator[None]:
    """Leave room for only so many files."""
    (disk / "names").mkdir()
    for number in range(os.statvfs(disk).f_ffree - count):
        (disk / "names" / str(number)).touch()
    yield
    shutil.rmtree(disk / "names")


def fill_until_it_fits(disk: Path, leave: Callable[[Path, int], Any], amounts: range) -> list[HoldfastError]:
    """Errors of saves with ever more room, up to one that has enough; each followed by a save on a disk with room."""
    errors: list[HoldfastError] = []
    for step, amount in enumerate(amounts, start=2):
        resumed(disk / "run")
        with leave(disk, amount):
            before = head(disk / "run")
            try:
                save(str(disk / "run"), step)
            except StorageError as error:
                errors.append(error)
            else:
                assert head(disk / "run") == step
                return errors
            assert head(disk / "run") == before
            assert temporaries(disk) == []
        save(str(disk / "run"), step)
        assert head(disk / "run") == step
    raise AssertionError("the disk never had enough room")


@pytest.mark.parametrize("reserved", [True, False], ids=["space is reserved", "space cannot be reserved"])
def test_a_disk_may_be_full_at_any_write(small_disk: Path, monkeypatch: pytest.MonkeyPatch, reserved: bool) -> None:
    if not reserved:
        monkeypatch.setattr(posix, "reserve", lambda descriptor, nbytes: None)
    errors = fill_until_it_fits(small_disk, free_pages, range(40))
    assert {error.code for error in errors} == {"storage.full"}
    assert all(error.path in str(error) and "bytes free" in str(error) for error in errors if error.path)
    assert order(errors) == ["epoch", "manifest", "data", "seal", "commit"]


def order(errors: list[HoldfastError]) -> list[str]:
    """The kinds of files that could not be written, in the order of a save."""
    return list(dict.fromkeys(kind_of(error.path) for error in errors))


def test_a_disk_may_have_no_room_for_one_more_name(small_disk: Path) -> None:
    errors = fill_until_it_fits(small_disk, free_inodes, range(40))
    assert {error.code for error in errors} == {"storage.full"}
    assert all("no more files can be created" in str(error) for error in errors)
    assert order(errors) == ["epoch", "manifest", "data", "seal", "commit"]


def test_a_full_disk_says_how_many_bytes_are_missing(small_disk: Path) -> None:
    resumed(small_disk / "run")
    with free_pages(small_disk, 5):
        error = failure(lambda: save(str(small_disk / "run"), 2))
    (needed,) = (path.stat().st_size for path in small_disk.rglob("*.safetensors"))
    assert kind_of(error.path) == "data"
    assert f"{needed:,} bytes needed" in str(error)
    assert "bytes are missing" in str(error)


def save_on_full_disk(disk: str) -> tuple[str, str | None, str]:
    """Fail on a full disk, then save where there is room."""
    run = f"{disk}/run"
    resumed(run)
    dist.barrier()
    if dist.get_rank() == 1:
        space = os.statvfs(disk)
        Path(disk, "filler").write_bytes(bytes((space.f_bfree - 4) * PAGE))
    dist.barrier()
    error = failure(lambda: save(run, 2))
    dist.barrier()
    if dist.get_rank() == 1:
        Path(disk, "filler").unlink()
    dist.barrier()
    return error.code, error.path, save(run, 3)


def test_all_ranks_are_told_of_the_full_disk_of_one(small_disk: Path) -> None:
    outcomes = run_ranks(2, save_on_full_disk, str(small_disk))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][0] == "storage.full"
    assert head(small_disk / "run") == 3


# Broken.


def attempt(run: Path, watch: Watch) -> HoldfastError | None:
    """Resume and save step 2 on a store that `watch` sees; the error, if any."""
    resumed(run)
    with watched_store(watch):
        try:
            save(str(run), 2)
        except HoldfastError as error:
            return error
    return None


def copied(run: Path, name: str) -> Path:
    return Path(shutil.copytree(run, run.with_name(name)))


def break_requests(run: Path, stride: int) -> set[str]:
    """Let every request whose number `stride` picks fail, each in a save of its own; the codes of the errors."""
    count = Count()
    assert attempt(copied(run, "sound"), count) is None
    assert len(count.seen) > 15
    codes: set[str] = set()
    for number in range(len(count.seen) - 1, -1, -stride):
        for when in ("before", "after"):
            broken = copied(run, f"broken-{number}-{when}")
            fault = FailAt(number, when)
            error = attempt(broken, fault)
            assert isinstance(error, StorageError)
            assert fault.hit is not None
            name, path = fault.hit
            assert error.path == path
            codes.add(error.code)
            check_aftermath(broken, error, committed=(name, kind_of(path), when) == ("create", "commit", "after"))
            shutil.rmtree(broken)
    return codes


def test_some_requests_of_a_save_may_fail_before_and_after_they_are_served(run: Path) -> None:
    assert break_requests(run, 5) == {"storage.io"}


@pytest.mark.slow
def test_any_request_of_a_save_may_fail_before_and_after_it_is_served(run: Path) -> None:
    assert break_requests(run, 1) == {"storage.io"}


class BreakCall:
    """System call `number` of those of the POSIX backend fails with EIO; the others are made and counted."""

    def __init__(self, number: int | None) -> None:
        self._number = number
        self.names: list[str] = []

    def __call__(self, number: int, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        self.names.append(name)
        if number == self._number:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)


def attempt_with_calls(run: Path, call: BreakCall) -> HoldfastError | None:
    resumed(run)
    with faulty_calls(call):
        try:
            save(str(run), 2)
        except HoldfastError as error:
            return error
    return None


def break_calls(run: Path, stride: int) -> set[str | None]:
    """Let every system call whose number `stride` picks fail, each in a save of its own; the codes of the errors, and
    None where a save did without the call."""
    count = BreakCall(None)
    assert attempt_with_calls(copied(run, "sound"), count) is None
    assert {"fsync", "link", "mkdir", "open", "pwrite", "ftruncate"} <= set(count.names)
    published = max(number for number, name in enumerate(count.names) if name == "link")
    codes: set[str | None] = set()
    for number in range(len(count.names) - 1, -1, -stride):
        broken = copied(run, f"broken-{number}")
        call = BreakCall(number)
        error = attempt_with_calls(broken, call)
        assert error is None or type(error) is StorageError
        assert error is None or error.path is not None
        codes.add(None if error is None else error.code)
        check_aftermath(broken, error, committed=number > published)
        assert temporaries(broken) == []
        shutil.rmtree(broken)
    return codes


def test_some_system_calls_of_a_save_may_fail(run: Path) -> None:
    assert break_calls(run, 9) - {None} == {"storage.io"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_any_system_call_of_a_save_may_fail(run: Path) -> None:
    assert break_calls(run, 1) - {None} == {"storage.io"}


def in_parts(number: int, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Transfers do 512 bytes at most, or, every other one of the direct ones, one block."""
    if name == "pwrite":
        descriptor, data, offset = args
        return real(descriptor, data[: PAGE if number % 2 else 512 + PAGE * (len(data) % PAGE == 0)], offset)
    if name == "preadv":
        descriptor, buffers, offset = args
        return real(descriptor, [memoryview(buffers[0])[: PAGE * (1 + number % 2)]], offset)
    return real(*args)


def test_a_store_that_transfers_less_than_it_is_told_is_asked_again(run: Path) -> None:
    with faulty_calls(in_parts):
        save(str(run), 2)
        assert head(run) == 2
    assert head(run) == 2


def test_a_store_that_takes_nothing_is_broken(run: Path) -> None:
    def idle(number: int, name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return 0 if name == "pwrite" else real(*args)

    with faulty_calls(idle):
        error = failure(lambda: save(str(run), 2))
    assert error.code == "storage.io"
    assert "wrote no bytes" in str(error)
    check_aftermath(run, error)


def test_a_place_that_was_opened_though_the_store_said_no_does_not_fence_its_own_job(run: Path) -> None:
    save(str(run), 2)
    holdfast.load(f"{run}@step=1", into=state(0), continues=True)

    def broken(number: int, when: str, name: str, path: str) -> None:
        if (when, name, kind_of(path) if name == "create" else "") == ("after", "create", "epoch"):
            raise StorageError("cannot create: broken.", code="storage.io", action="Repair it.", path=path)

    with watched_store(broken):
        assert failure(lambda: save(str(run), 3)).code == "storage.io"
    assert head(run) == 1
    assert save(str(run), 4) == "3.1"
    assert head(run) == 4


def load_broken(run: str, at: int) -> tuple[str, str | None, int]:
    into = state(0, rank=dist.get_rank(), world_size=2)
    with watched_store(FailAt(at, "before") if dist.get_rank() == 1 else Count()):
        error = failure(lambda: holdfast.load(run, into=into, timeout_s=30))
    return error.code, error.path, holdfast.load(run, into=into).step


def test_all_ranks_are_told_of_a_read_that_fails_on_one(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    run_ranks(2, save_in_new_job, path, 1)
    for at in (1, 6, 9):
        outcomes = run_ranks(2, load_broken, path, at)
        assert outcomes[0] == outcomes[1]
        assert outcomes[0][0] == "storage.io"
        assert outcomes[0][2] == 1


# Read-only.


@contextmanager
def immutable(folder: Path) -> Iterator[None]:
    """Not even root may change the folder."""
    done = subprocess.run(["chattr", "-R", "+i", folder], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot make a folder immutable here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-R", "-i", folder], check=True)


def test_an_immutable_run_is_loaded_but_not_saved_to(run: Path) -> None:
    with immutable(run):
        resumed(run)
        error = failure(lambda: save(str(run), 2))
        assert (type(error), error.code) == (StorageError, "storage.denied")
        assert error.path is not None
        assert error.path.startswith(str(run))
        assert head(run) == 1
    check_aftermath(run, error)


def test_a_file_system_that_becomes_read_only_stops_saves_and_not_loads(small_disk: Path) -> None:
    run = small_disk / "run"
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    resumed(run)
    error = failure(lambda: save(str(run), 2))
    assert error.code == "storage.denied"
    assert "Mount it for writing" in error.action
    with pytest.raises(StorageError, match="Read-only file system"):  # `restore` looks at this in a new run
        check_creatable(str(small_disk / "new/holdfast.json"))
    assert head(run) == 1
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    check_aftermath(run, error)


def save_as_nobody(index: int, run: str) -> tuple[str, str | None, int]:
    os.seteuid(65534)
    try:
        resumed(run)
        error = failure(lambda: save(run, 2))
        return error.code, error.path, head(run)
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_the_right_to_write_is_told_so() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        Path(f"{folder}/run").mkdir(mode=0o755)  # or nobody could not even read it
        save_in_new_job(f"{folder}/run", 1)
        ((code, path, step),) = run_processes(1, save_as_nobody, f"{folder}/run")
        assert (code, step) == ("storage.denied", 1)
        assert path is not None
        assert path.startswith(f"{folder}/run/")


# Gone.


class RemoveAt:
    """Somebody removes a folder of the run before request `number`."""

    def __init__(self, number: int, run: Path, which: str) -> None:
        self._number = number
        self._run = run
        self._which = which

    def __call__(self, number: int, when: str, name: str, path: str) -> None:
        if number == self._number and when == "before":
            if self._which == "the run":
                shutil.rmtree(self._run)
            else:
                for folder in (self._run / "checkpoints").iterdir():
                    if not (folder / "seal.json").exists():
                        shutil.rmtree(folder)


@pytest.mark.parametrize("which", ["the run", "the checkpoint"])
@pytest.mark.parametrize("stride", [6, pytest.param(1, marks=pytest.mark.slow)])
def test_a_folder_that_vanishes_in_a_save_is_noticed(run: Path, which: str, stride: int) -> None:
    count = Count()
    assert attempt(copied(run, "whole"), count) is None
    begun = next(i for i, (name, path) in enumerate(count.seen) if name == "create" and kind_of(path) == "manifest")
    sealed = next(i for i, (name, path) in enumerate(count.seen) if name == "create" and kind_of(path) == "seal")
    for number in range(sealed, begun, -stride):
        victim = copied(run, f"victim-{number}")
        error = attempt(victim, RemoveAt(number, victim, which))
        assert error is not None, count.seen[number]
        assert error.path is not None
        assert error.path.startswith(str(victim))
        if which == "the run":
            shutil.rmtree(victim, ignore_errors=True)
            start_new_job()
        else:
            assert head(victim) == 1
        save(str(victim), 3)
        assert head(victim) == 3


# Not shared.


def save_unmounted(run: str, mount_point: str) -> tuple[tuple[str, str | None, int | None], str, str]:
    """Save; lose rank 1's mount, so that it writes into the folder below; save; mount again; save."""
    start_new_job()
    path = mount_point if dist.get_rank() == 1 else run
    first = save(path, 1)
    if dist.get_rank() == 1:
        subprocess.run(["umount", mount_point], check=True)
    error = failure(lambda: save(path, 2, timeout_s=30))
    if dist.get_rank() == 1:
        subprocess.run(["mount", "--bind", run, mount_point], check=True)
    return (error.code, error.path, error.rank), first, save(path, 3)


def test_a_rank_whose_mount_is_lost_between_saves_is_noticed(tmp_path: Path) -> None:
    run, mount_point = tmp_path / "run", tmp_path / "mount"
    run.mkdir()
    mount_point.mkdir()
    done = subprocess.run(["mount", "--bind", run, mount_point], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount: {done.stderr.strip()}")
    try:
        outcomes = run_ranks(2, save_unmounted, str(run), str(mount_point))
    finally:
        subprocess.run(["umount", "-l", mount_point], check=True)
    (code, path, rank), *_ = outcomes[0]
    assert outcomes[0] == outcomes[1]
    assert (code, rank) == ("storage.not_shared", 1)
    assert path is not None
    assert path.endswith("data-00001.safetensors")
    assert head(run) == 3
