"""What one operation costs a process: CPU seconds and memory beyond what it held before."""

from __future__ import annotations

import ctypes
import gc
import re
import time
from pathlib import Path

import msgspec

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class Usage(msgspec.Struct, frozen=True):
    """Cost of one operation; CPU is user and system time of all threads."""

    cpu_s: float
    peak_extra_nbytes: int


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
        self._cpu_s = time.process_time()

    def stop(self) -> Usage:
        """The cost until now."""
        cpu_s = time.process_time() - self._cpu_s
        return Usage(cpu_s=cpu_s, peak_extra_nbytes=max(0, _status_nbytes("VmHWM") - self._nbytes))


def _status_nbytes(field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    assert found is not None, f"the kernel reports no {field}"
    return 1024 * int(found[1])
