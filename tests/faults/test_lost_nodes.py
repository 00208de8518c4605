"""Nodes of a job that are lost, with their memory: on which nodes, from where and with what the job goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from tests.faults.elastic_job import start_agents
from tests.faults.engine_job import PauseAt, Restored, Spec, Truth
from tests.faults.engine_points import Log
from tests.faults.node_job import NODE_NUMEL, node_job
from tests.support.nodes import MEMORY, Network, Node
from tests.support.nursery import Process, until

STOP: Final = 6


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth(NODE_NUMEL)


def spec_of(run: str, log: Path, *, stop: int = STOP) -> Spec:
    """A job that saves all its steps into memory alone, but for the first."""
    pauses: Mapping[int, PauseAt] = dict.fromkeys((1, 2, 3), "over")
    return Spec(run, (MEMORY,), log, numel=NODE_NUMEL, stop=stop, durable_every=100, pauses=pauses, timeout_s=20)


@pytest.mark.parametrize("loss", ["one lost", "none", "one booted", "one replaced"])
@pytest.mark.few(1)
def test_memory_without_protection_is_lost_with_its_node(
    network: Network, launcher: Node, run: str, truth: Truth, tmp_path: Path, loss: str
) -> None:
    nodes = network.start(4)
    with node_job(spec_of(run, tmp_path / "log"), nodes, launcher, keepers=True) as job:
        for step in (1, 2):
            job.log.let(f"pass-{step}")
        job.until_told("paused", step=3)
        if loss == "one lost":
            nodes.pop(2).lose()
        elif loss == "one booted":
            nodes[2].reboot()
        elif loss == "one replaced":
            nodes[2] = network.replace(nodes[2])
    with node_job(spec_of(run, tmp_path / "next", stop=5), nodes, launcher) as job:
        assert job.restored(truth) == (Restored(2, "node memory") if loss == "none" else Restored(0, "storage"))
        for step in (1, 2, 3):
            job.log.let(f"pass-{step}")
        job.ended_well()


@pytest.mark.slow
def test_torchrun_goes_on_without_a_lost_node_on_those_that_are_left(
    network: Network, run: str, truth: Truth, tmp_path: Path
) -> None:
    nodes = network.start(4)
    log = Log(tmp_path / "log")
    log.folder.mkdir()
    spec = Spec(run, (MEMORY,), log.folder, numel=NODE_NUMEL, stop=STOP, pauses={3: "durable"}, timeout_s=8)
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
