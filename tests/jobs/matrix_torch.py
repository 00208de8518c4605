"""The torch side of the cross-framework matrix: the GPT under DDP, FSDP1 and FSDP2."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.jobs.matrix_gpt import SLOTS, Gpt, Whole, batch, loss_of, parameter_groups

#: The vocabulary of a job whose name ends with "padded"; Megatron pads it to 64.
SMALLER = 61


class TorchJob:
    """A job of torch; `case` is a way to divide the model, and "padded" or "moe"
    after it."""

    def __init__(self, case: str, *, seed: int) -> None:
        self.way, _, option = case.partition("-")
        self.vocabulary = SMALLER if option == "padded" else 64
        torch.manual_seed(seed)
        self.model = _wrapped(Gpt(self.vocabulary, experts=4 if option == "moe" else None), self.way)
        self.optimizer = torch.optim.AdamW(parameter_groups(self.model), lr=0.01)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}
        self.cast: str | None = None

    def train(self, steps: int, *, first: int) -> float:
        """Train on the batches of these steps, and return the last loss."""
        self.model.train()
        loss = torch.zeros(())
        for step in range(first, first + steps):
            tokens = batch(step, dist.get_rank(), self.vocabulary)
            loss = loss_of(self.model(tokens), tokens)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    def loss(self) -> float:
        """The loss on a batch that no rank has trained on."""
        tokens = batch(1000, 0, self.vocabulary)
        with torch.no_grad():
            return float(loss_of(self.model.eval()(tokens), tokens))

    def steps(self) -> set[float]:
        """The counts of steps of all parameters on this rank."""
        return {float(slots["step"]) for slots in self.optimizer.state.values()}

    def whole(self) -> Whole:
        """The state in global coordinates, by torch's own collectives."""
        if self.way == "fsdp1":
            return dict(_gathered(self.model, self.optimizer))
        module = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        found: Whole = {}
        for name, parameter in module.named_parameters():
            slots = {"master": parameter.detach(), **self.optimizer.state[parameter]}
            found |= {f"{name}/{slot}": _full(slots[slot]) for slot in SLOTS}
        return found

    def low_precision_faults(self) -> list[str]:
        """The parameters that are no casts of their master weights: there are no such copies."""
        return []

    def catch_up(self, steps: int) -> None:
        """Bring what depends on the number of steps, and was not loaded, up to date: nothing here."""


@contextmanager
def job(case: str, *, seed: int) -> Iterator[TorchJob]:
    """A job with the weights that `seed` draws."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so often
        yield TorchJob(case, seed=seed)


def _wrapped(model: Gpt, way: str) -> nn.Module:
    if way == "ddp":
        return DistributedDataParallel(model)
    if way == "fsdp2":
        for layer in model.layers:
            fully_shard(layer)
        return cast("nn.Module", fully_shard(model))
    options: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    for number, layer in enumerate(model.layers):
        model.layers[number] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _gathered(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that FSDP1 gathers as weights, with each slot copied into its parameter for that moment."""
    kept = {parameter: parameter.detach().clone() for parameter in optimizer.state}
    for slot in SLOTS:
        for parameter, slots in optimizer.state.items():
            parameter.data.copy_(kept[parameter] if slot == "master" else slots[slot])
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            for name, tensor in model.state_dict().items():
                if name != "head.weight":
                    yield f"{name}/{slot}", tensor.clone()
    for parameter, tensor in kept.items():
        parameter.data.copy_(tensor)
