"""The job of `engine_job` under elastic agents, one on each emulated node: they meet as torchrun's do, and start its
ranks again when one fails or leaves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tests.faults.engine_job import Spec, train_in_group
from tests.support.nodes import Network, Node
from tests.support.nursery import Process

_PORT = 29400
#: An agent that sends no sign of life for so long is taken as lost.
_LOST_S = 3


@dataclass(frozen=True)
class Meeting:
    """The host where agents meet, and the limits of their number."""

    host: str
    min_nodes: int
    max_nodes: int


def agent(meeting: Meeting, spec: Spec) -> None:
    """The function of an agent's process, which is that of torchrun. It forks its rank, which has torch then."""
    # Else ranks that start again find the addresses of gloo of the ranks before them in the store that they share.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=meeting.min_nodes,
        max_nodes=meeting.max_nodes,
        nproc_per_node=1,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{meeting.host}:{_PORT}",
        rdzv_configs={
            "last_call_timeout": 1,
            "timeout": 60,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": _LOST_S,
        },
        max_restarts=3,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, _rank)(spec)


def _rank(spec: Spec) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    train_in_group(spec)


def start_agents(network: Network, spec: Spec, *, min_nodes: int, err: Path) -> dict[Node, Process]:
    """Start an agent on every node, which train as long as `min_nodes` are there."""
    nodes = network.nodes
    meeting = Meeting(nodes[0].name, min_nodes, len(nodes))
    return {node: node.start(agent, meeting, spec, err=err.with_name(f"{err.name}-{node.name}")) for node in nodes}
