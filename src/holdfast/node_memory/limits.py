"""The memory that a node has left for slots, checked before any is taken.

The system does not reserve memory for a file in memory when its size is set. A process that then writes more than there
is gets SIGBUS where the file system is full, and is killed where its cgroup or the machine is. (docker gives /dev/shm
64 MiB; kubernetes counts it as the pod's memory.)
"""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

#: Limits above this mean no limit: a cgroup of version 1 that has none reports a number larger than any memory.
_NO_LIMIT = 1 << 60


class MemoryLimit(NamedTuple):
    """A limit on memory: `what` leaves room for `free_nbytes` more."""

    free_nbytes: int
    what: str


class _Version(NamedTuple):
    """The file names and counter names of a version of memory cgroups."""

    limit: str
    usage: str
    #: Prefix of the counters of ``memory.stat`` that cover everything below a cgroup.
    total: str


_V1 = _Version("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = _Version("memory.max", "memory.current", "")


def rooms(folder: Path, *, locked: bool = False, system: Path = Path("/")) -> list[MemoryLimit]:
    """All limits on the memory that files in `folder` can take, tightest first; with `locked`, also those on memory
    that is locked (or registered with a device). `system` is the folder that holds ``proc`` and ``sys``.
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
    """The limits of this process's memory cgroup, and of those above it that are visible."""
    mounts = list(_mounts(system))
    for line in _lines(system / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for version, root, where in mounts:
            if (version is _V2) == (not controllers) and (version is _V2 or "memory" in controllers.split(",")):
                yield from _upwards(system / where.lstrip("/"), _below(path, root), version)


def _mounts(system: Path) -> Iterator[tuple[_Version, str, str]]:
    """The mounts of memory cgroups: version, the cgroup that is mounted, and the mount point."""
    for line in _lines(system / "proc/self/mountinfo"):
        fields, _, more = line.partition(" - ")
        kind, _, options = more.split(" ", 2)
        root, where = fields.split(" ")[3:5]
        if kind == "cgroup2":
            yield _V2, root, where
        elif kind == "cgroup" and "memory" in options.split(","):
            yield _V1, root, where


def _below(path: str, root: str) -> str:
    """The path of the cgroup `path` below the mount of the cgroup `root`; empty where it is the mount itself, as in
    most containers, or lies outside of it."""
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
    # The kernel drops cached pages of files on disk when memory is short, so they count as free.
    caches = (_counter(cgroup / "memory.stat", f"{version.total}{kind}_file") for kind in ("inactive", "active"))
    return MemoryLimit(max(limit - usage + sum(filter(None, caches)), 0), f"{version.limit} of the cgroup '{cgroup}'")


def _lockable(system: Path) -> Iterator[MemoryLimit]:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
        locked = _counter(system / "proc/self/status", "VmLck:") or 0
        yield MemoryLimit(max(soft - (locked << 10), 0), "the limit of locked memory (ulimit -l)")


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no such file, or it says ``max``."""
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
