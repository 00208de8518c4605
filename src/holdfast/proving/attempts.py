"""Attempts of a script: each is a job under torchrun that ends by itself or is killed half way."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Final

from holdfast.errors import ConfigurationError
from holdfast.proving.rehearsal import Rehearsal
from holdfast.wording import count

#: Lines of a script's output that an error quotes.
_NUM_LINES: Final = 15
#: The line in which torchrun begins to report that a rank has failed.
_OF_TORCHRUN: Final = re.compile(r"E\d{4} .*/elastic/")
#: The exit code of the rank that failed first, in that report.
_EXIT_CODE: Final = re.compile(r"^Root Cause.*?^\s*exitcode\s*: (-?\d+)", re.MULTILINE | re.DOTALL)
#: Time for the processes of an attempt to end after they were told to, and from look to look after that.
_END_S: Final = 10.0
_LOOK_S: Final = 0.1


def attempt(script: Sequence[str], rehearsal: Rehearsal, *, num_ranks: int, log: Path) -> None:
    """Run the script and its arguments on `num_ranks` ranks, until it ends or one of them is killed. Its output is
    added to `log`.

    Raises `ConfigurationError`, code ``config.script``, where the script fails by itself, or ends before the kill.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    with log.open("ab") as output:
        begins = output.tell()
        job = subprocess.Popen(
            [*command, "-m", "holdfast.proving", *script],
            env=rehearsal.in_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = job.wait()
        finally:  # also on Ctrl-C
            _end(job, rehearsal)
    said = log.read_bytes()[begins:].decode(errors="replace")
    is_killed = code != 0 and f"Signal {int(signal.SIGKILL)} (SIGKILL)" in said
    if rehearsal.dies_after is None and code:
        raise _failed(script, f"it fails on {count(num_ranks, 'rank')}", said, log)
    if rehearsal.dies_after is not None and not is_killed:
        how = "it fails by itself" if code else "it ends"
        raise _failed(script, f"{how} before it is killed after step {rehearsal.dies_after}", said, log)


def _end(job: subprocess.Popen[bytes], rehearsal: Rehearsal) -> None:
    """End all processes of an attempt, except for keepers: also those in sessions of their own, and those that the
    script started and left behind."""
    if job.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            job.wait(_END_S)
    while pids := list(_processes_of(rehearsal)):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)
    job.wait()


def _processes_of(rehearsal: Rehearsal) -> Iterator[int]:
    """The processes that have the environment of an attempt. (Its folder makes that unique.)"""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            is_zombie = (process / "stat").read_bytes().rpartition(b") ")[2][:1] == b"Z"
            is_keeper = b"holdfast.keeper" in (process / "cmdline").read_bytes()
            if not is_zombie and not is_keeper and rehearsal.is_in((process / "environ").read_bytes()):
                yield int(process.name)


def _failed(script: Sequence[str], how: str, said: str, log: Path) -> ConfigurationError:
    own = list(takewhile(lambda line: not _OF_TORCHRUN.match(line), said.splitlines()))
    code = _EXIT_CODE.search(said)
    with_code = f" with the exit code {code[1]}" if code is not None else ""
    quoted = "Below is the end of its output." if any(map(str.strip, own)) else "It printed nothing."
    return ConfigurationError(
        f"'{script[0]}' cannot be proved: {how}{with_code}. {quoted}",
        code="config.script",
        action=f"Make the script run to its end under torchrun first. Its whole output is in '{log}'.",
        path=script[0],
        details=tuple(own[-_NUM_LINES:]),
    )
