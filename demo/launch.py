"""Processes: start a training under torchrun, follow it, and kill one of its ranks in the middle of a save."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import msgspec

from demo.records import Started, read_losses, started_file

_ROOT = Path(__file__).parents[1]
_HOST = "127.0.0.1"
#: One thread per rank, as torchrun sets for several ranks on a node; a fixed number is part of equal losses.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
_FOLLOW_S = 0.1
_WATCH_S = 0.0005
_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 40.0

OnStep = Callable[[int], None]


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True)
class Training:
    """What to train: `world_size` ranks on `nodes` nodes of this machine, each under a torchrun of its own."""

    folder: Path
    world_size: int
    steps: int
    save_to: Path | None = None
    save_every: int = 1
    nodes: int = 1
    timeout_s: float = 600.0

    def log(self, node: int) -> Path:
        """What torchrun and the ranks of `node` print."""
        return self.folder / f"node-{node}.log"

    def losses(self) -> dict[int, float]:
        """Loss by step, so far."""
        return read_losses(self.folder)

    def exit_status_of_rank(self, rank: int, pid: int) -> int:
        """The status with which a failed rank ended, from the summary of its torchrun."""
        summary = rf"rank\s*: {rank} .*\n\s*exitcode\s*: (-?\d+) \(pid: {pid}\)"
        if found := re.search(summary, self._printed()):
            return int(found[1])
        raise DemoError(f"No torchrun told how rank {rank} (pid {pid}) ended, see the logs in {self.folder}")

    def error_of_rank(self, rank: int) -> str:
        """What the training script printed when it ended with an error on `rank`; empty when it did not."""
        said = f"rank {rank}: "
        lines = self._printed().splitlines()
        return next((line.removeprefix(said) for line in lines if line.startswith(said)), "")

    def _printed(self) -> str:
        return "\n".join(self.log(node).read_text() for node in range(self.nodes))

    def command(self, node: int, port: int) -> list[str]:
        """How to start the torchrun of `node`."""
        torchrun = {
            "--nnodes": self.nodes,
            "--node-rank": node,
            "--nproc-per-node": self.world_size // self.nodes,
            "--master-addr": _HOST,
            "--master-port": port,
            "--module": "demo.train",
        }
        script = {"--witness": self.folder, "--steps": self.steps}
        if self.save_to is not None:
            script |= {"--save-to": self.save_to, "--save-every": self.save_every, "--timeout-s": self.timeout_s}
        options = [str(word) for option in (torchrun | script).items() for word in option]
        return [sys.executable, "-m", "torch.distributed.run", *options]


@dataclass(frozen=True)
class Killed:
    """A rank that was killed while it wrote `file` of the checkpoint of `step`."""

    rank: int
    pid: int
    step: int
    file: Path


class Running:
    """A training that runs."""

    def __init__(self, training: Training, nodes: list[subprocess.Popen[bytes]], on_step: OnStep) -> None:
        self._training = training
        self._nodes = nodes
        self._on_step = on_step
        self._deadline_s = time.monotonic() + _TIMEOUT_S

    def wait(self) -> list[int]:
        """Wait for the end of all nodes; the exit status of each torchrun."""
        while self._running():
            time.sleep(_FOLLOW_S)
            self._follow()
        self._follow()
        return [node.wait() for node in self._nodes]

    def finish(self) -> None:
        """Wait for the end; `DemoError` with the log when any node failed."""
        for node, status in enumerate(self.wait()):
            if status:
                log = self._training.log(node)
                raise DemoError(f"A training failed with status {status}, see {log}:\n{_last_words(log.read_text())}")

    def kill_in_save(self, *, rank: int, step: int) -> Killed:
        """SIGKILL `rank` while it writes its data file of the first save from `step` on.

        The rank is stopped before it is killed, to be sure of the moment: one that had finished its file by then, so
        that the save could still be committed, is let go, and the next save is tried.
        """
        assert self._training.save_to is not None
        checkpoints = self._training.save_to / "checkpoints"
        while self._running() and self._follow() < step - 1:
            time.sleep(_FOLLOW_S)
        pid = self._pid(rank)
        while self._running():
            file = file_in_the_making(pid, checkpoints)
            if file is None:
                time.sleep(_WATCH_S)
                continue
            with stopped(pid):
                if file == file_in_the_making(pid, checkpoints):
                    os.kill(pid, signal.SIGKILL)
                    return Killed(rank, pid, _step_of(file), file)
        raise DemoError(f"The training ended before rank {rank} was caught in a save, see {self._training.folder}")

    def _pid(self, rank: int) -> int:
        try:
            return msgspec.json.decode((self._training.folder / started_file(rank)).read_bytes(), type=Started).pid
        except FileNotFoundError:
            raise DemoError(f"Rank {rank} did not start, see the logs in {self._training.folder}") from None

    def _running(self) -> bool:
        if time.monotonic() > self._deadline_s:
            raise DemoError(f"A training took more than {_TIMEOUT_S:.0f} s, see the logs in {self._training.folder}")
        return any(node.poll() is None for node in self._nodes)

    def _follow(self) -> int:
        step = max(self._training.losses(), default=0)
        self._on_step(step)
        return step


def _last_words(log: str) -> str:
    """The end of what the ranks printed, before torchrun's account of it."""
    lines = log.splitlines()
    ranks = list(takewhile(lambda line: "torch/distributed/elastic" not in line, lines))
    return "\n".join((ranks or lines)[-15:])


@contextmanager
def running(training: Training, on_step: OnStep) -> Iterator[Running]:
    """Start `training`; none of its processes outlives the block. `on_step` hears of the newest step."""
    training.folder.mkdir(parents=True)
    port = _free_port()
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for node in range(training.nodes):
            with training.log(node).open("wb") as log:
                command, environment = training.command(node, port), os.environ | _ENVIRONMENT
                nodes.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=_ROOT, env=environment))
        yield Running(training, nodes, on_step)
    finally:
        for process in nodes:
            # torchrun passes this on to its ranks, and kills those that do not end within 30 s.
            process.terminate()
        for process in nodes:
            process.wait(_END_TIMEOUT_S)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process inside the block, every thread of it, and let it go on at the end if it still lives."""
    os.kill(pid, signal.SIGSTOP)
    try:
        while not _has_stopped(pid):
            time.sleep(_WATCH_S)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _has_stopped(pid: int) -> bool:
    # A thread inside a write or fsync stops only when that is done. The state is the word after the name in brackets;
    # threads may also have ended.
    threads = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(thread.rpartition(")")[2].split()[0] in "TXZ" for thread in threads)


def file_in_the_making(pid: int, folder: Path) -> Path | None:
    """A temporary file below `folder`, invisible to readers of checkpoints, that the process has open just now."""
    # The kernel adds " (deleted)" to the name of a file that is no longer under it.
    candidates = (file for file in _open_files(pid) if file.is_relative_to(folder))
    return next((file for file in candidates if file.name.startswith(".") and " " not in file.name), None)


def _open_files(pid: int) -> Iterator[Path]:
    # The process may end, or close a file, while we look.
    with suppress(FileNotFoundError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):
                yield descriptor.readlink()


def _step_of(file: Path) -> int:
    """Checkpoint folders are called step-<number>-<id>."""
    return int(file.parent.name.split("-")[1])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
