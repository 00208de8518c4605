"""Models of several ranks that are built on the meta device: sharded, replicated and tensor-parallel ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD, AdamW

import holdfast
from tests.state.test_meta import Rotary, State, assert_same, change, on_meta, slots, tensors
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


class Wide(nn.Module):
    """Axes that divide unevenly and one that is shorter than the world, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.down = nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.down(self.norm(torch.relu(self.up(x)))))


def fsdp(model: Wide) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.up, model.down, model):
        fully_shard(part, mesh=mesh)
    return model


def hsdp(model: Wide) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    return model


def tensor_parallel(model: Wide) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def locally(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def take_steps(state: State) -> None:
    for number in range(2):
        torch.manual_seed(number)
        state["model"](torch.rand(8, 6)).square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def assert_same_on_this_rank(a: State, b: State) -> None:
    for (name, mine), theirs in zip(tensors(a["model"]).items(), tensors(b["model"]).values(), strict=True):
        assert mine.device.type == "cpu", name
        assert torch.equal(locally(mine), locally(theirs)), name
    for mine_of, theirs_of in zip(slots(a), slots(b), strict=True):
        assert mine_of.keys() == theirs_of.keys()
        assert all(torch.equal(locally(mine_of[key]), locally(theirs_of[key])) for key in mine_of)


def resume_from_meta(folder: str, parallelize: Callable[[Wide], nn.Module], go_on: Callable[[State], None]) -> None:
    start_new_job()
    torch.manual_seed(0)
    model = parallelize(Wide())
    known: State = {"model": model, "optimizer": AdamW(model.parameters(), lr=0.1)}
    go_on(known)
    holdfast.save(f"{folder}/run", known, 1)

    fresh = parallelize(on_meta(Wide))
    before = tensors(fresh)
    state: State = {"model": fresh, "optimizer": AdamW(fresh.parameters(), lr=0.5)}
    report = holdfast.load(f"{folder}/run", state)
    assert report.on_meta == ()
    assert all(tensor is before[name] for name, tensor in tensors(fresh).items())
    assert_same_on_this_rank(state, known)
    for each in (state, known):
        go_on(each)
    assert_same_on_this_rank(state, known)
    holdfast.save(f"{folder}/run", state, 2)


@pytest.mark.parametrize(
    ("world_size", "parallelize", "go_on"),
    [(2, fsdp, take_steps), (3, fsdp, take_steps), (4, hsdp, take_steps), (2, tensor_parallel, change)],
    ids=["fsdp2", "fsdp3", "hsdp4", "tp2"],
)
def test_a_sharded_model_on_meta_resumes_as_one_with_memory(
    tmp_path: Path, world_size: int, parallelize: Callable[[Wide], nn.Module], go_on: Callable[[State], None]
) -> None:
    run_ranks(world_size, resume_from_meta, str(tmp_path), parallelize, go_on)


def stays_on_one_rank(folder: str) -> tuple[str, bool]:
    rank = dist.get_rank()
    holdfast.save(f"{folder}/run", {"model": Rotary()} if rank == 0 else {"other": nn.Linear(2, 2)}, 1)
    into = {"model": on_meta(Rotary)} if rank == 0 else {"other": on_meta(lambda: nn.Linear(2, 2))}
    with pytest.raises(holdfast.IncompatibleError) as caught:
        holdfast.load(f"{folder}/run", into)
    changed = any(not parameter.is_meta for model in into.values() for parameter in model.parameters())
    report = holdfast.load(f"{folder}/run", into, strict=False)
    assert report.on_meta == ("model/inv_freq",)
    return str(caught.value), changed


def test_all_ranks_hear_what_would_stay_on_meta_on_one_of_them(tmp_path: Path) -> None:
    for message, changed in run_ranks(2, stays_on_one_rank, str(tmp_path)):
        assert "[incompatible.meta]" in message
        assert "model/inv_freq" in message
        assert not changed


def test_a_plain_optimizer_without_state_needs_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    holdfast.save(tmp_path / "run", {"model": model, "optimizer": SGD(model.parameters(), lr=0.1)}, 1)
    fresh = on_meta(lambda: nn.Linear(2, 2))
    optimizer = SGD(fresh.parameters(), lr=0.5)
    holdfast.load(tmp_path / "run", {"model": fresh, "optimizer": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert_same(fresh, model)
