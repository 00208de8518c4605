"""The flat memory in a state: each once, though the state may reach it by several names, and by its owner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from holdfast.frameworks.flat_memory import FlatMemory, Portion
from holdfast.frameworks.piecewise import Piecewise

#: Memory of replicas is compared: FSDP1 does not make the copies equal unless it is told to (sync_module_states).
_REPLICAS: Final = "compare"


class FlatOwners:
    """Flat memory by its owner. A module that is in the state twice gives its portions more names."""

    def __init__(self) -> None:
        self._by_owner: dict[int, FlatMemory] = {}

    def add(self, held: FlatMemory) -> None:
        """Add flat memory, or more names for the portions of known one."""
        known = self._by_owner.get(id(held.owner))
        if known is not None:
            pairs = zip(known.portions, held.portions, strict=True)
            held = held._replace(
                portions=tuple(old._replace(names=tuple(sorted({*old.names, *new.names}))) for old, new in pairs)
            )
        self._by_owner[id(held.owner)] = held

    def of(self, owner: torch.Tensor) -> FlatMemory | None:
        """The flat memory of this owner, if it has any."""
        return self._by_owner.get(id(owner))

    def all(self) -> Sequence[FlatMemory]:
        """All flat memory, in the order in which it was added."""
        return list(self._by_owner.values())

    def rename(self, held: FlatMemory, choose: Callable[[tuple[str, ...]], str]) -> str:
        """Give each portion the one name that `choose` returns for its names. Returns the name of the first one."""
        portions = tuple(portion._replace(names=(choose(portion.names),)) for portion in held.portions)
        self._by_owner[id(held.owner)] = held._replace(portions=portions)
        return portions[0].names[0]


def piecewise_of(portion: Portion, memory: torch.Tensor) -> Piecewise:
    """The logical tensor of which this rank holds `portion`, in `memory`."""
    return Piecewise(portion.shape, portion.parts(memory), dtype=memory.dtype, replicas=_REPLICAS)
