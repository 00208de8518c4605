"""The cost of a turn, as the kernel counts it: CPU seconds, memory and bytes read; and caches that are cold before it.

``python -m bench.costs PID`` watches the memory of a rank and of all processes that it started, without taking time
from the rank's interpreter.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_PAGES_AND_INODES = "3"
_END_TIMEOUT_S = 10.0
_LOOK_S = 0.005
#: Pause between two looks, in CPU times of a look (which goes through all pages): a third of a core is used at most.
_PAUSE = 2


def tree(root: int) -> list[psutil.Process]:
    """Process `root` and all that descend from it, but for this one where it descends from another."""
    process = psutil.Process(root)
    return [process, *(each for each in process.children(recursive=True) if each.pid != os.getpid())]


def cpu_s(processes: Iterable[psutil.Process]) -> float:
    """User and system time of processes, and of those of their children that have ended."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total


def held_nbytes(processes: Iterable[psutil.Process], *, without_files: bool = False) -> int:
    """The proportional set size of processes, with or without mapped files in memory."""
    nbytes = 0
    for process in processes:
        # A process may end while it is looked at.
        with suppress(FileNotFoundError, ProcessLookupError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            counters = dict(re.findall(r"^(Pss|Pss_Shmem):\s+(\d+) kB$", text, re.MULTILINE))
            nbytes += 1024 * (int(counters["Pss"]) - (int(counters["Pss_Shmem"]) if without_files else 0))
    return nbytes


def read_nbytes() -> tuple[int, int]:
    """Bytes that came from the device for this process so far, and bytes that its read calls returned."""
    counters = psutil.Process().io_counters()
    return counters.read_bytes, counters.read_chars


def io_nbytes() -> dict[str, int]:
    """By their names in samples: bytes that came from the device and went to it for this process so far, and bytes that
    its read calls returned."""
    counters = psutil.Process().io_counters()
    return {
        "device_nbytes": counters.read_bytes,
        "asked_nbytes": counters.read_chars,
        "written_nbytes": counters.write_bytes,
    }


def give_back() -> None:
    """Return freed memory of this process to the kernel: else what reuses it would look free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def keepers(node_dir: Path) -> list[psutil.Process]:
    found = []
    for lock in sorted(node_dir.glob("holdfast-*/*/keeper.lock")):
        # Empty until a keeper has begun; the number of a dead one may be that of another process by now.
        with suppress(ValueError, FileNotFoundError, psutil.NoSuchProcess):
            process = psutil.Process(int(lock.read_text()))
            if "holdfast.keeper" in process.cmdline():
                found.append(process)
    return found


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-", dir=parent) as folder:
        yield Path(folder)


@contextmanager
def node_memory(parent: Path) -> Iterator[Path]:
    """A folder below `parent` for the memory of a node. Its keepers and slots end with it."""
    with scratch(parent) as folder:
        try:
            yield folder
        finally:
            last = keepers(folder)
            for keeper in last:
                with suppress(psutil.NoSuchProcess):
                    keeper.kill()
            psutil.wait_procs(last, timeout=_END_TIMEOUT_S)


def settle(folder: Path) -> None:
    """Write all dirty pages back, then drop cached pages: all of them, or where denied those of `folder`."""
    os.sync()
    if os.access(_DROP_CACHES, os.W_OK):
        _DROP_CACHES.write_text(_PAGES_AND_INODES)
        return
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Watch:
    """Watches the memory of this process and its children from construction to `stop`.

    With `node_dir`, one rank's part of its keepers counts too, and mapped files in memory do not: they are the slots.
    """

    def __init__(self, *, node_dir: Path | None = None, world: int = 1) -> None:
        keeping = [str(node_dir), str(world)] if node_dir else []
        command = [sys.executable, "-m", "bench.costs", str(os.getpid()), *keeping]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        # It says one word when it knows what was held before.
        self._process.stdout.readline()

    def stop(self) -> int:
        """The most bytes that were held beyond what was held at first."""
        return int(self._process.communicate()[0])


def main(root: str, node_dir: str = "", world: str = "1") -> None:
    """Watch until the end of the standard input, then write the peak."""

    def held() -> int:
        try:
            own = held_nbytes(tree(int(root)), without_files=bool(node_dir))
        except psutil.NoSuchProcess:
            return 0
        return own + (held_nbytes(keepers(Path(node_dir)), without_files=True) // int(world) if node_dir else 0)

    peak = before = held()
    print("watching", flush=True)
    taken_s, is_over = 0.0, False
    while not is_over:
        is_over = bool(select.select([sys.stdin], [], [], max(_LOOK_S, _PAUSE * taken_s))[0])
        start_s = time.process_time()
        peak = max(peak, held())
        taken_s = time.process_time() - start_s
    with suppress(BrokenPipeError):  # the rank has died
        os.write(sys.stdout.fileno(), b"%d\n" % (peak - before))


if __name__ == "__main__":
    main(*sys.argv[1:])
