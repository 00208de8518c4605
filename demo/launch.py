"""Processes: start a training under torchrun, and follow it."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import msgspec

from demo.memory import Look, look
from demo.records import Started, read_losses, started_file

_ROOT = Path(__file__).parents[1]
_HOST = "127.0.0.1"
#: One thread per rank, as torchrun sets for several ranks on a node; a fixed number is part of equal losses.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
_FOLLOW_S = 0.1
_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 40.0

OnStep = Callable[[int], None]


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass(frozen=True)
class Training:
    """A training: `world_size` ranks on `nodes` nodes of this machine, each node under its own torchrun. Of all
    `steps` the first `until` are made, where that is given. With a `node_dir`, a folder in memory, saves go there
    first."""

    folder: Path
    world_size: int
    steps: int
    save_to: Path | None = None
    save_every: int = 1
    nodes: int = 1
    timeout_s: float = 600.0
    until: int | None = None
    node_dir: Path | None = None

    @property
    def end(self) -> int:
        """The number of steps after which it ends."""
        return self.steps if self.until is None else self.until

    def log(self, node: int) -> Path:
        """The file of the output of torchrun and of the ranks of `node`."""
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
        """The error that the training script printed on `rank`; empty if it ended without one."""
        said = f"rank {rank}: "
        lines = self._printed().splitlines()
        return next((line.removeprefix(said) for line in lines if line.startswith(said)), "")

    def _printed(self) -> str:
        return "\n".join(self.log(node).read_text() for node in range(self.nodes))

    def command(self, node: int, port: int) -> list[str]:
        """The command that starts the torchrun of `node`."""
        torchrun = {
            "--nnodes": self.nodes,
            "--node-rank": node,
            "--nproc-per-node": self.world_size // self.nodes,
            "--master-addr": _HOST,
            "--master-port": port,
            "--module": "demo.train",
        }
        script = {"--witness": self.folder, "--steps": self.steps, "--until": self.end}
        if self.save_to is not None:
            script |= {"--save-to": self.save_to, "--save-every": self.save_every, "--timeout-s": self.timeout_s}
        if self.node_dir is not None:
            script |= {"--node-dir": self.node_dir}
        options = [str(word) for option in (torchrun | script).items() for word in option]
        return [sys.executable, "-m", "torch.distributed.run", *options]


class Running:
    """A training that runs."""

    def __init__(self, training: Training, nodes: list[subprocess.Popen[bytes]], on_step: OnStep) -> None:
        self.training = training
        self._nodes = nodes
        self._on_step = on_step
        self._deadline_s = time.monotonic() + _TIMEOUT_S

    def wait(self) -> list[int]:
        """Wait for the end of all nodes; the exit status of each torchrun."""
        while self.is_running():
            time.sleep(_FOLLOW_S)
            self.follow()
        self.follow()
        return [node.wait() for node in self._nodes]

    def finish(self) -> None:
        """Wait for the end; `DemoError` with the log when any node failed."""
        for node, status in enumerate(self.wait()):
            if status:
                log = self.training.log(node)
                raise DemoError(f"A training failed with status {status}, see {log}:\n{_last_words(log.read_text())}")

    @property
    def run(self) -> Path:
        """The run that it saves to."""
        assert self.training.save_to is not None
        return self.training.save_to

    @property
    def node_dir(self) -> Path:
        """The folder of its memory."""
        assert self.training.node_dir is not None
        return self.training.node_dir

    def look(self) -> Look:
        """Look at the snapshots in its memory now."""
        return look(self.run, self.node_dir, world_size=self.training.world_size)

    def pid(self, rank: int) -> int:
        """The process of a rank, which has begun to train."""
        try:
            return msgspec.json.decode((self.training.folder / started_file(rank)).read_bytes(), type=Started).pid
        except FileNotFoundError:
            raise DemoError(f"Rank {rank} did not start, see the logs in {self.training.folder}") from None

    def is_running(self) -> bool:
        """Whether any node runs. `DemoError` when that is so for too long."""
        if time.monotonic() > self._deadline_s:
            raise DemoError(f"A training took more than {_TIMEOUT_S:.0f} s, see the logs in {self.training.folder}")
        return any(node.poll() is None for node in self._nodes)

    def follow_to(self, step: int) -> None:
        """Return when `step` is done, or the training has ended."""
        while self.is_running() and self.follow() < step:
            time.sleep(_FOLLOW_S)

    def follow(self) -> int:
        """The newest step that is done (-1: none yet). Calls `on_step` with the number of steps that are done."""
        step = max(self.training.losses(), default=-1)
        self._on_step(step + 1)
        return step


def _last_words(log: str) -> str:
    """The end of what the ranks printed, before torchrun's account of it."""
    lines = log.splitlines()
    ranks = list(takewhile(lambda line: "torch/distributed/elastic" not in line, lines))
    return "\n".join((ranks or lines)[-15:])


@contextmanager
def running(training: Training, on_step: OnStep) -> Iterator[Running]:
    """Start `training`; its processes end with the block. Calls `on_step` with the number of steps that are done."""
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port
