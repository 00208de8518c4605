"""The cost of one operation to a process: CPU seconds, bytes read, and memory beyond its memory before."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
from pathlib import Path
from threading import Event, Thread

_HELD = Path("/proc/self/smaps_rollup")
_IO = Path("/proc/self/io")
_LOOK_S = 0.005


class Meter:
    """Measures from its construction to `stop`.

    Memory is watched only where it is asked for: looking takes time from the operation. Freed memory is returned to the
    kernel first: otherwise an operation that reuses what an earlier one left in the allocator would look free.
    """

    def __init__(self, *, watch_memory: bool = False) -> None:
        give_back()
        self._memory = _MemoryWatch() if watch_memory else None
        self._read = _read_nbytes()
        self._cpu_s = _cpu_s()

    def stop(self) -> dict[str, float]:
        """The cost until now. Call once.

        ``cpu_s`` is user and system time of all threads and of children that have ended. By the kernel's count,
        ``device_nbytes`` came from the device for this process (mapped files too), and ``asked_nbytes`` is what its
        read calls returned, from the device, the page cache or a pipe. ``peak_extra_nbytes`` is there where memory was
        watched.
        """
        cpu_s = _cpu_s() - self._cpu_s
        device_nbytes, asked_nbytes = (now - before for now, before in zip(_read_nbytes(), self._read, strict=True))
        usage: dict[str, float] = {"cpu_s": cpu_s, "device_nbytes": device_nbytes, "asked_nbytes": asked_nbytes}
        return usage if self._memory is None else usage | {"peak_extra_nbytes": self._memory.stop()}


def give_back() -> None:
    """Return freed memory of this process to the kernel."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class _MemoryWatch:
    """Looks again and again at how much memory the process holds: of memory that it shares, its share.

    (The kernel keeps the peak of another measure, in which shared memory counts whole for every process.)
    """

    def __init__(self) -> None:
        self._before = self._peak = _held_nbytes()
        self._end = Event()
        self._thread = Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """The most that was held beyond what was held before."""
        self._end.set()
        self._thread.join()
        return self._peak - self._before

    def _watch(self) -> None:
        while not self._end.wait(_LOOK_S):
            self._peak = max(self._peak, _held_nbytes())


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _read_nbytes() -> tuple[int, int]:
    counts = dict(line.split(": ") for line in _IO.read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["rchar"])


def _held_nbytes() -> int:
    found = re.search(r"^Pss:\s+(\d+) kB$", _HELD.read_text(), re.MULTILINE)
    assert found is not None, "the kernel reports no proportional set size"
    return 1024 * int(found[1])
