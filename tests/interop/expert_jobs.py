"""Jobs of the real DeepSpeed with its own layers of experts, on any number of expert-parallel ranks.

    torchrun --standalone --nproc_per_node 2 -m tests.interop.expert_jobs save FOLDER CASE...
    torchrun --standalone --nproc_per_node 4 -m tests.interop.expert_jobs load FOLDER FROM:TO...

A case is the name of a case of `deepspeed_jobs`, and the size of an expert-parallel group: ``zero2-ep4``. With
``-data`` at the end, ranks that hold the same experts lie beside each other. ``save`` trains an engine for four steps,
saves it into FOLDER/CASE/run, has DeepSpeed save it into FOLDER/CASE/native, and writes what all live engines hold
under the numbers of the experts among those of all ranks; then the same two steps later. ``load`` loads the run into a
fresh engine, ``native`` the folder of DeepSpeed; both compare by bits. Rank 0 writes what a job finds as JSON.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import holdfast
from tests.interop.deepspeed_jobs import differences, run_cases, values_of
from tests.interop.write_deepspeed import CASES, SLOTS, flat_groups
from tests.support.collectives import counted

#: The number of experts in each of the two layers.
EXPERTS = (4, 8)
WIDTH = 5
_LOCAL = ".deepspeed_moe.experts.deepspeed_experts."


class Expert(nn.Module):
    """An expert with trained parameters, a frozen one and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("shift", torch.zeros(WIDTH))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        given = given.to(self.up.weight.dtype)
        found: torch.Tensor = self.down(torch.relu(self.up(given))) + self.frozen(given) + self.get_buffer("shift")
        return found


