"""The cost of several processes together, seen from outside: CPU seconds, and memory as the kernel attributes it."""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_END_TIMEOUT_S = 10.0


class Held(NamedTuple):
    """Memory that processes hold; of what they share with others, their share. `shared_nbytes` of it is in files in
    memory, mapped."""

    nbytes: int
    shared_nbytes: int


def tree(root: int, *, without: Collection[int] = ()) -> list[int]:
    """Process `root` and all that descend from it, but for those in `without`."""
    found = [root]
    for pid in found:
        for thread in _PROC.glob(f"{pid}/task/*/children"):
            # A thread, or a whole process, may end while it is looked at.
            with suppress(FileNotFoundError, ProcessLookupError):
                found += [child for child in map(int, thread.read_text().split()) if child not in without]
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of processes, of all their threads and of those of their children that have ended."""
    return sum(sum(map(int, fields[11:15])) for pid in pids if (fields := _stat(pid))) / _TICKS_PER_S


def held(pids: Iterable[int]) -> Held:
    """The memory that processes hold together."""
    nbytes = shared_nbytes = 0
    for pid in pids:
        # A process may end while it is looked at.
        with suppress(FileNotFoundError, ProcessLookupError):
            text = (_PROC / str(pid) / "smaps_rollup").read_text()
            nbytes += _counter(text, "Pss")
            shared_nbytes += _counter(text, "Pss_Shmem")
    return Held(nbytes, shared_nbytes)


def keepers(node_dir: Path) -> list[int]:
    """The keepers of holdfast that work below `node_dir`."""
    found = []
    for lock in sorted(node_dir.glob("holdfast-*/*/keeper.lock")):
        # Empty until a keeper has begun, and what a dead one has left may be the number of another process by now.
        with suppress(ValueError, FileNotFoundError, ProcessLookupError):
            pid = int(lock.read_text())
            if b"holdfast.keeper" in (_PROC / str(pid) / "cmdline").read_bytes():
                found.append(pid)
    return found


@contextmanager
def node_memory(parent: Path) -> Iterator[Path]:
    """A folder of its own in `parent`, which is in memory, to be a node's. Its keepers and slots end with it."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as folder:
        try:
            yield Path(folder)
        finally:
            _end(keepers(Path(folder)))


def _end(pids: Iterable[int]) -> None:
    """Kill processes that are not children of this one, and wait until they are gone."""
    end_s = time.monotonic() + _END_TIMEOUT_S
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        while _stat(pid) and time.monotonic() < end_s:
            time.sleep(0.01)


def _stat(pid: int) -> list[str]:
    """The fields behind the name in ``stat``: state, parent, and so on; empty for a process that has ended."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="surrogateescape")
    except (FileNotFoundError, ProcessLookupError):
        return []
    fields = text.rpartition(")")[2].split()
    return [] if fields[0] in "ZX" else fields


def _counter(text: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    assert found is not None, f"the kernel does not report {name}"
    return 1024 * int(found[1])
