"""Which process a rank is, so that others on its node see at once when it ends."""

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
    """A process: its number, when it was started (in ticks since boot), and where that number is valid (which boot, and
    which PID namespace)."""

    pid: int
    started: int
    where: str

    @staticmethod
    def current() -> Process | None:
        """This one; None where the system does not tell."""
        started = _started(os.getpid())
        return None if started is None else Process(os.getpid(), started, _where())

    def has_ended(self) -> bool:
        """Whether it certainly runs no more. (A process that nobody has waited for yet has ended.) False for a process
        of another node or another PID namespace, of which nothing can be seen from here."""
        return self.where == _where() != "" and _started(self.pid) != self.started


@cache
def _where() -> str:
    """What tells this boot and this PID namespace from all others; empty where the system does not tell."""
    try:
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}:{(_PROC / 'self/ns/pid').stat().st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> int | None:
    """When process `pid` was started; None where there is none, or it is dead already."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name of the program may hold anything
    return None if state in "ZX" else int(fields[_START_FIELD - 1])
