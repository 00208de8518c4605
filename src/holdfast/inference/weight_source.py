"""A vLLM `WeightSource` over live weights or a checkpoint. It needs vLLM.

Backend ``holdfast`` takes the weights out of it and sends parts. vLLM's other backends send whole tensors: for them,
the source gathers or reads one tensor at a time, as their interface asks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, materialize_full_tensor

import holdfast.view
from holdfast.inference.weights import StoredWeights, Weights, live_table


class PublishedSource(WeightSource):  # type: ignore[misc]
    """The source over `weights`, as `Publisher` takes them: a module, tensors by name, or a checkpoint."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def metadata(self) -> list[ParamMeta]:
        """The names, dtypes and whole shapes of all weights; reads and gathers nothing."""
        if isinstance(self.weights, StoredWeights):
            table = self.weights.table()
        else:
            rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
            table = live_table(self.weights, rank=rank, world_size=size)
        return [ParamMeta(each.name, each.dtype, each.shape) for each in table]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each weight, whole, in the order of `metadata`. Collective for weights that are divided."""
        names = [each.name for each in self.metadata()]
        if isinstance(self.weights, StoredWeights):
            view = holdfast.view.open(self.weights.path)
            for name in names:
                yield name, view[f"{self.weights.under}/{name}"][...]
            return
        held = self.weights.state_dict() if isinstance(self.weights, nn.Module) else self.weights
        for name in names:
            tensor = held[name]
            if not isinstance(tensor, torch.Tensor):
                raise TypeError(f"{name!r} is no tensor: this backend of vLLM sends whole tensors only")
            yield name, materialize_full_tensor(tensor.detach())
