"""The machine and the software that the figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil


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
    """The environment of this process, with the filesystem of `folder`."""
    versions = package_versions(("holdfast", "torch"))
    return Environment(
        holdfast=versions.get("holdfast", "source tree"),
        torch=versions.get("torch", "source tree"),
        python=platform.python_version(),
        kernel=platform.release(),
        filesystem=filesystem(folder),
        num_cpus=len(os.sched_getaffinity(0)),
        cpu=_cpu_model(),
        memory_nbytes=psutil.virtual_memory().total,
        revision=_revision(),
    )


def in_words(machine: Environment) -> str:
    """Versions and machine in one line."""
    return (
        f"{machine.cpu}, {machine.num_cpus} CPUs, {machine.filesystem}, Linux {machine.kernel}, "
        f"Python {machine.python}, torch {machine.torch}, holdfast {machine.holdfast} "
        f"(revision {machine.revision[:12]})"
    )


def filesystem(folder: Path) -> str:
    """Type of the filesystem that holds `folder`."""
    folder = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    # Of two mounts at one place, the later one covers the other.
    return str(max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype) if mounts else "unknown"


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """The version of each of these packages that is installed."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _revision() -> str:
    head = _git("rev-parse", "HEAD")
    if head is None:
        return "unknown"
    return f"{head}+changes" if _git("status", "--porcelain", "--untracked-files=no") else head


def _git(*arguments: str) -> str | None:
    """Output of a git command in this package's repository; None outside of one."""
    command = ("git", "-C", str(Path(__file__).parent), *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
