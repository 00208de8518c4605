"""Scripts as they are written for DCP, with the module that has its calls as an argument: the one line that changes."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from tests.support.bound import bits


class AppState(Stateful):
    """The class of PyTorch's tutorial: a model and its optimizer as one object."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int = 0) -> None:
        self.model, self.optimizer, self.step = model, optimizer, step

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )
        self.step = state_dict["step"]


def trained(seed: int, *, steps: int, fsdp1: bool = False) -> AppState:
    """An app whose weights depend on `seed`, sharded where there are several ranks, after so many steps."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 9), nn.Linear(9, 5, bias=False))
    model: nn.Module = layers
    if fsdp1:
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so often
        model = FullyShardedDataParallel(layers, device_id=torch.device("cpu"), use_orig_params=True)
    elif dist.is_initialized():
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for _ in range(steps):
        model(torch.arange(8) % 11).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return AppState(model, optimizer, steps)


def contents(app: AppState) -> dict[str, object]:
    """The bits of everything in an app, as if it were on one rank."""
    found: dict[str, object] = {"step": app.step}
    for name, parameter in app.model.named_parameters():
        found[name] = bits(_whole(parameter.detach()))
        for slot, value in app.optimizer.state.get(parameter, {}).items():
            found[f"{name} {slot}"] = bits(_whole(value))
    found["lr"] = [group["lr"] for group in app.optimizer.param_groups]
    return found


def gathered(app: AppState) -> dict[str, object]:
    """The bits of what torch gathers from an app, under FSDP1 or any other layout."""
    options = StateDictOptions(full_state_dict=True)
    weights: dict[str, Any] = get_model_state_dict(app.model, options=options)
    optimizer: dict[str, Any] = get_optimizer_state_dict(app.model, app.optimizer, options=options)
    found: dict[str, object] = {name: bits(weight) for name, weight in weights.items()}
    for name, slots in optimizer["state"].items():
        found.update((f"{name} {slot}", bits(value)) for slot, value in slots.items())
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_app(dcp: ModuleType, folder: str, *, seed: int = 0, steps: int = 2) -> dict[str, object]:
    """Train, save, and return what was saved."""
    app = trained(seed, steps=steps)
    dcp.save({"app": app}, checkpoint_id=folder)
    return contents(app)


def load_app(dcp: ModuleType, folder: str) -> dict[str, object]:
    """Load into a new app, and return what it has then."""
    app = trained(9, steps=0)
    dcp.load({"app": app}, checkpoint_id=folder)
    return contents(app)


def save_parts(dcp: ModuleType, folder: str, *, flat: bool) -> dict[str, object]:
    """Save by the functions for the model and the optimizer alone, into a folder each."""
    app = trained(0, steps=2)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    dcp.save(get_model_state_dict(app.model, options=options), checkpoint_id=f"{folder}/model")
    dcp.save(get_optimizer_state_dict(app.model, app.optimizer, options=options), checkpoint_id=f"{folder}/optim")
    return contents(app)


def load_parts(dcp: ModuleType, folder: str, *, flat: bool) -> dict[str, object]:
    """Load what `save_parts` saved, into a new app."""
    app = trained(9, steps=0)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights = get_model_state_dict(app.model, options=options)
    dcp.load(weights, checkpoint_id=f"{folder}/model")
    set_model_state_dict(app.model, weights, options=options)
    slots = get_optimizer_state_dict(app.model, app.optimizer, options=options)
    dcp.load(slots, checkpoint_id=f"{folder}/optim")
    set_optimizer_state_dict(app.model, app.optimizer, slots, options=options)
    app.step = 2
    return contents(app)
