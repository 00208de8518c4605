"""Replica groups of torchft, with its own lighthouse and managers: one dies, others go on, more of them resume.

``make test-titan`` runs these. The loop is that of the guide.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torchft.coordination import LighthouseServer

import holdfast
from tests.support.bound import bits

pytestmark = [pytest.mark.titan, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "torchtitan.md"
JOB = """
import os, signal, sys, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
import holdfast

replica, num_groups, num_steps, killed = map(int, sys.argv[1:])
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)), load_state_dict=None, state_dict=None, min_replica_size=1,
    replica_id=f"replica_{replica}", store_addr="127.0.0.1", store_port=store.port, rank=0, world_size=1,
    timeout=timedelta(seconds=60), use_async_quorum=False,
)
torch.manual_seed(replica)  # torchft brings the groups to one state
model = DistributedDataParallel(manager, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=0.01))

def train_step():
    step = manager.current_step()
    if step == killed:
        checkpointer.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    torch.manual_seed(100 * step + (manager.participating_rank() or 0))
    model(torch.randn(4, 4)).square().mean().backward()
    optimizer.step()

Path(f"ready-{replica}").touch()
while len([*Path().glob("ready-*")]) < num_groups:
    time.sleep(0.05)
SNIPPET
torch.save({"first": first, "model": model.module.state_dict()}, f"group-{replica}.pt")
manager.shutdown()
"""


@contextmanager
def groups(folder: Path, num_groups: int, num_steps: int, *, killed: int = -1) -> Iterator[None]:
    """Run so many replica groups of one rank in `folder`; the first one kills itself before the step `killed`."""
    (snippet,) = re.findall(r"```py\n(.*?)\n```", GUIDE.read_text(), re.DOTALL)
    script = JOB.replace(
        "SNIPPET", snippet.replace("checkpointer.restore()", "first = checkpointer.restore().next_step")
    )
    script = script.replace(
        '"runs/torchft", state', '"run", state, memory=holdfast.Memory(node_dir=Path("node").resolve())'
    )
    (folder / "train.py").write_text(f"num_steps = {num_steps}\n{script}")
    for name in (*folder.glob("ready-*"), *folder.glob("group-*")):
        name.unlink()
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=5000, quorum_tick_ms=50)
    environment = {
        "TORCHFT_LIGHTHOUSE": lighthouse.address(),
        "PYTHONPATH": ":".join(sys.path),
        "PATH": "/usr/bin:/bin",
    }
    jobs = []
    try:
        for number in range(num_groups):
            ends = str(killed if number == 0 else -1)
            command = [sys.executable, "train.py", str(number), str(num_groups), str(num_steps), ends]
            with (folder / f"log-{number}").open("w") as log:
                jobs.append(subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log))
        for number, job in enumerate(jobs):
            status = job.wait(120)
            assert (status == 0) is (number > 0 or killed < 0), (folder / f"log-{number}").read_text()[-3000:]
        yield
    finally:
        for job in jobs:
            job.kill()
            job.wait()
        lighthouse.shutdown()


def weights_of(folder: Path, number: int) -> tuple[int, dict[str, bytes]]:
    """The step with which a group began, and the bits of the weights with which it ended."""
    import torch

    found = torch.load(folder / f"group-{number}.pt", weights_only=True)
    return found["first"], {f"model/{name}": bits(weight) for name, weight in found["model"].items()}


def test_groups_go_on_without_a_dead_one_and_more_of_them_resume(tmp_path: Path, node_dir: Path) -> None:
    with groups(tmp_path, 2, 6, killed=3):
        assert [each.step for each in holdfast.ls(tmp_path / "run")] == [5, 4, 3, 2, 1, 0]
        assert {each.place.split(".")[0] for each in holdfast.ls(tmp_path / "run")} == {"1", "2"}  # two groups saved
    view = holdfast.open(tmp_path / "run")
    assert view.value("torchft/step") == 6
    _, weights = weights_of(tmp_path, 1)
    assert {name: bits(view[name][...]) for name in weights} == weights
    with groups(tmp_path, 3, 8):
        ended = [weights_of(tmp_path, number) for number in range(3)]
    assert [first for first, _ in ended] == [6, 6, 6]
    view = holdfast.open(tmp_path / "run")
    stored = {name: bits(view[name][...]) for name in weights}
    assert [found for _, found in ended] == [stored] * 3
    assert stored != weights
    assert [each.step for each in holdfast.ls(tmp_path / "run")][:2] == [7, 6]
