"""Saves that go to a disk of the node before they go to the run, and restores that find them there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from holdfast import Checkpointer, Memory
from holdfast.node_disk.disk_folder import found_parts
from holdfast.node_memory.noted_disks import NotedDisk
from tests.support.models import start_new_job
from tests.support.nursery import until

NUMEL = 24_000


class Away:
    """The run's folder, which is renamed while its store does not answer."""

    def __init__(self, run: str) -> None:
        self._path = Path(run)
        self._elsewhere = self._path.with_name("elsewhere")
        self._path.rename(self._elsewhere)

    def comes_back(self) -> None:
        self._elsewhere.rename(self._path)


def on_disk(disk: Path, run: str) -> dict[int, bool]:
    """The steps on a disk, and whether the run has them too."""
    parts = found_parts(NotedDisk(str(disk), os.path.realpath(run)))
    return {part.generation.step: part.is_drained for part in parts}


def nodes_of(root: Path, number: int) -> tuple[Path, Path]:
    """The folders of a node in memory and on its disk."""
    memory, disk = root / f"memory{number}", root / f"disk{number}"
    memory.mkdir(exist_ok=True)
    return memory, disk


def state_of(step: int = -1) -> dict[str, object]:
    """A tensor that all ranks of the job share among them, and a value."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(NUMEL, dtype=torch.float32) * (step + 1)
    return {"w": distribute_tensor(whole, mesh, [Shard(0)]), "progress": {"step": step}}


def set_state(state: dict[str, object], step: int) -> None:
    for name, value in state_of(step).items():
        if isinstance(value, DTensor):
            held = state[name]
            assert isinstance(held, DTensor)
            held.to_local().copy_(value.to_local())
    state["progress"] = {"step": step}


def is_at(state: dict[str, object], step: int) -> bool:
    """Whether the state is that of `step`, bit for bit."""
    found, expected = state["w"], state_of(step)["w"]
    assert isinstance(found, DTensor)
    assert isinstance(expected, DTensor)
    return torch.equal(found.to_local(), expected.to_local()) and state["progress"] == {"step": step}


def save_and_die(root: Path, run: str, steps: int, num_nodes: int) -> None:
    """Save step 0 durably, and the others while the run is away; die when the disks have them."""
    rank = dist.get_rank()
    memory, disk = nodes_of(root, rank % num_nodes)
    start_new_job()
    state = state_of()
    own = Checkpointer(run, state, memory=Memory(node_dir=memory), local=disk, timeout_s=60.0)
    own.restore()
    for step in range(steps):
        set_state(state, step)
        handle = own.save(step)
        if step == 0:
            handle.durable.wait(60)
            dist.barrier()
            if rank == 0:
                Away(run)
            dist.barrier()
    until(lambda: steps - 1 in on_disk(disk, run))
    dist.barrier()
    until(lambda: len(list(disk.rglob("*.safetensors"))) >= steps)
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
