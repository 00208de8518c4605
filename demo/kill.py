"""The right moment: kill ranks in the middle of a save, and be sure of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import holdfast
from demo.launch import DemoError, Running
from demo.memory import keepers

_WATCH_S = 0.0005


@dataclass(frozen=True)
class Killed:
    """A rank that was killed while it wrote `file` of the checkpoint of `step`."""

    rank: int
    pid: int
    step: int
    file: Path


@dataclass(frozen=True)
class AllKilled:
    """All ranks were killed while step `copied` was copied into memory; `whole` is the newest step that was whole there
    just then, and `head` the newest in storage (-1: none)."""

    pids: tuple[int, ...]
    copied: int
    whole: int
    head: int


def kill_in_save(job: Running, *, rank: int, step: int) -> Killed:
    """SIGKILL `rank` while it writes its data file of the first save from `step` on.

    The rank is stopped before it is killed, to be sure of the moment: one that had finished its file by then, so that
    the save could still be committed, is let go, and the next save is tried.
    """
    checkpoints = job.run / "checkpoints"
    job.follow_to(step - 1)
    pid = job.pid(rank)
    while job.is_running():
        file = file_in_the_making(pid, checkpoints)
        if file is None:
            time.sleep(_WATCH_S)
            continue
        with stopped(pid):
            if file == file_in_the_making(pid, checkpoints):
                os.kill(pid, signal.SIGKILL)
                return Killed(rank, pid, _step_of(file), file)
    raise DemoError(f"The training ended before rank {rank} was caught in a save, see {job.training.folder}")


def kill_all_in_copy(job: Running, *, step: int) -> AllKilled:
    """SIGKILL all ranks at once while they copy a snapshot, from `step` on, and storage is behind what memory holds.

    That storage is behind is arranged, as if it were slow: the keeper is stopped when it has sealed a snapshot that is
    not in storage, until the ranks are dead. Where the moment was missed it goes on, and the next save is tried.
    """
    job.follow_to(step - 1)
    pids = tuple(job.pid(rank) for rank in range(job.training.world_size))
    while job.is_running():
        seen = job.look()
        if seen.sealed <= seen.committed:
            time.sleep(_WATCH_S)
            continue
        with stopped(*keepers(job.node_dir)):
            head, seen = _head_of(job.run), job.look()
            # Else there would be no slot for the next copy: what is not in storage is kept, and so is the newest.
            will_copy = seen.is_copying or seen.committed == head >= 0
            if head < seen.sealed == seen.copied and will_copy and _kill_in_copy(job, pids, after=seen.copied):
                return AllKilled(pids, job.follow(), seen.copied, head)
    raise DemoError(f"The training ended before its ranks were caught in a copy, see {job.training.folder}")


def _kill_in_copy(job: Running, pids: tuple[int, ...], *, after: int) -> bool:
    """Kill the ranks in the copy that follows the one of step `after`. False when that was missed."""
    while job.is_running() and (seen := job.look()).copied == after:
        if not seen.is_copying:
            time.sleep(_WATCH_S)
            continue
        with stopped(*pids):
            seen = job.look()
            if seen.is_copying and seen.copied == after:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                return True
    return False


def _head_of(run: Path) -> int:
    try:
        return holdfast.open(run).step
    except holdfast.NotFoundError:
        return -1


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes inside the block, every thread of them, and let those go on at the end that still live."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        while not all(map(_has_stopped, pids)):
            time.sleep(_WATCH_S)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _has_stopped(pid: int) -> bool:
    # A thread inside a write or fsync stops only when that is done. The state is the word after the name in brackets;
    # threads may also have ended.
    threads = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(thread.rpartition(")")[2].split()[0] in "TXZ" for thread in threads)


def file_in_the_making(pid: int, folder: Path) -> Path | None:
    """A temporary file below `folder`, invisible to readers of checkpoints, that the process has open just now."""
    # The kernel adds " (deleted)" to the name of a file that is no longer under it.
    candidates = (file for file in _open_files(pid) if file.is_relative_to(folder))
    return next((file for file in candidates if file.name.startswith(".") and " " not in file.name), None)


def _open_files(pid: int) -> Iterator[Path]:
    # The process may end, or close a file, while we look.
    with suppress(FileNotFoundError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                yield descriptor.readlink()


def _step_of(file: Path) -> int:
    """Checkpoint folders are called step-<number>-<id>."""
    return int(file.parent.name.split("-")[1])
