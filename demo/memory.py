"""The memory of the node, seen from outside: a folder for it, what lies in its slots, and the keepers it has."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from holdfast.node_memory.node_folder import DEFAULT_NODE_DIR, NodeFolder
from holdfast.node_memory.slots import Slot, SlotState, slot_names
from holdfast.run.paths import parse


@contextmanager
def node_memory() -> Iterator[Path]:
    """A folder in memory. At the end its keepers are killed, and the memory is given back; trainers must have ended."""
    with TemporaryDirectory(prefix="holdfast-demo-", dir=DEFAULT_NODE_DIR) as name:
        try:
            yield Path(name)
        finally:
            # Again, until there is none: one that is being started is a process that starts another.
            while pids := keepers(Path(name)):
                for pid in pids:
                    _kill(pid)


def keepers(node_dir: Path) -> list[int]:
    """The processes that keep what lies in `node_dir`."""
    found = ((int(process.name), _arguments(process)) for process in Path("/proc").glob("[0-9]*"))
    return [pid for pid, arguments in found if "holdfast.keeper" in arguments and str(node_dir) in arguments]


def _arguments(process: Path) -> list[str]:
    """The command line of a process; empty for one that has ended."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return (process / "cmdline").read_text(errors="replace").split("\0")
    return []


def _kill(pid: int) -> None:
    """Kill a process that is not ours to wait for, and return when it is dead."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [])
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class Look:
    """The slots at one moment: whether any rank was copying its part of a snapshot, and the newest step
    that was copied, sealed, and known to be in storage, on all ranks (-1: none)."""

    is_copying: bool
    copied: int
    sealed: int
    committed: int


def look(run: Path, node_dir: Path, *, world_size: int) -> Look:
    """Look at the slots of `run` in `node_dir`, each of which is for a snapshot of one rank."""
    records = []
    with NodeFolder(parse(run).root, node_dir=node_dir) as folder:
        for name in slot_names(folder):
            with Slot(folder, name) as slot:
                records.append(slot.record)

    def newest(*states: SlotState) -> int:
        steps = [record.contents.step for record in records if record.contents and record.state in states]
        return max((step for step in steps if steps.count(step) == world_size), default=-1)

    return Look(
        is_copying=any(record.state == SlotState.WRITING for record in records),
        copied=newest(SlotState.STAGED, SlotState.SEALED, SlotState.COMMITTED),
        sealed=newest(SlotState.SEALED, SlotState.COMMITTED),
        committed=newest(SlotState.COMMITTED),
    )
