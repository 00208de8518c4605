"""The machine and the software that the figures were measured on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

_MODEL = re.compile(r"^model name\s*: (.*)$", re.MULTILINE)


class Environment(msgspec.Struct, frozen=True):
    """Versions and machine of one run."""

    holdfast: str
    torch: str
    python: str
    kernel: str
    filesystem: str
    num_cpus: int
    cpu: str
    memory_nbytes: int
    revision: str


def environment(folder: Path) -> Environment:
    versions = package_versions(("holdfast", "torch"))
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return Environment(
        holdfast=versions.get("holdfast", "source tree"),
        torch=versions.get("torch", "source tree"),
        python=platform.python_version(),
        kernel=platform.release(),
        filesystem=filesystem(folder),
        num_cpus=len(os.sched_getaffinity(0)),
        cpu=next(iter(_MODEL.findall(Path("/proc/cpuinfo").read_text())), platform.machine()),
        memory_nbytes=psutil.virtual_memory().total,
        revision=f"{_git('rev-parse', 'HEAD') or 'unknown'}{'+changes' if changed else ''}",
    )


def in_words(machine: Environment) -> str:
    return (
        f"{machine.cpu}, {machine.num_cpus} CPUs, {machine.filesystem}, Linux {machine.kernel}, "
        f"Python {machine.python}, torch {machine.torch}, holdfast {machine.holdfast} "
        f"(revision {machine.revision[:12]})"
    )


def filesystem(folder: Path) -> str:
    folder = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    # Of two mounts at one place, the later one covers the other.
    return str(max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype) if mounts else "unknown"


def package_versions(names: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _git(*arguments: str) -> str:
    """Output of a git command in this package's repository; nothing outside of one."""
    command = ("git", "-C", str(Path(__file__).parent), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
