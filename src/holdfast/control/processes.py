"""The identity of a rank's process, so that other ranks of its node notice at once when it ends."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

_PROC: Final = Path("/proc")
#: Index of the start time among the fields of ``stat`` after the program's name. The start time is field 22 of the
#: whole line, and the state, field 3, is the first one after the name.
_START_FIELD: Final = 22 - 3


class Process(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a process: its PID, its start time in ticks since boot, and `where` that PID is valid (which
    boot, and which PID namespace)."""

    pid: int
    started: int
    where: str

    @staticmethod
    def current() -> Process | None:
        """The identity of the calling process; None where the system has no ``/proc``."""
        return _identity(os.getpid())

    def has_ended(self) -> bool:
        """Whether the process has certainly ended. A zombie counts as ended. False for a process of another node or
        another PID namespace, because this process cannot see it."""
        return self.where == _where() != "" and _started(self.pid) != self.started


def age_s() -> float:
    """Seconds since the calling process was started; 0 where the system has no ``/proc``."""
    started = _started(os.getpid())
    if not started:
        return 0.0
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"), 0.0)


@cache
def _identity(pid: int) -> Process | None:
    """The identity of the calling process, whose PID is `pid`: a forked child has another one."""
    started = _started(pid)
    return None if started is None else Process(pid, started, _where())


@cache
def _where() -> str:
    """An identifier of this boot and this PID namespace; empty where the system has no ``/proc``."""
    try:
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}:{(_PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """The start time of process `pid` in ticks since boot; None where no such process runs (a zombie does not)."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the program's name may contain spaces and parentheses
    return None if state in "ZX" else int(fields[_START_FIELD - 1])
