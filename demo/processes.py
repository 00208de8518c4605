"""Processes: trainings under torchrun, the right moment to kill their ranks, and the memory of the node."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import psutil

import holdfast
from demo.runs import FileToCome, file_to_come, store_of
from demo.show import chapter
from demo.witness import notes
from holdfast.node_memory.node_folder import DEFAULT_NODE_DIR, NodeFolder
from holdfast.node_memory.slots import Slot, SlotState, slot_names
from holdfast.run.paths import parse

ROOT = Path(__file__).parents[1]
_HOST = "127.0.0.1"
#: One thread per rank, as torchrun sets for several ranks on a node; a fixed number is part of equal losses.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
_WATCH_S, _FOLLOW_S, _SETTLE_S = 0.0005, 0.1, 0.3
_TIMEOUT_S, _END_TIMEOUT_S = 300.0, 40.0


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass
class Training:
    """A training of `world_size` ranks on `nodes` nodes of this machine, each under a torchrun of its own. Of all
    `steps` the first `until` are made, where that is given. With a `node_dir`, a folder in memory, saves go there
    first."""

    folder: Path
    world_size: int
    steps: int
    save_to: str | None = None
    save_every: int = 1
    nodes: int = 1
    timeout_s: float = 600.0
    until: int | None = None
    node_dir: Path | None = None
    torchruns: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @contextmanager
    def running(self, title: str, *, done: int = 0) -> Iterator[None]:
        """Start it, as a chapter of the story, when `done` steps are done; none of its processes outlives the block."""
        self.folder.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind((_HOST, 0))
            port = probe.getsockname()[1]
        self._end_s = time.monotonic() + _TIMEOUT_S
        with chapter(title, steps=self.until or self.steps, done=done) as self._on_step:
            try:
                for node in range(self.nodes):
                    with self.log(node).open("wb") as log:
                        command, environment = self._command(node, port), os.environ | _ENVIRONMENT
                        started = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment)
                        self.torchruns.append(started)
                yield
            finally:
                for process in self.torchruns:
                    # torchrun passes this on to its ranks, and kills those that do not end within 30 s.
                    process.terminate()
                for process in self.torchruns:
                    process.wait(_END_TIMEOUT_S)

    def finish(self, title: str, *, done: int = 0) -> None:
        """Train to the end; `DemoError` with the log when any node failed."""
        with self.running(title, done=done):
            statuses = self.wait()
        for node, status in enumerate(statuses):
            if status:
                lines = self.log(node).read_text().splitlines()
                # The lines that the ranks printed come before torchrun's account of the failure.
                ranks = list(takewhile(lambda line: "torch/distributed/elastic" not in line, lines))
                last = "\n".join((ranks or lines)[-15:])
                raise DemoError(f"A training failed with status {status}, see {self.log(node)}:\n{last}")

    def wait(self) -> list[int]:
        """Wait for the end of all nodes; the exit status of each torchrun."""
        while self.is_running():
            time.sleep(_FOLLOW_S)
            self.follow()
        self.follow()
        return [torchrun.wait() for torchrun in self.torchruns]

    def is_running(self) -> bool:
        """Whether any node runs. `DemoError` when that is so for too long."""
        if time.monotonic() > self._end_s:
            raise DemoError(f"A training took more than {_TIMEOUT_S:.0f} s, see the logs in {self.folder}")
        return any(torchrun.poll() is None for torchrun in self.torchruns)

    def follow(self, *, to: int = -1) -> int:
        """The newest step that is done (-1: none yet), when it is `to` at least or the training has ended."""
        while True:
            step = max(self.losses(), default=-1)
            self._on_step(step + 1)
            if step >= to or not self.is_running():
                return step
            time.sleep(_FOLLOW_S)

    def losses(self) -> dict[int, float]:
        """Loss of the whole batch by step, so far."""
        return {note["step"]: note["value"] for note in notes(self.folder, "loss")}

    def each(self, kind: str, **seen: object) -> list[dict[str, Any]]:
        """The first note of this kind of each rank, which all have made."""
        every = [notes(self.folder, kind, rank=rank, **seen) for rank in range(self.world_size)]
        if not all(every):
            raise DemoError(f"A rank has noted nothing about {kind!r}, see the logs in {self.folder}")
        return [of_rank[0] for of_rank in every]

    def log(self, node: int) -> Path:
        """The log of torchrun and the ranks of `node`."""
        return self.folder / f"node-{node}.log"

    def exit_status_of_rank(self, rank: int, pid: int) -> int:
        """The status with which a failed rank ended, from the summary of its torchrun."""
        summary = rf"rank\s*: {rank} .*\n\s*exitcode\s*: (-?\d+) \(pid: {pid}\)"
        if found := re.search(summary, self._printed()):
            return int(found[1])
        raise DemoError(f"No torchrun told how rank {rank} (pid {pid}) ended, see the logs in {self.folder}")

    def error_of_rank(self, rank: int) -> str:
        """The error that the training script printed when it ended on `rank`; empty when it ended without one."""
        found = re.search(rf"^rank {rank}: (.*)$", self._printed(), re.MULTILINE)
        return found[1] if found else ""

    def _printed(self) -> str:
        return "\n".join(self.log(node).read_text() for node in range(self.nodes))

    def _command(self, node: int, port: int) -> list[str]:
        """The command that starts the torchrun of `node`."""
        nodes = f"--nnodes={self.nodes} --node-rank={node} --nproc-per-node={self.world_size // self.nodes}"
        torchrun = f"{nodes} --master-addr={_HOST} --master-port={port} --module".split()
        return [sys.executable, "-m", "torch.distributed.run", *torchrun, *self._script()]

    def _script(self) -> list[str]:
        """The module that each rank runs, and its arguments."""
        script = ["demo.train", f"--witness={self.folder}", f"--steps={self.steps}"]
        script.append(f"--until={self.until or self.steps}")
        if self.save_to is not None:
            script += [f"--save-to={self.save_to}", f"--save-every={self.save_every}", f"--timeout-s={self.timeout_s}"]
        if self.node_dir is not None:
            script.append(f"--node-dir={self.node_dir}")
        return script


@dataclass
class PolicyTraining(Training):
    """A training whose policies say when to save and what to keep."""

    def _script(self) -> list[str]:
        arguments = f"--witness={self.folder} --steps={self.steps} --save-to={self.save_to}".split()
        return ["demo.loop", *arguments, f"--save-every={self.save_every}"]

    def samples(self) -> dict[int, list[int]]:
        """The samples of each step, over all ranks in their order."""
        found: dict[int, list[int]] = {}
        for rank in range(self.world_size):
            for note in notes(self.folder, "samples", rank=rank):
                found.setdefault(note["step"], []).extend(note["numbers"])
        return found

    def saved(self) -> list[list[int]]:
        """The steps after which each rank saved."""
        return [[note["step"] for note in notes(self.folder, "save", rank=rank)] for rank in range(self.world_size)]


class Killed(NamedTuple):
    """A rank that was killed while it wrote its `file`."""

    pid: int
    file: FileToCome


class AllKilled(NamedTuple):
    """All ranks were killed while step `copied` was copied into memory; `whole` is the newest step that was whole there
    just then, and `head` the newest in storage (-1: none)."""

    pids: list[int]
    copied: int
    whole: int
    head: int


def kill_in_save(job: Training, *, rank: int, step: int) -> Killed:
    """SIGKILL `rank` while it writes its data file of the first save from `step` on.

    The rank is stopped before it is killed, to be sure of the moment: one that had finished its file by then, so that
    the save could still be committed, is let go, and the next save is tried. A server may still store what it has got.
    """
    assert job.save_to is not None
    storage = store_of(job.save_to)
    job.follow(to=step - 1)
    pid: int = job.each("started")[rank]["pid"]
    while job.is_running():
        file = file_to_come(storage, rank=rank)
        if file is None:
            time.sleep(_WATCH_S)
            continue
        with stopped(pid):
            time.sleep(_SETTLE_S)
            if file == file_to_come(storage, rank=rank):
                os.kill(pid, signal.SIGKILL)
                return Killed(pid, file)
    raise DemoError(f"The training ended before rank {rank} was caught in a save, see {job.folder}")


def kill_all_in_copy(job: Training, *, step: int) -> AllKilled:
    """SIGKILL all ranks at once while they copy a snapshot, from `step` on, and storage is behind what memory holds.

    That storage is behind is arranged, as if it were slow: the keeper is stopped when it has sealed a snapshot that is
    not in storage, until the ranks are dead. If the moment was missed, the keeper goes on, and the next save is tried.
    """
    assert job.save_to is not None
    assert job.node_dir is not None
    job.follow(to=step - 1)
    pids = [note["pid"] for note in job.each("started")]
    while job.is_running():
        seen = look(job)
        if seen.sealed <= seen.committed:
            time.sleep(_WATCH_S)
            continue
        with stopped(*(keeper.pid for keeper in keepers(job.node_dir))):
            head, seen = head_of(job.save_to), look(job)
            # Else there would be no slot for the next copy: what is not in storage is kept, and so is the newest.
            will_copy = seen.is_copying or seen.committed == head >= 0
            if head < seen.sealed == seen.copied and will_copy and _kill_in_copy(job, pids, after=seen.copied):
                return AllKilled(pids, job.follow(), seen.copied, head)
    raise DemoError(f"The training ended before its ranks were caught in a copy, see {job.folder}")


def _kill_in_copy(job: Training, pids: list[int], *, after: int) -> bool:
    """Kill the ranks in the copy that follows the one of step `after`. False when that was missed."""
    while job.is_running() and (seen := look(job)).copied == after:
        if not seen.is_copying:
            time.sleep(_WATCH_S)
            continue
        with stopped(*pids):
            seen = look(job)
            if seen.is_copying and seen.copied == after:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
                return True
    return False


def head_of(path: str) -> int:
    """The step that readers find there (-1: none)."""
    try:
        return holdfast.open(path).step
    except holdfast.NotFoundError:
        return -1


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop processes inside the block, every thread of them, and let those go on at the end that still live."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        while not all(map(_has_stopped, pids)):
            time.sleep(_WATCH_S)
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _has_stopped(pid: int) -> bool:
    # A thread inside a write or fsync stops only when that is done. The state is the word after the name in brackets;
    # threads may also have ended.
    threads = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(thread.rpartition(")")[2].split()[0] in "TXZ" for thread in threads)


@contextmanager
def node_memory() -> Iterator[Path]:
    """A folder in memory. At the end its keepers are killed, and the memory is given back; trainers must have ended."""
    with TemporaryDirectory(prefix="holdfast-demo-", dir=DEFAULT_NODE_DIR) as name:
        try:
            yield Path(name)
        finally:
            # Again, until there is none: one that is being started is a process that starts another.
            while found := keepers(Path(name)):
                for keeper in found:
                    with suppress(psutil.NoSuchProcess):
                        keeper.kill()
                        keeper.wait()


def keepers(node_dir: Path) -> list[psutil.Process]:
    """The processes that keep what lies in `node_dir`."""
    wanted = {"holdfast.keeper", str(node_dir)}
    return [each for each in psutil.process_iter(["cmdline"]) if wanted <= set(each.info["cmdline"] or ())]


class Look(NamedTuple):
    """The content of the slots at one moment: whether any rank was copying its part of a snapshot, and the newest step
    that was copied, sealed, and known to be in storage, on all ranks (-1: none)."""

    is_copying: bool
    copied: int
    sealed: int
    committed: int


def look(job: Training) -> Look:
    """Look at the slots of a job in the memory of the node, each of which is for a snapshot of one rank."""
    assert job.node_dir is not None
    records = []
    assert job.save_to is not None
    with NodeFolder(parse(job.save_to).root, node_dir=job.node_dir) as folder:
        for name in slot_names(folder):
            with Slot(folder, name) as slot:
                records.append(slot.record)

    def newest(*states: SlotState) -> int:
        steps = [record.contents.step for record in records if record.contents and record.state in states]
        return max((step for step in steps if steps.count(step) == job.world_size), default=-1)

    return Look(
        is_copying=any(record.state == SlotState.WRITING for record in records),
        copied=newest(SlotState.STAGED, SlotState.SEALED, SlotState.COMMITTED),
        sealed=newest(SlotState.SEALED, SlotState.COMMITTED),
        committed=newest(SlotState.COMMITTED),
    )
