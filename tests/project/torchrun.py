"""A script under torchrun, as users start it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


class TorchrunResult(NamedTuple):
    """The exit status of torchrun, and the lines that the ranks printed, sorted."""

    status: int
    lines: list[str]


def run_torchrun(folder: Path, num_ranks: int, *arguments: str) -> TorchrunResult:
    """Run ``train.py`` of `folder` there, on so many ranks."""
    # A file per rank: what ranks write into one pipe at the same time may come out mixed.
    logs = Path(tempfile.mkdtemp(dir=folder))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--redirects=1", f"--log-dir={logs}"]
    command = [*torchrun, f"--nproc_per_node={num_ranks}", "train.py", *arguments]
    status = subprocess.run(command, cwd=folder, check=False, timeout=200).returncode
    return TorchrunResult(status, sorted("".join(path.read_text() for path in logs.rglob("stdout.log")).splitlines()))
