"""A small model under Megatron-FSDP without a GPU: symbols of CUDA that it uses as if there were one, replaced for a
while. Its DTensors are cut unlike torch's: a rank holds whole rows of a buffer, and may hold none of a tensor."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron warns of packages that are not installed
    from megatron.core.distributed.fsdp.src.megatron_fsdp import (
        fully_shard,
        megatron_fsdp,
        param_and_grad_buffer,
        utils,
    )


class Stream:
    """A stream or an event of a device that does everything at once."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self


class TorchOnCpu:
    """torch, which takes a CUDA device for the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def device(*given: Any) -> torch.device:
        """As `torch.device`."""
        return torch.device("cpu") if str(given[0]).startswith("cuda") else torch.device(*given)


#: Object, attribute, replacement.
REPLACED: list[tuple[Any, str, Any]] = [
    *((module, "torch", TorchOnCpu()) for module in (megatron_fsdp, param_and_grad_buffer, utils)),
    (torch.cuda, "Stream", lambda *_: Stream()),
    (torch.cuda, "Event", lambda *_: Stream()),
    (torch.cuda, "current_stream", lambda *_: Stream()),
    (torch.cuda, "stream", lambda _: nullcontext()),
    (torch.cuda, "current_device", lambda: "cpu"),
    (torch.cuda, "synchronize", lambda *_: None),
    (torch.cuda, "empty_cache", lambda: None),
    (torch.Tensor, "record_stream", lambda *_: None),
    (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor),
    (torch.distributed, "_make_nccl_premul_sum", lambda _: dist.ReduceOp.SUM),  # gloo cannot average
]


@contextmanager
def trained_model() -> Iterator[nn.Module]:
    """A model whose weights lie in buffers that the ranks divide, after two steps."""
    with ExitStack() as stack:
        for owner, name, replacement in REPLACED:
            stack.enter_context(patch.object(owner, name, replacement))
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        sharded, optimizer = fully_shard(
            module=model,
            optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
            device_mesh=init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",)),
            dp_shard_dim="fsdp",
            fsdp_unit_modules=[nn.Linear],
            zero_dp_strategy=3,
            device=torch.device("cpu"),
        )
        for _ in range(2):
            sharded(torch.ones(2, 5)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        yield sharded


def whole_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights, put together from the parts of all ranks, which follow each other."""
    mine = {name: tensor.to_local().detach().clone() for name, tensor in model.state_dict().items()}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return {name: torch.cat([each[name] for each in parts]) for name in mine}
