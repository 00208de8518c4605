"""What one operation costs a process: CPU seconds, memory beyond what it held before, and bytes read."""

from __future__ import annotations

import ctypes
import gc
import re
import resource
from pathlib import Path

import msgspec

_STATUS = Path("/proc/self/status")
_IO = Path("/proc/self/io")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class Usage(msgspec.Struct, frozen=True):
    """Cost of one operation.

    CPU is user and system time of all threads and of children that have ended. By the kernel's count, `device_nbytes`
    came from the device for this process (mapped files too), and `asked_nbytes` is what its read calls returned, from
    the device, the page cache or a pipe.
    """

    cpu_s: float
    peak_extra_nbytes: int
    device_nbytes: int
    asked_nbytes: int


class Meter:
    """Measures from its construction to `stop`.

    Freed memory is returned to the kernel first: otherwise an operation that reuses what an earlier one left
    in the allocator would look free. The peak is the kernel's own, so nothing runs beside the operation.
    """

    def __init__(self) -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        _CLEAR_REFS.write_text(_RESET_PEAK)
        self._nbytes = _status_nbytes("VmRSS")
        self._read = _read_nbytes()
        self._cpu_s = _cpu_s()

    def stop(self) -> Usage:
        """The cost until now."""
        cpu_s = _cpu_s() - self._cpu_s
        device_nbytes, asked_nbytes = (now - before for now, before in zip(_read_nbytes(), self._read, strict=True))
        return Usage(
            cpu_s=cpu_s,
            peak_extra_nbytes=max(0, _status_nbytes("VmHWM") - self._nbytes),
            device_nbytes=device_nbytes,
            asked_nbytes=asked_nbytes,
        )


def _cpu_s() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _read_nbytes() -> tuple[int, int]:
    counts = dict(line.split(": ") for line in _IO.read_text().splitlines())
    return int(counts["read_bytes"]), int(counts["rchar"])


def _status_nbytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None, f"the kernel reports no {field}"
    return 1024 * int(found[1])
