"""Megatron-core without a GPU: the symbols of torch that it uses as if there were one, replaced for a while.

Megatron's own code runs unchanged. `REPLACED` is the whole list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe import grouped_gemm_util

_type_of = torch.Tensor.type


def _without_cuda(make: Any) -> Any:
    """A function that makes tensors, which takes a CUDA device for the CPU."""

    def made(*args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        on_cpu = "cpu" if device is not None and str(device).startswith("cuda") else device
        tensor: torch.Tensor = make(*args, device=on_cpu, **options)
        return tensor

    return made


def _type(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
    """The name of a tensor's type, as if it were on a GPU."""
    found = _type_of(tensor, *args, **options)
    return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found


#: Object, attribute, replacement, and where Megatron-core 0.16.1 needs it.
REPLACED: list[tuple[Any, str, Any, str]] = [
    (torch.Tensor, "cuda", lambda tensor, *_, **__: tensor, "tied embeddings, states of loss scalers"),
    (torch.Tensor, "type", _type, "optimizers tell parameters apart by 'torch.cuda.BFloat16Tensor'"),
    (torch.cuda, "current_device", lambda: torch.device("cpu"), "buffers of parameters and gradients"),
    (torch.cuda, "set_device", lambda device: None, "the example of the guide"),
    (torch.cuda, "synchronize", lambda *_: None, "saves of dist_checkpointing"),
    (tensor_parallel, "model_parallel_cuda_manual_seed", torch.manual_seed, "the example of the guide"),
    (tensor_parallel.random.CudaRNGStatesTracker, "fork", lambda *_: nullcontext(), "initialisation, attention"),
    (torch, "tensor", _without_cuda(torch.tensor), "loss scalers, norms of gradients"),
    (torch, "zeros", _without_cuda(torch.zeros), "norms of gradients"),
    (
        grouped_gemm_util,
        "assert_grouped_gemm_is_available",
        lambda: None,
        "grouped experts, which compute nothing here",
    ),
]


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """A ``with`` block in which Megatron-core runs on the CPU."""
    with ExitStack() as stack:
        for owner, name, replacement, _ in REPLACED:
            stack.enter_context(patch.object(owner, name, replacement))
        yield
