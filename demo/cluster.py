"""A job on emulated nodes: one torchrun on each, which meet by the c10d rendezvous; and what lies in their memory."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from demo.processes import DemoError, Training
from demo.show import chapter
from demo.witness import notes
from holdfast.errors import CorruptError
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.peering import noted_port
from holdfast.node_memory.slots import WHOLE, Slot, copy_names, slot_names
from holdfast.run.paths import parse
from tests.support.nodes import MEMORY, Network, Node

_WATCH_S: Final = 0.01
_TIMEOUT_S, _END_TIMEOUT_S = 600.0, 60.0
_RENDEZVOUS_PORT: Final = 29400
#: The number of times that a node sends again what the other end does not acknowledge, before a connection counts as
#: broken: the ranks notice in a few seconds that a node is lost. The default, 15, takes a quarter of an hour.
_TCP_RETRIES: Final = 4
_ENVIRONMENT: Final = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # Else the ranks of torch 2.13 meet in the store of the agents, where those that start again find the addresses of
    # the ranks before them, and fail once more.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


class Held(NamedTuple):
    """A whole snapshot of one rank in the memory of a node: its own, or a copy for another node."""

    node: str
    rank: int
    step: int
    nbytes: int
    is_copy: bool


class NodeMemory(NamedTuple):
    """The memory of the nodes at one moment: the snapshots in it, and the addresses of the keepers."""

    held: tuple[Held, ...]
    keepers: frozenset[tuple[str, int]]

    def of_step(self, step: int) -> list[Held]:
        """The snapshots of one step that nodes hold."""
        return [each for each in self.held if each.step == step]


@dataclass
class ClusterJob:
    """A job of one rank on each node of a network, which goes on as long as there are `min_nodes`. Its folder gets the
    logs, and the notes of the witness in a folder for each world size."""

    folder: Path
    network: Network
    steps: int
    save_to: str
    storage_every: int
    memory_every: int
    min_nodes: int
    torchruns: dict[Node, subprocess.Popen[bytes]] = field(default_factory=dict)

    @contextmanager
    def running(self, title: str) -> Iterator[None]:
        """Start it, as a chapter of the story; none of its processes outlives the block, but keepers."""
        self.folder.mkdir(parents=True)
        nodes = self.network.nodes
        self._end_s = time.monotonic() + _TIMEOUT_S
        with chapter(title, steps=self.steps) as self._on_step:
            try:
                for node in nodes:
                    self.torchruns[node] = self._start(node, f"{self.min_nodes}:{len(nodes)}", nodes[0])
                yield
            finally:
                for torchrun in self.torchruns.values():
                    torchrun.terminate()
                for torchrun in self.torchruns.values():
                    torchrun.wait(_END_TIMEOUT_S)

    def await_note(self, kind: str, wanted: Callable[[int], bool], *, world_size: int) -> int:
        """The newest step that any of `world_size` ranks has noted, once it is `wanted`."""
        while True:
            steps = {
                int(note["step"]) for rank in range(world_size) for note in notes(self._of(world_size), kind, rank=rank)
            }
            if found := sorted(filter(wanted, steps)):
                return found[-1]
            if not self._is_running():
                raise DemoError(f"No rank has noted {kind!r}, see the logs in {self.folder}")
            self._require_running(f"no rank has noted {kind!r}")
            time.sleep(_WATCH_S)

    def wait(self) -> None:
        """Wait for the end of the job. `DemoError` if it fails on a node that is up."""
        while self._is_running():
            self._require_running("the job does not end")
            time.sleep(_WATCH_S)

    def of(self, world_size: int) -> Training:
        """The notes of the ranks of one world size."""
        return Training(self._of(world_size), world_size, self.steps)

    def memory(self) -> NodeMemory:
        """Look at the memory of all nodes that are up."""
        held: list[Held] = []
        keepers = set()
        for node in self.network.nodes:
            with NodeFolder(parse(self.save_to).root, node_dir=node.memory) as folder:
                held += _held(folder, node)
                if (port := noted_port(folder)) is not None:
                    keepers.add((node.address, port.port))
        return NodeMemory(tuple(held), frozenset(keepers))

    def _is_running(self) -> bool:
        return any(torchrun.poll() is None for torchrun in self.torchruns.values())

    def _of(self, world_size: int) -> Path:
        return self.folder / f"{world_size}-ranks"

    def _require_running(self, otherwise: str) -> None:
        worlds = [notes(folder, "loss") for folder in sorted(self.folder.glob("*-ranks"))]
        self._on_step(max((note["step"] + 1 for world in worlds for note in world), default=0))
        for node, torchrun in self.torchruns.items():
            status = torchrun.poll()
            if status and node in self.network.nodes:
                raise DemoError(f"The torchrun of {node.name} failed with status {status}, see {self._log(node)}")
        if time.monotonic() > self._end_s:
            raise DemoError(f"{otherwise} within {_TIMEOUT_S:.0f} s, see the logs in {self.folder}")

    def _log(self, node: Node) -> Path:
        return self.folder / f"{node.name}.log"

    def _start(self, node: Node, nodes: str, host: Node) -> subprocess.Popen[bytes]:
        tune = f"echo {_TCP_RETRIES} > /proc/sys/net/ipv4/tcp_retries2"
        node.popen(["sh", "-c", tune], log=self._log(node)).wait()
        torchrun = f"--nnodes={nodes} --nproc-per-node=1 --max-restarts=3 --monitor-interval=0.1 --rdzv-id=demo".split()
        torchrun += ["--rdzv-backend=c10d", f"--rdzv-endpoint={host.name}:{_RENDEZVOUS_PORT}"]
        torchrun += ["--rdzv-conf=last_call_timeout=5"]  # seconds; torch's 30 are for slow clusters
        script = ["demo.elastic", f"--witness={self.folder}", f"--steps={self.steps}", f"--until={self.steps}"]
        script += [f"--save-to={self.save_to}", f"--storage-every={self.storage_every}"]
        script += [f"--memory-every={self.memory_every}", f"--node-dir={MEMORY}"]
        command = [sys.executable, "-m", "torch.distributed.run", *torchrun, "--module", *script]
        return node.popen(command, environment=_ENVIRONMENT, log=self._log(node))


def _held(folder: NodeFolder, node: Node) -> Iterator[Held]:
    for name in (*slot_names(folder), *copy_names(folder)):
        with suppress(FileNotFoundError, CorruptError), Slot(folder, name) as slot:
            contents = slot.record.contents
            if contents is not None and slot.record.state in WHOLE:
                yield Held(node.address, slot.rank, contents.step, contents.files_nbytes, slot.is_copy)
