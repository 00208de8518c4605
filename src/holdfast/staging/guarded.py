"""What of a state a guard can hold still: that which changes when an optimizer steps, and at no other time."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from holdfast.frameworks.module import changed_in_forward
from holdfast.frameworks.optimizer import is_replayed, parameters_of
from holdfast.state.flatten import Walk
from holdfast.state.gather import LocalTensor
from holdfast.state.placements import local_part

#: Memory: where it is, and how much.
_Memory = tuple[torch.device, int, int]


class Guarded:
    """What is guarded of one state, worked out again only when that may have changed."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] = ()
        self._names: frozenset[str] = frozenset()

    def names(self, walk: Walk, found: dict[str, LocalTensor]) -> frozenset[str]:
        """`guarded`: the same object as long as it holds the same names."""
        # Where all that has a name is where it was, these alone decide. (An address may come to be another tensor's,
        # but then it is the same memory that is guarded.)
        key = (
            list(walk.remembered),
            [(is_replayed(optimizer), list(map(id, parameters_of(optimizer)))) for optimizer in walk.optimizers],
            [id(tensor) for module in walk.modules for tensor in changed_in_forward(module)],
        )
        if key != self._key:
            self._key, self._names = key, guarded(walk, found)
        return self._names


def guarded(walk: Walk, found: dict[str, LocalTensor]) -> frozenset[str]:
    """Of the tensors that `walk` has `found` so far, the names of those that change only when an optimizer steps: of
    its parameters. So do what optimizers keep for them, which it has not seen yet.

    Not those that a forward changes too, nor buffers, averages and whatever else the state holds beside; nor what steps
    in a CUDA graph, whose replay calls no hooks; nor tensors of inference, whose changes torch does not count.
    """
    stepped = _memories(
        parameter
        for optimizer in walk.optimizers
        if not is_replayed(optimizer)
        for parameter in parameters_of(optimizer)
    )
    stepped -= _memories(tensor for module in walk.modules for tensor in changed_in_forward(module))
    return frozenset(
        name
        for name, local in found.items()
        if all(_memory(part) in stepped and not part.is_inference() for part in local.memory)
    )


def _memories(tensors: Iterable[torch.Tensor]) -> set[_Memory]:
    return set(map(_memory, tensors))


def _memory(tensor: torch.Tensor) -> _Memory:
    local = local_part(tensor)
    return local.device, local.data_ptr(), local.nbytes