class RoutedNet(nn.Module):
    """Two layers of experts, the second with a dense expert beside it, between dense layers."""

    def __init__(self, ep_size: int, *, experts: tuple[int, int] = EXPERTS) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        options: dict[str, Any] = {"use_rts": False, "capacity_factor": 4.0, "min_capacity": 8, "ep_size": ep_size}
        self.first = MoE(WIDTH, Expert(), num_experts=experts[0], **options)
        self.second = MoE(WIDTH, Expert(), num_experts=experts[1], use_residual=True, **options)
        self.head = nn.Linear(WIDTH, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in (self.first, self.second):
            hidden = hidden + layer(hidden)[0].to(hidden.dtype)
        scaled: torch.Tensor = self.head(hidden)
        return scaled


def parse(case: str) -> tuple[str, int, bool]:
    """The case of `deepspeed_jobs`, the size of an expert-parallel group, and whether data come before experts."""
    base, _, size = case.removesuffix("-data").rpartition("-ep")
    return base, int(size), case.endswith("-data")


def expert_rank(case: str) -> int:
    """The number of this rank in its expert-parallel group, by the order that DeepSpeed documents."""
    _, size, by_data = parse(case)
    return dist.get_rank() // (dist.get_world_size() // size) if by_data else dist.get_rank() % size


def global_name(name: str, case: str) -> str:
    """A name in the module of this rank, with the number of the expert among those of all ranks."""
    head, found, tail = name.partition(_LOCAL)
    if not found:
        return name
    number, dot, rest = tail.partition(".")
    held = EXPERTS[head == "second"] // parse(case)[1]
    return f"{head}{_LOCAL}{expert_rank(case) * held + int(number)}{dot}{rest}"


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups of dense parameters and their groups of experts."""
    named = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    groups: list[dict[str, Any]] = [
        {"name": "weights", "params": [each for _, each in named if each.ndim > 1], "weight_decay": 0.1},
        {"name": "vectors", "params": [each for _, each in named if each.ndim == 1], "weight_decay": 0.0, "lr": 2e-2},
    ]
    divided: list[dict[str, Any]] = split_params_into_different_moe_groups_for_optimizer(groups)
    return divided


def new_engine(case: str, *, seed: int = 0) -> Any:
    """An engine whose parameters depend on `seed` and their names alone, whatever the number of ranks."""
    base, size, by_data = parse(case)
    model = RoutedNet(size)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            make = torch.Generator().manual_seed(seed + sum(map(ord, global_name(name, case))))
            tensor.copy_(torch.randn(tensor.shape, generator=make) / 2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "use_data_before_expert_parallelism": by_data,
        **CASES[base],
    }
    groups = groups_of(model)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups, lr=1e-2),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, [lambda step: 1 / (1 + step)] * len(groups)),
        config=config,
    )
    return engine


def train(engine: Any, steps: int, *, first: int = 0) -> Any:
    """Train on the batches of these steps."""
    make = torch.Generator().manual_seed(1 + dist.get_rank())
    for step in range(first + steps):
        tokens = torch.randint(11, (2, 6), generator=make)
        if step >= first:
            engine.backward(engine(tokens).float().square().mean())
            engine.step()
    for name, buffer in engine.module.named_buffers():
        buffer.add_(steps * (1 + len(name)))
    return engine


def held(engine: Any, case: str) -> dict[str, torch.Tensor]:
    """Everything that the engines of all ranks hold, whole."""
    mine: dict[str, torch.Tensor] = {}
    for name, tensor in (*engine.module.named_parameters(), *engine.module.named_buffers()):
        kind = "module" if tensor.requires_grad else "kept"
        mine[f"{global_name(name, case)}/{kind}"] = tensor.detach().clone()
    for name, tensor in _trained(engine):
        head, _, slot = name.rpartition("/")
        mine[f"{global_name(head, case)}/{slot}"] = tensor.detach().clone()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    found: dict[str, torch.Tensor] = {}
    for each in everywhere:
        assert not [name for name in found.keys() & each.keys() if not torch.equal(found[name], each[name])]
        found |= each
    return found


def _trained(engine: Any) -> list[tuple[str, torch.Tensor]]:
    """The master weights and both moments of the parameters of this rank, by their names here."""
    optimizer = engine.optimizer
    inner = getattr(optimizer, "optimizer", optimizer)
    found = []
    if hasattr(optimizer, "real_dp_process_group"):
        for (group, starts, flat), ranks in zip(flat_groups(engine), optimizer.real_dp_process_group, strict=True):
            for slot, tensor in (("master", flat), *((slot, inner.state[flat][slot]) for slot in SLOTS)):
                parts = [torch.empty_like(flat.detach()) for _ in range(dist.get_world_size(ranks))]
                dist.all_gather(parts, tensor.detach().contiguous(), group=ranks)
                whole = torch.cat(parts)
                for parameter, start in zip(group, starts, strict=True):
                    values = whole[start : start + parameter.numel()].view(parameter.shape)
                    found.append((f"{engine.param_names[parameter]}/{slot}", values))
        return found
    lower = getattr(optimizer, "fp16_groups", [group["params"] for group in inner.param_groups])
    upper = getattr(optimizer, "fp32_groups", lower)
    for parameters, masters in zip(lower, upper, strict=True):
        for parameter, master in zip(parameters, masters, strict=True):
            name = engine.param_names[parameter]
            found.append((f"{name}/master", master))
            found += [(f"{name}/{slot}", inner.state[master][slot]) for slot in SLOTS]
    return found


def values(engine: Any) -> dict[str, Any]:
    """The values of an engine, but for the names of the groups of experts, which say how they are divided."""
    found = values_of(engine)
    for group in found["groups"]:
        if group.get("moe"):
            assert group.pop("name").startswith("ep_size_")
    return found


def casts(engine: Any, case: str, found: dict[str, torch.Tensor]) -> list[str]:
    """The names of parameters of the module that are not their master weights, cast."""
    named = ((global_name(name, case), each) for name, each in engine.module.named_parameters() if each.requires_grad)
    return [name for name, each in named if not torch.equal(each, found[f"{name}/master"].to(each.dtype))]


def save(folder: Path, case: str) -> dict[str, Any]:
    """Train, save, train on."""
    engine = train(new_engine(case), 4)
    before = held(engine, case), values(engine)
    with counted() as calls:
        holdfast.save(folder / case / "run", {"engine": engine, "epoch": 3}, 4)
    during = list(calls)
    engine.save_checkpoint(str(folder / case / "native"), client_state={"epoch": 3})
    train(engine, 2, first=4)
    after = held(engine, case)
    if dist.get_rank() == 0:
        expected = {"held": before[0], "values": before[1], "after": after, "ranks": dist.get_world_size()}
        torch.save(expected, folder / case / "expected.pt")
    dist.barrier()
    return {"during": during}


def load(folder: Path, source: str, target: str) -> dict[str, Any]:
    """Load a run into a fresh engine, and compare."""
    engine = new_engine(target, seed=99)
    state = {"engine": engine, "epoch": 0}
    report = holdfast.load(folder / source / "run", state)
    assert state["epoch"] == 3
    return _compare(folder, source, target, engine, report)


def native(folder: Path, source: str, target: str) -> dict[str, Any]:
    """Load a folder of DeepSpeed into a fresh engine, and compare."""
    engine = new_engine(target, seed=99)
    parts = ("engine", "model", "optimizer", "lr_scheduler", "scaling")
    rules = [holdfast.mapping.Rename(part, f"engine/{part}") for part in parts]
    state = {"engine": engine, "client_state": {"epoch": 0}}
    report = holdfast.load(folder / source / "native", state, mapping=rules, select=["engine", "client_state/epoch"])
    assert state["client_state"] == {"epoch": 3}
    return _compare(folder, source, target, engine, report)


def _compare(folder: Path, source: str, target: str, engine: Any, report: holdfast.LoadReport) -> dict[str, Any]:
    expected = torch.load(folder / source / "expected.pt", weights_only=False)
    found, mine = held(engine, target), values(engine)
    result: dict[str, Any] = {
        "differing": list(differences(expected["held"], found)),
        "compared": len(expected["held"].keys() & found.keys()),
        "casts": casts(engine, target, found),
        "missing": [*report.missing, *report.unexpected],
        "values": [key for key in mine if mine[key] != expected["values"][key]],
        "here": repr(mine),
        "there": repr(expected["values"]),
    }
    if source == target and expected["ranks"] == dist.get_world_size():
        train(engine, 2, first=4)
        result["after"] = list(differences(expected["after"], held(engine, target)))
    return result


VERBS: dict[str, Callable[..., dict[str, Any]]] = {"save": save, "load": load, "native": native}


if __name__ == "__main__":
    run_cases(VERBS[sys.argv[1]], sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
