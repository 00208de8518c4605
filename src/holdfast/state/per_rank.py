"""State that belongs to each rank alone: random generators, data loaders, caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Generic, Literal, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class PerRank(Generic[T]):
    """A part of a state that every rank has for itself under the same path, and that is never compared or divided.

    `value` is a tensor, a value, an object with a ``state_dict``, or a dict, list or tuple of them; modules, optimizers
    and DTensors span ranks and do not belong here. A load on the same number of ranks as in the save gives each rank
    its own part back, bit for bit and in place. `on_resize` says how a load on another number of ranks behaves:
    ``"error"`` raises `IncompatibleError`; ``"first"`` gives every rank the part of rank 0; a function is called as
    ``on_resize(parts, rank, world_size)`` with the parts of all ranks of the save (objects as their state, tensors on
    the CPU) and the rank and number of ranks of the load. Its result is the state that an object with a ``state_dict``
    loads. Otherwise it is put into `value`: a dict or list takes the new items in place, and a tensor, array or
    `torch.Generator` of the same shape and dtype, or device, the new contents. Anything else is replaced, so read it
    from `value` after the load. Objects inside a dict, list or tuple are refused then (``incompatible.per_rank``).
    """

    value: T
    _: KW_ONLY
    on_resize: Literal["error", "first"] | Callable[[list[object], int, int], object] = "error"

    def __post_init__(self) -> None:
        if not callable(self.on_resize) and self.on_resize not in ("error", "first"):
            raise ValueError(f'on_resize must be "error", "first", or a function of all parts, not {self.on_resize!r}.')
