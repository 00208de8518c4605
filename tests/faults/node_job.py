"""The job of `engine_job` on emulated nodes: one rank on each, and a keeper that outlives it and does deeds.

The store of the process group lies on a node of its own, which nobody loses. The job ends when the test ends it, as a
launcher would, and another one goes on with the same nodes, with fewer, or with others.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVarTuple
from unittest.mock import patch

import torch.distributed as dist

from holdfast.node_memory.keeper_lock import is_kept
from holdfast.node_memory.peering import PeerTable, noted_table
from tests.faults.engine_job import Restored, Spec, Truth, keep, train
from tests.faults.engine_points import Log, Role
from tests.support.nodes import MEMORY, Node
from tests.support.nursery import Process, until

_PORT: Final = 29500
#: Limit for what a test waits for, on a machine that others use too.
_PATIENCE_S: Final = 100.0
#: Two, three and four ranks divide it evenly.
NODE_NUMEL: Final = 12 * 2**14

#: By how many seconds the clocks of nodes are wrong.
Clocks: TypeAlias = Mapping[Node, float]

Ts = TypeVarTuple("Ts")

_served: list[dist.TCPStore] = []


def serve_store(name: str, ready: Path) -> None:
    """The function of a process that serves the store of a process group, until it is killed."""
    _served.append(dist.TCPStore(name, _PORT, is_master=True, wait_for_workers=False))
    ready.touch()
    time.sleep(3600)


def at_clock(offset_s: float, function: Callable[[*Ts], None], *args: *Ts) -> None:
    """Call a function in a process whose clock is wrong: Python's, not that of the times of files."""
    right, right_ns = time.time, time.time_ns
    with (
        patch.object(time, "time", lambda: right() + offset_s),
        patch.object(time, "time_ns", lambda: right_ns() + round(offset_s * 1e9)),
    ):
        function(*args)


class NodeJob:
    """The processes of one job on some nodes, with clocks that may be wrong by some seconds."""

    def __init__(self, spec: Spec, nodes: Sequence[Node], launcher: Node, *, clocks: Clocks | None) -> None:
        spec.log.mkdir()
        self._clocks = clocks or {}
        self.spec = replace(spec, world_size=len(nodes), host=launcher.name, port=_PORT)
        self.nodes = list(nodes)
        self.log = Log(spec.log)
        self.keepers: dict[Node, Process] = {}
        ready = spec.log / "store"
        self._store = launcher.start(serve_store, launcher.name, ready, err=spec.log / "store.err")
        until(lambda: ready.exists() or not self._store.is_running, timeout_s=_PATIENCE_S)
        assert self._store.is_running, self._store.err
        self.ranks: list[Process] = []

    def start_keepers(self) -> None:
        """Start a keeper on each node, which does deeds. Trainers find it."""
        for node in self.nodes:
            who = f"keeper-{node.number}"
            err = self.spec.log / f"{who}.err"
            offset_s = self._clocks.get(node, 0.0)
            self.keepers[node] = node.start(at_clock, offset_s, keep, self.spec, MEMORY, who, err=err)
        until(lambda: all(self._is_kept(node) for node in self.nodes), timeout_s=_PATIENCE_S)

    def start_ranks(self) -> None:
        """Start the rank of each node."""
        self.ranks = [
            node.start(
                at_clock, self._clocks.get(node, 0.0), train, self.spec, rank, err=self.spec.log / f"rank-{rank}.err"
            )
            for rank, node in enumerate(self.nodes)
        ]

    def _is_kept(self, node: Node) -> bool:
        with self.spec.folder(node.memory) as folder:
            return is_kept(folder)

    def partner(self, node: Node) -> Node:
        """The node that gets the one copy of what `node` saves."""
        table = self._table(node)
        (number,) = table.targets[table.own]
        return self.nodes[number]

    def group(self, node: Node) -> list[Node]:
        """The nodes that share parity with `node`, itself too."""
        return [self.nodes[number] for number in self._table(node).group]

    def _table(self, node: Node) -> PeerTable:
        with self.spec.folder(node.memory) as folder:
            table = noted_table(folder)
        assert table is not None
        return table

    def until_told(self, event: str, *, who: Sequence[str] = (), **more: Any) -> None:
        """Wait until all ranks, or all of `who`, have logged an event, with `more` such as its step."""
        for each in who or [f"rank-{rank}" for rank in range(len(self.nodes))]:
            until(
                lambda each=each: self.has_told(each, event, **more) or self._has_ended(each),  # type: ignore[misc]
                timeout_s=_PATIENCE_S,
            )
            assert self.has_told(each, event, **more), f"{each} did not tell '{event}': {self._err(each)}"

    def has_told(self, who: str, event: str, **more: Any) -> bool:
        """Whether a process has logged an event, with `more` such as its step."""
        return any(more.items() <= each.items() for each in self.log.told(who, event))

    def _has_ended(self, who: str) -> bool:
        """Whether a process has ended, and will tell no more."""
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
            assert process.wait(_PATIENCE_S) == 0, process.err[-3000:]

    def end(self) -> None:
        """Kill the ranks that still live, and the store. The keepers go on."""
        for process in (*self.ranks, self._store):
            process.send(signal.SIGKILL)
        for process in (*self.ranks, self._store):
            process.wait()


@contextmanager
def node_job(
    spec: Spec,
    nodes: Sequence[Node],
    launcher: Node,
    *,
    keepers: bool = False,
    armed: Sequence[Role] = (),
    clocks: Clocks | None = None,
) -> Iterator[NodeJob]:
    """Start a job on these nodes, with keepers that do deeds, or with those that its ranks find or start. Deeds of
    `armed` roles are armed from the start. The end of the block ends the ranks."""
    job = NodeJob(spec, nodes, launcher, clocks=clocks)
    try:
        for role in armed:
            job.log.let(f"armed-{role}")
        if keepers:
            job.start_keepers()
        job.start_ranks()
        yield job
    finally:
        job.end()
