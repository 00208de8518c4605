"""The objects that a state consists of, recognised again from one call to the next.

A load that fills the very objects that are saved later makes a job go on from what it loaded; a load into other
objects, such as a teacher, only reads. Objects are recognised without being kept alive: modules, optimizers and objects
with a ``state_dict`` by themselves, tensors by their memory, so that ``model.state_dict()`` is as good as ``model``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final, NamedTuple, cast

import torch
from torch import nn

from holdfast.errors import HoldfastError
from holdfast.format import values
from holdfast.format.names import join
from holdfast.frameworks.known_types import unwrapped
from holdfast.frameworks.module import innermost
from holdfast.frameworks.registry import adapter_of
from holdfast.run.session import FilledMemory, Identity, StatePart
from holdfast.state.per_rank import PerRank
from holdfast.state.piecewise import Piecewise
from holdfast.state.placements import local_part

#: The number of memory that is not recognised; no storage is there.
_UNKNOWN: Final = 0


class _Object:
    """An object, by itself."""

    def __init__(self, item: object) -> None:
        self.key: Hashable = ("object", id(item))
        self._ref = weakref.ref(item)

    @property
    def is_alive(self) -> bool:
        return self._ref() is not None


# The calls behind torch's own StorageWeakRef, bound early: an interpreter that ends has no torch any more,
# and no names of this module.
_is_gone = cast("Callable[[int], bool]", torch.UntypedStorage._expired)  # noqa: SLF001
_free = cast("Callable[[int], None]", torch.UntypedStorage._free_weak_ref)  # noqa: SLF001


def _release(numbers: Iterable[int], free: Callable[[int], None] = _free) -> None:
    for number in numbers:
        free(number)


class TensorMemory:
    """The memory of tensors, whichever tensors show it; see `FilledMemory`. That of tensors of kinds that have no
    storage is not recognised.

    Its numbers are addresses of storages, of which it has weak references, as
    `torch.multiprocessing.reductions.StorageWeakRef` does for one: so no other storage gets such an address.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._numbers: set[int] = set()
        for tensor in tensors:
            storage = _storage(tensor)
            if storage is not None and storage._cdata not in self._numbers:  # noqa: SLF001
                self._numbers.add(cast("int", storage._weak_ref()))  # noqa: SLF001

    def among(self, numbers: AbstractSet[int]) -> AbstractSet[int]:
        """As `FilledMemory.among`."""
        return {number for number in self._numbers & numbers if not _is_gone(number)}

    def forget(self, newer: FilledMemory | None) -> bool:
        """As `FilledMemory.forget`."""
        lost = {number for number in self._numbers if _is_gone(number)}
        if newer is not None:
            lost |= newer.among(self._numbers)
        self._numbers -= lost
        _release(lost)
        return bool(self._numbers)

    def __del__(self, release: Callable[[Iterable[int]], None] = _release) -> None:
        release(self._numbers)


class Found(NamedTuple):
    """Where in a state an object is, and how it is recognised."""

    path: str
    itself: Identity


def parts_of(state: object) -> list[StatePart]:
    """The parts of a state that is saved, by which a load of it is recognised: its modules and optimizers. Where it has
    none, its objects with a ``state_dict``, else its tensors; none where it consists of values."""
    items = [item for _, item in _items(state, "", tensors=True)]
    objects = [item for item in items if not isinstance(item, (torch.Tensor, Piecewise))]
    return list(_parts([item for item in objects if _is_trained(item)] or objects or items))


def found_in(state: object) -> list[Found]:
    """The objects in a state that was loaded: its modules, optimizers and objects with a ``state_dict``."""
    items = ((path, _object(item)) for path, item in _items(state, "", tensors=False))
    return [Found(path, itself) for path, itself in items if itself is not None]


def _numbers_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """By what `TensorMemory` recognises the memory of local tensors."""
    return [storage._cdata for storage in map(_storage, tensors) if storage is not None]  # noqa: SLF001


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (ValueError, RuntimeError, NotImplementedError):  # not initialised yet, nested, of a subclass
        return None


def _items(item: object, path: str, *, tensors: bool) -> Iterator[tuple[str, object]]:
    """Objects in `item`, with their paths, and with `tensors` tensors too, with the path of what holds them."""
    if isinstance(item, PerRank):
        item = item.value
    if isinstance(item, (torch.Tensor, Piecewise)):
        if tensors:
            yield path, item
        return
    item = unwrapped(item)
    if adapter_of(item) is not None:
        yield path, item
        return
    if path.count("/") >= values.MAX_DEPTH:
        return
    try:
        shell = values.container(item, path)
    except HoldfastError:
        return  # a key that has no name: the save says so when it names the state
    for name, child in shell[1] if shell is not None else ():
        if not isinstance(child, torch.Tensor):
            yield from _items(child, join(path, name), tensors=tensors)
        elif tensors:  # here, because there may be thousands
            yield path, child


def _is_trained(item: object) -> bool:
    adapter = adapter_of(item)
    return isinstance(item, nn.Module) or (adapter is not None and adapter.spans_ranks)


def _parts(items: Sequence[object]) -> Iterator[StatePart]:
    """How `items` are recognised, if they can be: all loose tensors together, each object by itself."""
    loose = [item for item in items if isinstance(item, (torch.Tensor, Piecewise))]
    if loose:
        yield StatePart(
            None, lambda: [number for item in loose for number in _numbers_of(_memory_of(item)) or [_UNKNOWN]]
        )
    for item in items:
        itself = None if isinstance(item, (torch.Tensor, Piecewise)) else _object(item)
        if itself is not None:
            yield StatePart(itself, partial(_numbers_in, item))


def _object(item: object) -> _Object | None:
    """How an object is recognised; None for one of a class whose instances take no weak references."""
    try:
        return _Object(innermost(item) if isinstance(item, nn.Module) else item)
    except TypeError:
        return None


def _numbers_in(item: object) -> list[int]:
    """By what the memory of a module's parameters is recognised; other objects have none that is looked at."""
    if not isinstance(item, nn.Module):
        return []
    return _numbers_of(local_part(each) for each in innermost(item).parameters())


def _memory_of(item: torch.Tensor | Piecewise) -> Iterator[torch.Tensor]:
    """The local memory of a loose tensor."""
    if isinstance(item, Piecewise):
        yield from (memory for _, memory in item.pieces)
    else:
        yield local_part(item)
