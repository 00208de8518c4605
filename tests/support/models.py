"""Small training jobs, and the truth about their tensors.

Every tensor of a job is overwritten with random bits that depend on a seed and on the tensor's name alone. So each
test knows the full tensors without asking any rank, and a rank's memory is compared with its slice of them, cut here
by torch's rule for dividing an axis and not by the code under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import LRScheduler, StepLR

from holdfast.run.session import JOB

Kind = Literal["plain", "ddp", "fsdp"]
Bits = npt.NDArray[np.uint8]


class Cell(NamedTuple):
    """A way to run the job, and on how many ranks."""

    kind: Kind
    world_size: int

    def __str__(self) -> str:
        return f"{self.kind}{self.world_size}"


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.as_tensor(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Axes that divide unevenly, a parameter shorter than most worlds, and buffers (one without any axis)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.blocks = nn.Sequential(Block(6, 10), Block(6, 5))
        self.pool = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.ones(2))
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.pool(self.blocks(self.embed(tokens)))
        return torch.as_tensor(self.head(hidden) * self.scale.sum())


@dataclass(frozen=True)
class Job:
    """The objects of a training script."""

    model: nn.Module
    optimizer: AdamW
    scheduler: LRScheduler
    progress: dict[str, object]

    @property
    def state(self) -> dict[str, object]:
        """The state that the job saves and loads."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "progress": self.progress,
        }


def build(kind: Kind, *, num_steps: int = 1, seed: int = 0) -> Job:
    """A job of that kind on the ranks of the process group, whose optimizer has taken `num_steps` steps.

    `seed` decides the values and hyper-parameters.
    """
    model: nn.Module = Net()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in unwrapped(model).blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    decay = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": decay, "weight_decay": 0.1 + seed}, {"params": others, "lr": 0.5 + seed}]
    optimizer = AdamW(groups, lr=0.25 + seed, betas=(0.5, 1 - 2.0 ** -(3 + seed % 8)))
    scheduler = StepLR(optimizer, step_size=2 + seed, gamma=0.5)
    for _ in range(num_steps):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        scheduler.step()
    progress: dict[str, object] = {"epoch": seed, "best": float("inf"), "seen": [2**70 + seed, ("a", None, 1.5)]}
    return Job(model, optimizer, scheduler, progress)


def filled(kind: Kind, seed: int) -> Job:
    """A job whose tensors all hold the bits of `seed`; DDP's buffers do so on rank 0 alone, as in real life."""
    job = build(kind, seed=seed)
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, tensor, is_buffer in tensors(job):
        own_seed = seed + 1000 * rank if kind == "ddp" and is_buffer else seed
        write(tensor, part_of(full(own_seed, name, tensor), tensor))
    return job


class Held(NamedTuple):
    """A tensor of a job and the name it is stored under."""

    name: str
    tensor: torch.Tensor
    is_buffer: bool


def tensors(job: Job) -> Iterator[Held]:
    """All tensors of a job: parameters, buffers, optimizer slots."""
    net = unwrapped(job.model)
    for name, parameter in net.named_parameters():
        yield Held(f"model/{name}", parameter, is_buffer=False)
        for slot, tensor in job.optimizer.state.get(parameter, {}).items():
            yield Held(f"optimizer/state/model/{name}/{slot}", tensor, is_buffer=False)
    for name, buffer in net.named_buffers():
        yield Held(f"model/{name}", buffer, is_buffer=True)


def unwrapped(model: nn.Module) -> Net:
    net = model.module if isinstance(model, DistributedDataParallel) else model
    assert isinstance(net, Net)
    return net


def differing(job: Job, seed: int) -> list[str]:
    """Names of what is not, bit for bit, what `seed` says: tensors in this rank's memory, and values."""
    names = [name for name, tensor, _ in tensors(job) if not holds(tensor, full(seed, name, tensor))]
    model = build("plain", seed=seed)
    if job.optimizer.state_dict()["param_groups"] != model.optimizer.state_dict()["param_groups"]:
        names.append("param_groups")
    if job.scheduler.state_dict() != model.scheduler.state_dict():
        names.append("scheduler")
    if job.progress != model.progress:
        names.append("progress")
    return names


def full(seed: int, name: str, tensor: torch.Tensor) -> Bits:
    """The bytes of the whole tensor: its shape, and an axis for the bytes of an element."""
    generator = np.random.default_rng([seed, crc32(name.encode())])
    return generator.integers(0, 256, (*tensor.shape, tensor.element_size()), np.uint8)


def part_of(whole: Bits, tensor: torch.Tensor) -> Bits:
    """The part of a whole tensor's bytes that this rank holds."""
    if not isinstance(tensor, DTensor):
        return whole
    assert tensor.placements == (Shard(0),)
    size = -(-len(whole) // tensor.device_mesh.size())
    first = size * tensor.device_mesh.get_local_rank()
    return whole[first : first + size]


def holds(tensor: torch.Tensor, whole: Bits) -> bool:
    """Whether this rank's memory is, bit for bit, its part of the whole tensor."""
    expected = part_of(whole, tensor)
    found = bits(tensor)
    return found.shape == expected.shape and found.tobytes() == expected.tobytes()


def bits(tensor: torch.Tensor) -> Bits:
    """The bytes of a tensor's local memory: its shape, and an axis for the bytes of an element."""
    local = _local(tensor)
    flat = local.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.reshape(*local.shape, local.element_size()).copy()


def write(tensor: torch.Tensor, data: Bits) -> None:
    """Overwrite a tensor's local memory."""
    local = _local(tensor)
    if data.size:
        local.copy_(torch.from_numpy(data.reshape(-1).copy()).view(local.dtype).reshape(local.shape))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def start_new_job() -> None:
    """Make this warm process forget what it loaded and saved, as a new one would not know it."""
    JOB.begin_anew()
