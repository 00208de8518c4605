"""How much memory a node has left for slots, before any of it is taken.

Files in memory are promised, not given: who writes to more than there is gets SIGBUS where the file system is full, and
is killed where a cgroup or the machine is. (docker gives /dev/shm 64 MiB; kubernetes counts it as the pod's memory.)
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: A cgroup of version 1 without a limit has one that is larger than any memory.
_NO_LIMIT = 1 << 60


class MemoryLimit(NamedTuple):
    """At most `free_nbytes` more, because of `what`."""

    free_nbytes: int
    what: str


class _Version(NamedTuple):
    """Where a version of cgroups says what."""

    limit: str
    usage: str
    #: Prefix of the counters of ``memory.stat`` that cover everything below a cgroup.
    total: str


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = _Version("memory.max", "memory.current", "")


def rooms(folder: Path, *, locked: bool = False, system: Path = Path("/")) -> list[MemoryLimit]:
    """All that bounds how much memory files in `folder` can take, tightest first; with `locked`, memory that is locked
    (or registered with a device). `system` is where ``proc`` and ``sys`` are.
    """
    found = [_in_file_system(folder), *_in_machine(system), *_in_cgroups(system)]
    if locked:
        found += _lockable(system)
    return sorted(found)


def _in_file_system(folder: Path) -> MemoryLimit:
    status = os.statvfs(folder)
    return MemoryLimit(status.f_bavail * status.f_frsize, f"the size of the file system at '{folder}'")


def _in_machine(system: Path) -> Iterator[MemoryLimit]:
    if (found := _counter(system / "proc/meminfo", "MemAvailable:")) is not None:
        yield MemoryLimit(found << 10, "the machine's available memory")


def _in_cgroups(system: Path) -> Iterator[MemoryLimit]:
    """The memory cgroup of this process, and those above it as far as they are seen."""
    mounts = list(_mounts(system))
    for line in _lines(system / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for version, root, where in mounts:
            if (version is _V2) == (not controllers) and (version is _V2 or "memory" in controllers.split(",")):
                yield from _upwards(system / where.lstrip("/"), _below(path, root), version)


def _mounts(system: Path) -> Iterator[tuple[_Version, str, str]]:
    """Mounted memory cgroups: version, which cgroup it is that is mounted, and where."""
    for line in _lines(system / "proc/self/mountinfo"):
        fields, _, more = line.partition(" - ")
        kind, _, options = more.split(" ", 2)
        root, where = fields.split(" ")[3:5]
        if kind == "cgroup2":
            yield _V2, root, where
        elif kind == "cgroup" and "memory" in options.split(","):
            yield _V1, root, where


def _below(path: str, root: str) -> str:
    """The cgroup `path`, seen from where `root` is mounted. (In a container that may be where it is itself.)"""
    if root in ("/", path) or path.startswith(root + "/"):
        return path[len(root.rstrip("/")) :].strip("/")
    return ""


def _upwards(top: Path, path: str, version: _Version) -> Iterator[MemoryLimit]:
    cgroup = top / path
    while True:
        if (room := _in_cgroup(cgroup, version)) is not None:
            yield room
        if cgroup == top:
            return
        cgroup = cgroup.parent


def _in_cgroup(cgroup: Path, version: _Version) -> MemoryLimit | None:
    limit, usage = _number(cgroup / version.limit), _number(cgroup / version.usage)
    if limit is None or usage is None or limit >= _NO_LIMIT:
        return None
    # Pages of files on disk are given up where memory is short.
    caches = (_counter(cgroup / "memory.stat", f"{version.total}{kind}_file") for kind in ("inactive", "active"))
    return MemoryLimit(max(limit - usage + sum(filter(None, caches)), 0), f"{version.limit} of the cgroup '{cgroup}'")


def _lockable(system: Path) -> Iterator[MemoryLimit]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        locked = _counter(system / "proc/self/status", "VmLck:") or 0
        yield MemoryLimit(max(soft - (locked << 10), 0), "the limit of locked memory (ulimit -l)")


def _number(path: Path) -> int | None:
    """What a file has in it; None where there is no such file, or it says ``max``."""
    with suppress(OSError, ValueError):
        return int(path.read_text(encoding="ascii"))
    return None


def _counter(path: Path, name: str) -> int | None:
    for line in _lines(path):
        words = re.split(r"\s+", line)
        if words[0] == name:
            return int(words[1])
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
