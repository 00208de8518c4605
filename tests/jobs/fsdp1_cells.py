"""A training job under FSDP1 and under other layouts, and torch's own reading of its full state.

The model has tied weights, parameters smaller than a shard, weights in another memory order than row-major, frozen
parameters where asked, a module that FSDP1 ignores, and a buffer.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.optim import AdamW

import holdfast

Way = Literal["plain", "ddp", "fsdp2", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
State = dict[str, Any]


class Wrapping(NamedTuple):
    """A way to divide the model, and its options under FSDP1."""

    way: Way
    original: bool = True
    bf16: bool = False
    frozen: bool = False
    ignores: bool = False
    offloads: bool = False

    def __str__(self) -> str:
        options = {name: getattr(self, name) for name in ("bf16", "frozen", "ignores", "offloads")}
        flags = ["flat" * (not self.original), *(name * chosen for name, chosen in options.items())]
        return "-".join(filter(None, (self.way, *flags)))


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.conv = nn.Conv2d(2, 3, (3, 1), bias=False)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.up = nn.Linear(6, 5)
        self.down = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6))
        self.scale = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        shift = self.conv(torch.ones(1, 2, 3, 1, dtype=hidden.dtype)).sum()
        return cast("torch.Tensor", self.head(self.scale(self.down(torch.relu(self.up(hidden + shift))))))


def build(wrapping: Wrapping, *, seed: int) -> State:
    """The state of a job that has not trained yet."""
    warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so often
    torch.manual_seed(seed)
    net = TiedNet()
    if wrapping.frozen:
        net.down.requires_grad_(requires_grad=False)
    model = _wrapped(net, wrapping)
    return {"model": model, "optimizer": AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)}


def _wrapped(net: TiedNet, wrapping: Wrapping) -> nn.Module:
    if wrapping.way == "plain":
        return net
    if wrapping.way == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if wrapping.way == "fsdp2":
        net.conv.weight.data = net.conv.weight.data.contiguous()  # FSDP2 takes no other order
        fully_shard(net.down)
        return cast("nn.Module", fully_shard(net))
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[wrapping.way],
        "use_orig_params": wrapping.original,
        "device_id": torch.device("cpu"),
        "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16) if wrapping.bf16 else None,
    }
    if wrapping.offloads:
        options["cpu_offload"] = CPUOffload(offload_params=True)
    if "HYBRID" in wrapping.way:
        options["device_mesh"] = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    net.down = cast("Any", checkpoint_wrapper(FullyShardedDataParallel(net.down, **options)))
    return FullyShardedDataParallel(net, ignored_modules=[net.scale] if wrapping.ignores else None, **options)


#: Stand-ins for the calls that FSDP1 makes to offload parameters, and that torch has on accelerators alone: pinned
#: memory, and waits for a stream.
STAND_INS: dict[tuple[type, str], Any] = {
    (torch.Tensor, "pin_memory"): lambda tensor: tensor.clone(),
    (torch.cpu.Stream, "synchronize"): lambda _: None,
}


@contextmanager
def standing_in(wrapping: Wrapping) -> Iterator[None]:
    """A ``with`` block in which FSDP1 can offload parameters on a machine without an accelerator. Its shards then lie
    in other memory after the first forward, as with pinned memory."""
    with ExitStack() as stack:
        for (kind, name), stand_in in STAND_INS.items() if wrapping.offloads else ():
            stack.enter_context(mock.patch.object(kind, name, stand_in, create=True))
        yield


def train(state: State, *, steps: int) -> None:
    for _ in range(steps):
        state["model"](torch.arange(7)).float().square().mean().backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()


def full_state(state: State, wrapping: Wrapping) -> dict[str, torch.Tensor]:
    """The full state of a trained FSDP1 job as torch gathers it, by the names that a checkpoint has.

    Slots are gathered as weights: each is copied into its parameter for that moment. (With original parameters on CPUs,
    ``optim_state_dict`` of torch 2.13 returned an ``exp_avg`` that looks like ``exp_avg_sq``.)
    """
    model, optimizer = state["model"], state["optimizer"]
    found = {f"model/{name}": tensor for name, tensor in _full_weights(model).items()}
    kept = [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]
    for slot in ("exp_avg", "exp_avg_sq"):
        for parameter, slots in optimizer.state.items():
            parameter.data.copy_(slots[slot])
        for name, tensor in _full_weights(model).items():
            if name not in ("seen", "head.weight") and not (wrapping.frozen and name.startswith("down.")):
                found[f"optimizer/state/model/{name}/{slot}"] = tensor
                found[f"optimizer/state/model/{name}/step"] = torch.tensor(2.0)
    for parameter, tensor in zip(optimizer.param_groups[0]["params"], kept, strict=True):
        parameter.data.copy_(tensor)
    return found


def _full_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return {
            name.replace("_checkpoint_wrapped_module.", ""): tensor.clone()
            for name, tensor in model.state_dict().items()
        }


def save_trained(run: str, wrapping: Wrapping) -> tuple[dict[str, torch.Tensor], int]:
    """Train and save. Returns the full state as torch gathers it, and the number of collective calls of the save."""
    with standing_in(wrapping):
        state = build(wrapping, seed=0)
        train(state, steps=2)
        before = num_collectives()
        holdfast.save(run, state, 1)
        during = num_collectives() - before
        return full_state(state, wrapping) if wrapping.way not in ("plain", "ddp", "fsdp2") else {}, during


def reload(run: str, again: str, wrapping: Wrapping) -> None:
    """Load into a job that was initialised with other values, save at once, and train on."""
    with standing_in(wrapping):
        state = build(wrapping, seed=1)
        holdfast.load(run, into=state)
        holdfast.save(again, state, 1)
        train(state, steps=1)


def num_collectives() -> int:
    """The number of collective calls on the default group so far."""
    return cast("int", dist.group.WORLD._get_sequence_number_for_group())  # type: ignore[union-attr]


def stored(run: str) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint of a run, under all their names."""
    view = holdfast.open(run)
    tensors = view.torch()
    return tensors | {alias: tensors[name] for alias, name in view.aliases.items()}
