"""Keepers of a node, which are nobody's children: how tests find them and end them."""

from __future__ import annotations

import os
import select
import signal
from contextlib import suppress
from pathlib import Path

from tests.support.nursery import until

_END_TIMEOUT_S = 30.0


def keeper_of(folder: Path) -> int:
    """The process that keeps the run whose memory is in `folder`."""
    until(lambda: bool((folder / "keeper.lock").read_text()))  # it says so when it has begun
    return int((folder / "keeper.lock").read_text())


def keepers(node_dir: Path) -> list[int]:
    """All keepers of a node that were started by a command, even those that are only starting."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _is_keeper(path, node_dir)]


def end_keepers(node_dir: Path) -> None:
    """Kill all keepers of a node that were started by a command, and return when they are dead."""
    for pid in keepers(node_dir):
        kill(pid)


def kill(pid: int) -> None:
    """Kill a process, and return when it is dead. It may stay in the table of processes: a process 1 that looks for
    dead orphans only now and then leaves them there for seconds."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            assert select.select([descriptor], [], [], _END_TIMEOUT_S)[0], f"process {pid} does not end"
        finally:
            os.close(descriptor)


def _is_keeper(process: Path, node_dir: Path) -> bool:
    """Whether a process in /proc is a keeper of that node."""
    with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
        arguments = (process / "cmdline").read_text(errors="replace").split("\0")
        is_of_node = any(each == str(node_dir) or each.startswith(f"{node_dir}/holdfast-") for each in arguments)
        return is_of_node and not {"holdfast.keeper", "keeper"}.isdisjoint(arguments)
    return False
