"""State that belongs to each rank alone: random generators, data loaders, caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class PerRank(Generic[T]):
    """Marks a part of a state that every rank has for itself, under one path, and that is never compared or divided.

    `value` is a tensor, a value, an object with a ``state_dict``, or a dict, list or tuple of them; modules, optimizers
    and DTensors span ranks and do not belong here. Loading on as many ranks as saved gives each rank its own part
    back, bit for bit and in place. `on_resize` says what loading on another number of ranks does: ``"error"`` raises
    `IncompatibleError`; ``"first"`` gives every rank what rank 0 had; a function is called as ``on_resize(parts, rank,
    world_size)`` with the parts of all ranks that saved (objects as their state, tensors on the CPU) and the live rank
    and number of ranks: what it returns becomes `value`, or is what an object with a ``state_dict`` loads.
    """

    value: T
    _: KW_ONLY
    on_resize: Literal["error", "first"] | Callable[[list[object], int, int], object] = "error"

    def __post_init__(self) -> None:
        if not callable(self.on_resize) and self.on_resize not in ("error", "first"):
            raise ValueError(f'on_resize is {self.on_resize!r}; it is "error", "first", or a function of all parts.')
