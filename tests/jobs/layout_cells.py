"""Ways to spread one training job over ranks, and the true content of each rank's part.

A cell is a kind of parallelism with the shape of its mesh. All cells hold the same logical tensors: random bits that
depend on a seed and on the tensor's name (see `tests.support.models`). The part of them that a rank must hold is cut
out in numpy, by following element numbers through the placements; `test_layouts` checks those cuts against torch's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from tests.support.models import Bits, bits, full, write

Kind = Literal["plain", "ddp", "fsdp", "hsdp", "tp", "fsdp_tp", "hsdp_tp", "pp", "pp_fsdp", "ep", "ep_fsdp"]

#: The names of the mesh axes of each kind.
AXES: dict[Kind, tuple[str, ...]] = {
    "plain": ("any",),
    "ddp": ("replicate",),
    "fsdp": ("shard",),
    "hsdp": ("replicate", "shard"),
    "tp": ("tp",),
    "fsdp_tp": ("shard", "tp"),
    "hsdp_tp": ("replicate", "shard", "tp"),
    "pp": ("pp",),
    "pp_fsdp": ("pp", "shard"),
    "ep": ("replicate", "ep"),
    "ep_fsdp": ("shard", "ep"),
}

#: Parts of the model, in the order of a pipeline.
UNITS = ("embed", "first", "second", "experts", "pool", "head")


class Cell(NamedTuple):
    """A kind of parallelism and the shape of its mesh."""

    kind: Kind
    shape: tuple[int, ...]

    @property
    def world_size(self) -> int:
        return prod(self.shape)

    def __str__(self) -> str:
        return f"{self.kind}{'x'.join(map(str, self.shape))}"


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)


class Experts(nn.Module):
    """Five experts: no world divides them evenly, and 8 ranks leave some without any."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(5, 4, 6))
        self.down = nn.Parameter(torch.randn(5, 6, 4))


