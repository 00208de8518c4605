"""The machine and the software that the figures were measured on."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec


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
    return Environment(
        holdfast=_package_version("holdfast"),
        torch=_package_version("torch"),
        python=platform.python_version(),
        kernel=platform.release(),
        filesystem=filesystem(folder),
        num_cpus=len(os.sched_getaffinity(0)),
        cpu=_cpu_model(),
        memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
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
    resolved = folder.resolve()
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, mount, kind, *_ = line.split()
        if resolved.is_relative_to(mount) and len(mount) >= len(best[0]):
            best = (mount, kind)
    return best[1]


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """The version of each of these packages that is installed."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "source tree"


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
    done = subprocess.run(
        ("git", "-C", str(Path(__file__).parent), *arguments), capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None
