"""Nodes of a job that are lost, with their memory: on which nodes, from where and with what the job goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.faults.elastic_job import start_agents
from tests.faults.engine_job import Spec, Truth
from tests.faults.engine_points import Log
from tests.support.nodes import MEMORY, Network, Node
from tests.support.nursery import Process, until

#: Four ranks divide it evenly, and so do three.
NUMEL: Final = 12 * 2**14
STOP: Final = 6


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(NUMEL)


@pytest.mark.slow
def test_torchrun_goes_on_without_a_lost_node_on_those_that_are_left(
    network: Network, run: str, truth: Truth, tmp_path: Path
) -> None:
    nodes = network.start(4)
    log = Log(tmp_path / "log")
    log.folder.mkdir()
    spec = Spec(run, (MEMORY,), log.folder, numel=NUMEL, stop=STOP, pauses={3: "durable"}, timeout_s=8)
    agents = start_agents(network, spec, min_nodes=3, err=tmp_path / "err")
    try:
        until(lambda: all(log.told(f"rank-{rank}", "paused") for rank in range(4)) or not all_run(agents))
        assert all_run(agents), [each.err for each in agents.values()]
        agents.pop(nodes[3])
        nodes[3].lose()
        log.let("pass-3")
        for process in agents.values():
            assert process.wait(90) == 0, process.err
    finally:
        for process in agents.values():
            process.kill()
    for rank in range(3):
        _, restored = log.told(f"rank-{rank}", "restored")
        assert (restored["step"], restored["tier"], restored["world_size"]) == (2, "storage", 3)
        assert restored["digest"] == truth.digest(2, rank=rank, world_size=3)
    assert truth.loaded(run) == STOP - 1


def all_run(agents: dict[Node, Process]) -> bool:
    return all(process.is_running for process in agents.values())
