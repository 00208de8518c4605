"""Which process: a number alone comes again."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Final

import msgspec

_PROC: Final = Path("/proc")
#: Fields of ``stat`` behind the name of the program: the state is the first, the start time is number 22 of all.
_START_FIELD: Final = 22 - 3


class Process(msgspec.Struct, frozen=True, array_like=True):
    """A process: its number, when it was started (in ticks since boot), and the boot."""

    pid: int
    started: int
    boot_id: str

    @staticmethod
    def current() -> Process:
        """This one."""
        started = _started(os.getpid())
        assert started is not None
        return Process(os.getpid(), started, boot_id())

    def is_alive(self) -> bool:
        """Whether it still runs. (A process that nobody has waited for yet has ended.)"""
        return self.boot_id == boot_id() and _started(self.pid) == self.started


@cache
def boot_id() -> str:
    """What tells this boot of the machine from all others."""
    return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _started(pid: int) -> int | None:
    """When process `pid` was started; None where there is none, or it is dead already."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="surrogateescape")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name of the program may hold anything
    return None if state in "ZX" else int(fields[_START_FIELD - 1])
