"""A sharded optimizer as another package would have it, and its adapter: nothing here is imported by holdfast.

As under ZeRO-1, each rank keeps the fp32 state of one flat range of every parameter.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

import holdfast
from holdfast.frameworks import BindingSource, Finish, Sink


class ShardedMomentum:
    """Momentum, of which rank `rank` of `world_size` keeps a flat range per parameter, beside its master weights."""

    def __init__(self, parameters: Iterable[torch.Tensor], *, rank: int, world_size: int) -> None:
        self.parameters = list(parameters)
        self.num_steps = 0
        self.ranges = [
            holdfast.FlatRange(rank * each.numel() // world_size, (rank + 1) * each.numel() // world_size)
            for each in self.parameters
        ]
        self.masters = [
            each.detach().reshape(-1)[part.start : part.stop].float().clone() for each, part in self._pairs()
        ]
        self.momenta = [torch.zeros_like(master) for master in self.masters]

    def _pairs(self) -> Iterable[tuple[torch.Tensor, holdfast.FlatRange]]:
        return zip(self.parameters, self.ranges, strict=True)

    def step(self) -> None:
        """A step whose gradient is a function of the elements' positions, so that all worlds compute the same."""
        self.num_steps += 1
        for part, master, momentum in zip(self.ranges, self.masters, self.momenta, strict=True):
            momentum.mul_(0.5).add_(torch.arange(part.start, part.stop, dtype=torch.float32))
            master.sub_(momentum, alpha=0.125)


class ShardedMomentumAdapter:
    """Saves and loads `ShardedMomentum`, named after the parameters."""

    needs_names = True
    is_divisible = False
    spans_ranks = True

    def accepts(self, kind: type) -> bool:
        return issubclass(kind, ShardedMomentum)

    def describe(self, path: str, item: ShardedMomentum, sink: Sink) -> bool:
        sink.tree(path, self._tree(item, sink))
        return True

    def bind(self, path: str, item: ShardedMomentum, source: BindingSource) -> Finish:
        load = source.live(path, self._tree(item, source))

        def finish() -> object:
            loaded: Any = load()
            item.num_steps = loaded["num_steps"]
            return item

        return finish

    def _tree(self, item: ShardedMomentum, owner: Sink | BindingSource) -> dict[str, object]:
        tree: dict[str, object] = {"num_steps": item.num_steps}
        for parameter, part, *held in zip(item.parameters, item.ranges, item.masters, item.momenta, strict=True):
            entry = owner.named(parameter)
            assert entry is not None
            tree[entry.name] = {
                name: holdfast.Piecewise(parameter.shape, [(part, memory)], dtype=torch.float32)
                for name, memory in zip(("master", "momentum"), held, strict=True)
            }
        return tree
