"""The machine and the software that the figures were measured on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
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

    def in_words(self) -> str:
        """All of it that tables name."""
        return (
            f"{self.cpu}, {self.num_cpus} CPUs, {self.filesystem}, Linux {self.kernel}, Python {self.python}, "
            f"torch {self.torch}, holdfast {self.holdfast} (revision {self.revision[:12]})"
        )


def environment(folder: Path) -> Environment:
    """This machine, with the filesystem of `folder`."""
    models = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return Environment(
        holdfast=version("holdfast"),
        torch=version("torch"),
        python=platform.python_version(),
        kernel=platform.release(),
        filesystem=filesystem(folder),
        num_cpus=len(os.sched_getaffinity(0)),
        cpu=models[0] if models else platform.machine(),
        memory_nbytes=psutil.virtual_memory().total,
        revision=f"{_git('rev-parse', 'HEAD') or 'unknown'}{'+changes' if changed else ''}",
    )


def filesystem(folder: Path) -> str:
    folder = folder.resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    # Of two mounts at one place, the later one covers the other.
    return str(max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype) if mounts else "unknown"


def _git(*arguments: str) -> str:
    """Output of a git command in this package's repository; nothing outside of one."""
    command = ("git", "-C", str(Path(__file__).parent), *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
