"""The job of `engine_job` on emulated nodes: one rank on each, and a keeper that outlives it and does deeds.

The store of the process group lies on a node of its own, which nobody loses. The job ends when the test ends it, as a
launcher would, and another one goes on with the same nodes, with fewer, or with others.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch.distributed as dist

from tests.faults.engine_job import Restored, Spec, Truth, keep, train
from tests.faults.engine_points import Log
from tests.support.nodes import MEMORY, Node
from tests.support.nursery import Process, until

_PORT: Final = 29500
#: Two, three and four ranks divide it evenly.
NODE_NUMEL: Final = 12 * 2**14

_served: list[dist.TCPStore] = []


def serve_store(name: str, ready: Path) -> None:
    """The function of a process that serves the store of a process group, until it is killed."""
    _served.append(dist.TCPStore(name, _PORT, is_master=True, wait_for_workers=False))
    ready.touch()
    time.sleep(3600)


class NodeJob:
    """The processes of one job on some nodes."""

    def __init__(self, spec: Spec, nodes: Sequence[Node], launcher: Node) -> None:
        spec.log.mkdir()
        self.spec = replace(spec, world_size=len(nodes), host=launcher.name, port=_PORT)
        self.nodes = list(nodes)
        self.log = Log(spec.log)
        self.keepers: dict[Node, Process] = {}
        ready = spec.log / "store"
        self._store = launcher.start(serve_store, launcher.name, ready, err=spec.log / "store.err")
        until(lambda: ready.exists() or not self._store.is_running)
        assert self._store.is_running, self._store.err
        self.ranks: list[Process] = []

    def start_keepers(self) -> None:
        """Start a keeper on each node, which does deeds. Trainers find it."""
        for node in self.nodes:
            who = f"keeper-{node.number}"
            err = self.spec.log / f"{who}.err"
            self.keepers[node] = node.start(keep, self.spec, MEMORY, who, err=err)
        until(lambda: all((self.spec.log / f"keeper-{node.number}.pid").exists() for node in self.nodes))

    def start_ranks(self) -> None:
        """Start the rank of each node."""
        self.ranks = [
            node.start(train, self.spec, rank, err=self.spec.log / f"rank-{rank}.err")
            for rank, node in enumerate(self.nodes)
        ]

    def until_told(self, event: str, *, step: int | None = None, who: Sequence[str] = ()) -> None:
        """Wait until all ranks, or all of `who`, have logged an event (of that step)."""
        for each in who or [f"rank-{rank}" for rank in range(len(self.nodes))]:
            until(lambda each=each: self.has_told(each, event, step) or self._goes_on(each))  # type: ignore[misc]
            assert self.has_told(each, event, step), f"{each} did not tell '{event}': {self._err(each)}"

    def has_told(self, who: str, event: str, step: int | None = None) -> bool:
        """Whether a process has logged an event (of that step)."""
        return any(step in (None, each.get("step")) for each in self.log.told(who, event))

    def _goes_on(self, who: str) -> bool:
        """Returns True when a process has ended, and will tell no more."""
        role, _, number = who.partition("-")
        if role == "rank":
            return not self.ranks[int(number)].is_running
        return not any(process.is_running for node, process in self.keepers.items() if node.number == int(number))

    def _err(self, who: str) -> str:
        return (self.spec.log / f"{who}.err").read_text(errors="replace")[-3000:]

    def newest(self, event: str) -> int:
        """The greatest step of which any rank has logged this event; -1 for none."""
        told = [each["step"] for rank in range(len(self.nodes)) for each in self.log.told(f"rank-{rank}", event)]
        return max(told, default=-1)

    def restored(self, truth: Truth) -> Restored:
        """The step that all ranks have restored, and from where, checked bit for bit; -1 for nothing."""
        self.until_told("restored")
        world_size = len(self.nodes)
        told = [self.log.told(f"rank-{rank}", "restored")[0] for rank in range(world_size)]
        assert len({(each["step"], each["tier"]) for each in told}) == 1, told
        step = told[0]["step"]
        if step is not None:
            for rank, each in enumerate(told):
                assert each["digest"] == truth.digest(step, rank=rank, world_size=world_size), f"step {step} differs"
        return Restored(-1 if step is None else step, told[0]["tier"])

    def ended_well(self) -> None:
        """Wait until all ranks have ended without an error."""
        for process in self.ranks:
            assert process.wait() == 0, process.err[-3000:]

    def end(self) -> None:
        """Kill the ranks that still live, and the store. The keepers go on."""
        for process in (*self.ranks, self._store):
            process.send(signal.SIGKILL)
        for process in (*self.ranks, self._store):
            process.wait()


@contextmanager
def node_job(spec: Spec, nodes: Sequence[Node], launcher: Node, *, keepers: bool = False) -> Iterator[NodeJob]:
    """Start a job on these nodes, with keepers that do deeds, or with those that its ranks find or start. The end of
    the block ends the ranks."""
    job = NodeJob(spec, nodes, launcher)
    try:
        if keepers:
            job.start_keepers()
        job.start_ranks()
        yield job
    finally:
        job.end()
