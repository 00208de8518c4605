"""The nodes on which `tests.faults.history_play` plays histories, and the ranks of the jobs on them."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final, TypeVar

from tests.faults.history_job import TIMEOUT_S, serve_store
from tests.support.nodes import Network, Node
from tests.support.nursery import Process, until

#: Limit for what ranks are asked to do; they give up before.
PATIENCE_S: Final = TIMEOUT_S + 40.0
#: Networks have addresses for more nodes, but each history may lose some.
_MOST_STARTED: Final = 200

R = TypeVar("R")


class Cluster:
    """Nodes that one history after another uses, and two more, which serve the stores of process groups."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_networks = 0
        self.network: Network | None = None
        self.launchers: list[Node] = []

    def prepare(self, num_nodes: int) -> tuple[Network, list[Node]]:
        """The network, and so many nodes of it whose memory is empty."""
        network = self.network
        if network is not None and any(node.number > _MOST_STARTED for node in network.nodes):
            self.close()
            network = None
        if network is None:
            network = self.network = Network(self._folder / f"network-{self._num_networks}")
            self._num_networks += 1
            self.launchers = network.start(2)
            for number, launcher in enumerate(self.launchers):
                ready = network.folder / f"store-{number}"
                launcher.start(serve_store, launcher.name, ready, err=network.folder / f"store-{number}.err")
                until(ready.exists, timeout_s=PATIENCE_S)
        nodes = [node for node in network.nodes if node not in self.launchers][:num_nodes]
        return network, nodes + network.start(num_nodes - len(nodes))

    def close(self) -> None:
        """End all nodes."""
        if self.network is not None:
            self.network.close()
            self.network = None


@dataclass
class RunningJob:
    """The ranks of a job, and the node of each."""

    number: int
    nodes: list[Node]
    ranks: list[Process]
    connections: list[Connection]

    @property
    def members(self) -> list[Node]:
        """The nodes of the job, in the order of their first ranks."""
        return list(dict.fromkeys(self.nodes))

    def tell(self, name: str, *arguments: object) -> None:
        """Tell all ranks to do something."""
        for connection in self.connections:
            with suppress(BrokenPipeError, ConnectionError):
                connection.send((name, arguments))

    def answers(self, kind: type[R]) -> list[R]:
        """The answers of all ranks, which must be of this kind."""
        answers = self.any_answers()
        assert all(isinstance(each, kind) for each in answers), f"job {self.number}: {answers}\n{self.errors()}"
        return [each for each in answers if isinstance(each, kind)]

    def any_answers(self) -> list[object]:
        """The answers of all ranks; None of one that ended, or is silent."""
        answers: list[object] = [None] * len(self.connections)
        left = dict(enumerate(self.connections))
        end = time.monotonic() + PATIENCE_S
        while left and (ready := wait(list(left.values()), max(0.0, end - time.monotonic()))):
            for rank in [rank for rank, connection in left.items() if connection in ready]:
                with suppress(EOFError, ConnectionError):
                    answers[rank] = left[rank].recv()
                del left[rank]
        return answers

    def errors(self) -> str:
        """The ends of what ranks wrote to standard error."""
        return "\n".join(f"rank {rank}: {process.err[-1500:]}" for rank, process in enumerate(self.ranks))

    def end(self) -> None:
        """Kill the ranks that still live."""
        for process in self.ranks:
            process.send(signal.SIGKILL)
        for process in self.ranks:
            process.wait()
        for connection in self.connections:
            connection.close()
