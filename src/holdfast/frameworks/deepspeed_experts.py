"""DeepSpeed's own layers of experts (``deepspeed.moe``): the numbers of the experts that a rank holds.

Each rank holds as many experts of a layer, and numbers its own from 0. The number of an expert in the whole layer does
not depend on the ranks, so it stands in the names of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch.distributed as dist
from torch import nn

from holdfast.errors import StateError
from holdfast.wording import count

#: The type of the layer that sends each token to its experts.
LAYER: Final = ("deepspeed.moe.sharded_moe", "MOELayer")
#: The layers that DeepSpeed's `expert_parallel` option makes of those of transformers.
_MADE: Final = ("deepspeed.module_inject.auto_ep_layer", "AutoEPMoELayer")


def numbered_experts(path: str, layer: Any) -> tuple[nn.Module, int]:
    """The list of the experts that this rank has of a layer, and the number of the first of them in the whole layer.

    Raises `StateError`, code ``state.engine``, for a layer that no engine has divided yet.
    """
    held, group = layer.experts, layer.ep_group
    if group is None and layer.ep_size > 1:
        raise StateError(
            f"Module {path!r} has layers of experts that {count(layer.ep_size, 'rank')} are to share, and does not say "
            "yet which experts this rank has.",
            code="state.engine",
            action="Call deepspeed.initialize() first, and put the engine into the state.",
            path=path,
        )
    first = 0 if group is None else dist.get_rank(group) * held.num_local_experts
    return held.deepspeed_experts, first


def has_made_layers(modules: Iterable[nn.Module]) -> bool:
    """Whether some of the modules are layers of experts that DeepSpeed made of those of another library."""
    return any((base.__module__, base.__qualname__) == _MADE for each in modules for base in type(each).__mro__)
