"""The agents of torch 2.13 keep one store for all restarts of a job of several nodes, which each agent counts alone."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

TIMEOUT_S = 120


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.slow
def test_the_ranks_of_two_nodes_that_start_again_read_nothing_of_the_save_in_which_one_was_killed(
    tmp_path: Path,
) -> None:
    """Rank 1 took the answer to the killed rank for that to its own call, and the job ended."""
    rendezvous = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:{free_port()} --rdzv-conf=last_call_timeout=1,is_host="
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=1", "--monitor-interval=0.1", "--rdzv-id=job"]
    agents = []
    for is_host in (1, 0):
        torchrun = [sys.executable, "-m", "torch.distributed.run", *options, *(rendezvous + str(is_host)).split()]
        with (tmp_path / f"agent-{is_host}.log").open("wb") as log:
            command = [*torchrun, "--module", "tests.faults.restarted_job", str(tmp_path)]
            agents.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    try:
        statuses = [agent.wait(TIMEOUT_S) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()  # ends its rank
            agent.wait()
    logs = "".join((tmp_path / f"agent-{is_host}.log").read_text() for is_host in (1, 0))
    assert statuses == [0, 0], logs
    assert {path.name for path in tmp_path.glob("ended-*")} == {"ended-0", "ended-1"}
    view = holdfast.open(tmp_path / "run")
    assert view.step == 9
    assert view["weight"][...].tolist() == [3.0] * 64
