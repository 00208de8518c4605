"""torchtitan without a GPU: the symbols that its trainer needs of one, replaced for good in this process.

Torchtitan's own code runs unchanged. `REPLACED` is the whole list. Import this module before any other of torchtitan's.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.fsdp import FSDPModule

#: The calls of ``torch.cuda`` that torchtitan makes.
CPU = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    synchronize=lambda: None,
    empty_cache=lambda: None,
    get_device_name=lambda device: "CPU",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 34),
    reset_peak_memory_stats=lambda: None,
    memory_stats=lambda device: {},
)


def _divide_nothing(model: torch.nn.Module) -> None:
    """Torchtitan's `disable_fsdp_gradient_division`, with the kind of sum that gloo has."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _plain_attention(backend: str) -> Any:
    return importlib.import_module("torchtitan.models.common.attention").ScaledDotProductAttention.Config()


#: Module, attribute, replacement, and where torchtitan 0.3.0 needs it on a CPU, or beside torch 2.13.
REPLACED: list[tuple[str, str, Any, str]] = [
    ("torchtitan.tools.utils", "device_type", "cpu", "meshes, placement of the model"),
    ("torchtitan.tools.utils", "device_module", CPU, "choice of the device, monitor of memory, barrier"),
    ("torchtitan.tools.utils", "get_peak_flops", lambda name: 1e12, "metrics, which look for GPUs with lspci"),
    ("torch.distributed", "set_timeout", _set_pg_timeout, "not in torch 2.13"),
    ("torchtitan.distributed.fsdp", "disable_fsdp_gradient_division", _divide_nothing, "gloo lacks PREMUL_SUM"),
    ("torchtitan.models.common.config_utils", "get_attention_config", _plain_attention, "flex has no backward on CPUs"),
]

for _module, _name, _replacement, _ in REPLACED:
    setattr(importlib.import_module(_module), _name, _replacement)
