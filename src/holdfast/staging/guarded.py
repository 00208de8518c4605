"""What of a state a guard can hold still: that which changes when an optimizer steps, and at no other time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.frameworks.module import changed_in_forward
from holdfast.frameworks.optimizer import changed_in_step, is_replayed
from holdfast.state.flatten import FlatState
from holdfast.state.placements import local_part

#: Memory: where it is, and how much.
_Memory = tuple[torch.device, int, int]


class Guarded:
    """What is guarded of one state, worked out again only when that may have changed."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._names: frozenset[str] = frozenset()

    def names(self, flat: FlatState) -> frozenset[str]:
        """`guarded`: the same object as long as it holds the same names."""
        # Where all that has a name is where it was, these alone decide. (An address may come to be another tensor's,
        # but then it is the same memory that is guarded.)
        key = (
            list(flat.remembered),
            [
                (id(optimizer), [list(map(id, group["params"])) for group in optimizer.param_groups])
                for optimizer in flat.optimizers
            ],
            [is_replayed(optimizer) for optimizer in flat.optimizers],
            list(map(id, _forwarded(flat.modules))),
        )
        if key != self._key:
            self._key, self._names = key, guarded(flat)
        return self._names


def guarded(flat: FlatState) -> frozenset[str]:
    """Names of tensors that change only when one of ``flat.optimizers`` steps: their parameters and their slots.

    Not those that a forward changes too, nor buffers, averages and whatever else the state holds beside; nor tensors of
    inference, whose changes torch does not count.
    """
    stepped = set(map(_memory, _stepped(flat.optimizers)))
    stepped.difference_update(map(_memory, _forwarded(flat.modules)))
    return frozenset(
        name
        for name, local in flat.tensors.items()
        if all(_memory(part) in stepped and not part.is_inference() for part in local.memory)
    )


def _stepped(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    for optimizer in optimizers:
        yield from changed_in_step(optimizer)


def _forwarded(modules: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    for module in modules:
        yield from changed_in_forward(module)


def _memory(tensor: torch.Tensor) -> _Memory:
    local = local_part(tensor)
    return local.device, local.data_ptr(), local.nbytes