class Head(nn.Module):
    """Axes shorter than most worlds, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.randn(2))
        self.nothing = nn.Parameter(torch.empty(0, 4))


def model_of(units: Iterable[str]) -> nn.ModuleDict:
    """The parts of the model that are asked for; names do not depend on what else is there."""
    makers = {
        "embed": lambda: nn.Embedding(13, 6),
        "first": lambda: Block(6, 10),
        "second": lambda: Block(6, 8),
        "experts": Experts,
        "pool": lambda: nn.BatchNorm1d(6),
        "head": Head,
    }
    return nn.ModuleDict({unit: makers[unit]() for unit in units})


class Job(NamedTuple):
    """The objects of a training script on one rank."""

    model: nn.Module
    optimizer: AdamW
    scheduler: StepLR
    progress: dict[str, object]

    @property
    def state(self) -> dict[str, object]:
        return self._asdict()


def build(cell: Cell, seed: int, *, stepped: bool = True) -> Job:
    """The job of this rank; `seed` decides hyper-parameters and values. The optimizer has state if it has `stepped`."""
    model = spread(cell)
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.1 + seed},
        {"params": [p for p in parameters if p.ndim <= 1], "lr": 0.5 + seed},
    ]
    optimizer = AdamW(groups, lr=0.25 + seed, betas=(0.5, 1 - 2.0 ** -(3 + seed % 8)))
    if stepped:
        # AdamW makes these slots at its first step. Real steps on DTensors of many meshes and shapes take seconds.
        for parameter in parameters:
            zeros = (torch.zeros_like(parameter), torch.zeros_like(parameter))
            optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": zeros[0], "exp_avg_sq": zeros[1]}
    scheduler = StepLR(optimizer, step_size=2 + seed, gamma=0.5)
    return Job(model, optimizer, scheduler, {"epoch": seed, "best": float("inf"), "seen": [2**70 + seed, ("a", None)]})


def spread(cell: Cell) -> nn.Module:
    """The model as this rank of `cell` holds it. Torch itself cuts and sends the initial weights."""
    if cell.kind == "plain":
        return model_of(UNITS)
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it would find the process groups of this warm process's last job
    mesh = init_device_mesh("cpu", cell.shape, mesh_dim_names=AXES[cell.kind])
    if cell.kind.startswith("pp"):
        stages = np.array_split(np.asarray(UNITS), mesh["pp"].size())
        model = model_of(str(unit) for unit in stages[mesh.get_local_rank("pp")])
        return shard_units(model, mesh["shard"]) if cell.kind == "pp_fsdp" else model
    model = model_of(UNITS)
    if cell.kind == "ddp":
        return DistributedDataParallel(model)
    if cell.kind.endswith("tp"):
        parallelize(model, mesh["tp"])
    if cell.kind.startswith("ep"):
        spread_experts(cast("Experts", model["experts"]), mesh, sharded=cell.kind == "ep_fsdp")
    if cell.kind == "ep_fsdp":
        return shard_units(model, mesh._flatten("everybody"), done=("experts",))
    if cell.kind in ("fsdp", "fsdp_tp"):
        return shard_units(model, mesh["shard"])
    if cell.kind.startswith("hsdp"):
        return shard_units(model, mesh["replicate", "shard"])
    return model


def shard_units(model: nn.ModuleDict, mesh: DeviceMesh, *, done: tuple[str, ...] = ()) -> nn.Module:
    """FSDP2 over `mesh`, unit by unit."""
    for name, unit in model.items():
        if name not in done:
            fully_shard(unit, mesh=mesh)
    return model


def parallelize(model: nn.ModuleDict, mesh: DeviceMesh) -> None:
    """Tensor parallelism, column- and row-wise. The second norm and the head's scale stay plain copies."""
    plan = {
        "embed": RowwiseParallel(),
        "first.norm": SequenceParallel(),
        "first.up": ColwiseParallel(),
        "first.down": RowwiseParallel(),
        "second.up": ColwiseParallel(),
        "second.down": RowwiseParallel(),
        "head.project": ColwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    place(model["experts"], "up", mesh, [Shard(1)])
    place(model["experts"], "down", mesh, [Shard(2)])


def spread_experts(experts: Experts, mesh: DeviceMesh, *, sharded: bool) -> None:
    """Whole experts per rank of the expert axis; copied, or divided by FSDP2, along the other."""
    for name in ("up", "down"):
        if sharded:
            place(experts, name, mesh["ep"], [Shard(0)])
        else:
            place(experts, name, mesh, [Replicate(), Shard(0)])
    if sharded:
        fully_shard(experts, mesh=mesh["shard"])


def place(module: nn.Module, name: str, mesh: DeviceMesh, placements: list[Placement]) -> None:
    """Turn a parameter into a DTensor."""
    setattr(module, name, nn.Parameter(distribute_tensor(getattr(module, name).detach(), mesh, placements)))


class Held(NamedTuple):
    """A tensor of a job and the name it is stored under."""

    name: str
    tensor: torch.Tensor
    is_buffer: bool = False


def held(job: Job) -> Iterator[Held]:
    """All tensors of a job: parameters, buffers, optimizer slots."""
    model = job.model.module if isinstance(job.model, DistributedDataParallel) else job.model
    for name, parameter in model.named_parameters():
        yield Held(f"model/{name}", parameter)
        for slot, tensor in job.optimizer.state.get(parameter, {}).items():
            yield Held(f"optimizer/state/model/{name}/{slot}", tensor)
    for name, buffer in model.named_buffers():
        yield Held(f"model/{name}", buffer, is_buffer=True)


def filled(cell: Cell, seed: int) -> Job:
    """A job whose tensors all hold the bits of `seed`; DDP's buffers do so on rank 0 alone, as in real life."""
    job = build(cell, seed)
    for name, tensor, is_buffer in held(job):
        strayed = 1000 * dist.get_rank() if cell.kind == "ddp" and is_buffer else 0
        write(tensor, cut(full(seed + strayed, name, tensor), tensor))
    return job


def differing(job: Job, seed: int) -> list[str]:
    """Names of what is not, bit for bit, what `seed` says: tensors in this rank's memory, and values."""
    names = [name for name, tensor, _ in held(job) if not holds(tensor, full(seed, name, tensor))]
    truth = build(Cell("plain", (1,)), seed)
    for live, expected in zip(job.optimizer.param_groups, truth.optimizer.param_groups, strict=True):
        if {key: live[key] for key in live if key != "params"} != {k: expected[k] for k in expected if k != "params"}:
            names.append("param_groups")
    if job.scheduler.state_dict() != truth.scheduler.state_dict():
        names.append("scheduler")
    if job.progress != truth.progress:
        names.append("progress")
    return names


def holds(tensor: torch.Tensor, whole: Bits) -> bool:
    """Whether this rank's memory is, bit for bit, its part of the whole tensor."""
    expected, found = cut(whole, tensor), bits(tensor)
    return found.size == expected.size == 0 or (found.shape == expected.shape and found.tobytes() == expected.tobytes())


def cut(whole: Bits, tensor: torch.Tensor) -> Bits:
    """The part of a whole tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return whole
    mesh = tensor.device_mesh
    index = [np.arange(extent) for extent in tensor.shape]
    for mesh_axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        assert isinstance(placement, Shard | _StridedShard)
        parts, at = mesh.size(mesh_axis), mesh.get_local_rank(mesh_axis)
        chunks = [index[placement.dim]]
        if isinstance(placement, _StridedShard):
            chunks = chunked(chunks[0], int(placement.split_factor))
        index[placement.dim] = np.concatenate([chunked(chunk, parts)[at] for chunk in chunks])
    return whole[np.ix_(*index)] if index else whole


def chunked(numbers: npt.NDArray[np.int64], parts: int) -> list[npt.NDArray[np.int64]]:
    """Chunks as ``torch.chunk`` makes them, with empty ones for the rest of the parts."""
    size = -(-len(numbers) // parts)
    return [numbers[size * part : size * (part + 1)] for part in range(parts)]
