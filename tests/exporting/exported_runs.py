"""Runs to export, saved by several ranks, and the tensors in them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from tests.support.ranks import run_ranks


class Tied(nn.Module):
    """A module with a tied tensor, several dtypes, and tensors of no and of one element."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(seed)
        self.lm_head = nn.Linear(300, 700, bias=False)
        self.model = nn.ModuleDict({"embed": nn.Embedding(700, 300), "up": nn.Linear(300, 500)})
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=make))
        self.lm_head.weight = self.model["embed"].weight  # type: ignore[assignment]
        self.register_buffer("scale", torch.randn((), generator=make))
        self.register_buffer("none", torch.zeros(0, 7))
        self.register_buffer("positions", torch.arange(9))
        self.register_buffer("halves", torch.randn(5, 3, generator=make).half())


def plain_state(seed: int = 0) -> dict[str, object]:
    """A state in one process: module, optimizer after a step, values of many kinds."""
    model = Tied(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.model["up"](torch.ones(2, 300)).sum().backward()
    model.lm_head(torch.ones(2, 300)).sum().backward()
    optimizer.step()
    progress = {"samples": 7, "name": "a", "best": (1, 0.5), "seen": [3, 1], "dtype": torch.float16}
    return {"model": model, "optimizer": optimizer, "progress": progress, "list": [torch.ones(3), 4]}


def save_divided(run: str) -> None:
    """Save the module of `Tied` with parameters that are divided by rows and by columns."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = Tied()
    weight = nn.Parameter(distribute_tensor(model.lm_head.weight.data, mesh, [Shard(0)]))
    model.lm_head.weight = model.model["embed"].weight = weight
    up = model.model["up"]
    assert isinstance(up, nn.Linear)
    up.weight = nn.Parameter(distribute_tensor(up.weight.data, mesh, [Shard(1)]))
    holdfast.save(run, {"model": model, "step": 3}, 3)


def divided_run(folder: Path, world_size: int = 3) -> Path:
    """A run that several ranks saved."""
    run_ranks(world_size, save_divided, str(folder / "run"))
    return folder / "run"


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """Dtype, shape and bytes of a tensor."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tensor.shape, data


def names_without(model: nn.Module, *dropped: str) -> dict[str, torch.Tensor]:
    """The state dict of a module without some of its names."""
    return {name: tensor for name, tensor in model.state_dict().items() if name not in dropped}
