"""The identity of a state's objects, by which a save recognises the objects that a load has filled.

A load that fills the same objects that are saved later makes the job continue from the loaded checkpoint; a load into
other objects, such as a teacher, only reads. Objects are recognised without keeping them alive: modules, optimizers and
objects with a ``state_dict`` by identity, tensors by their memory, so that ``model.state_dict()`` is as good as
``model``.
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
from holdfast.frameworks.piecewise import Piecewise
from holdfast.frameworks.registry import adapter_of
from holdfast.run.loads import NEVER_LOADED, FilledMemory, Identity, Sources, StatePart
from holdfast.run.session import JOB
from holdfast.state.local_placements import local_parts
from holdfast.state.per_rank import PerRank
from holdfast.state.sharded_tensors import is_sharded

#: The number for memory that cannot be recognised; no storage has this address.
_UNKNOWN: Final = 0
#: The errors of tensors without a storage: not initialised yet, nested, of a subclass.
_NO_STORAGE: Final = (ValueError, RuntimeError, NotImplementedError)


class _Object:
    """The identity of an object."""

    def __init__(self, item: object) -> None:
        self.key: Hashable = ("object", id(item))
        self._ref = weakref.ref(item)

    @property
    def is_alive(self) -> bool:
        return self._ref() is not None


# The calls behind torch's own StorageWeakRef. Bound here, because an interpreter that shuts down has cleared torch and
# the names of this module before `__del__` runs.
_hold = cast("Callable[[torch.UntypedStorage], int]", torch.UntypedStorage._weak_ref)  # noqa: SLF001
_is_gone = cast("Callable[[int], bool]", torch.UntypedStorage._expired)  # noqa: SLF001
_free = cast("Callable[[int], None]", torch.UntypedStorage._free_weak_ref)  # noqa: SLF001


def _release(numbers: Iterable[int], free: Callable[[int], None] = _free) -> None:
    for number in numbers:
        free(number)


class TensorMemory:
    """The memory of tensors, recognised through any tensor that shares it; see `FilledMemory`. Memory of tensors that
    have no storage is not recognised.

    Its numbers are addresses of storages. It holds weak references to the storages, as
    `torch.multiprocessing.reductions.StorageWeakRef` does, so that no other storage gets such an address.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._numbers: set[int] = set()
        storages = {storage._cdata: storage for storage in _storages(tensors) if storage is not None}  # noqa: SLF001
        self._numbers.update(map(_hold, storages.values()))

    def among(self, numbers: AbstractSet[int]) -> AbstractSet[int]:
        """As `FilledMemory.among`. No test whether it still exists is needed: no other memory gets these numbers."""
        return self._numbers & numbers

    def forget(self, newer: FilledMemory | None) -> bool:
        """As `FilledMemory.forget`."""
        lost = set() if newer is None else set(newer.among(self._numbers))
        lost |= {number for number in self._numbers - lost if _is_gone(number)}
        self._numbers -= lost
        _release(lost)
        return bool(self._numbers)

    def __del__(self, release: Callable[[Iterable[int]], None] = _release) -> None:
        release(self._numbers)


class Found(NamedTuple):
    """An object in a state: its path and its identity."""

    path: str
    itself: Identity


def parts_of(state: object) -> list[StatePart]:
    """The parts of a saved state by which a load of it is recognised: its modules and optimizers; if it has none, its
    objects with a ``state_dict``; if it has none of these, its tensors. Empty for a state that consists of values."""
    items = [item for _, item in _items(state, "", tensors=True)]
    loose = [item for item in items if isinstance(item, (torch.Tensor, Piecewise))]
    objects = [item for item in items if not isinstance(item, (torch.Tensor, Piecewise))]
    if objects:
        return list(_parts([item for item in objects if _is_trained(item)] or objects))
    return [StatePart(None, partial(_numbers_of_loose, loose))] if loose else []


def sources_of(state: object, *, is_first_rank: bool) -> Sources:
    """The loads that last filled a `state` that is about to be saved; only the first rank asks. On all ranks, what was
    loaded before the save no longer says from where a loop goes on."""
    sources = JOB.sources(lambda: parts_of(state)) if is_first_rank else NEVER_LOADED
    JOB.note_trained()
    return sources


def found_in(state: object) -> list[Found]:
    """The objects in a loaded state: its modules, optimizers and objects with a ``state_dict``."""
    items = ((path, _object(item)) for path, item in _items(state, "", tensors=False))
    return [Found(path, itself) for path, itself in items if itself is not None]


def entries_of(state: object) -> Iterator[object]:
    """The modules, optimizers and objects with a ``state_dict`` in a state."""
    return (item for _, item in _items(state, "", tensors=False))


def _numbers_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The numbers by which `TensorMemory` recognises the memory of local tensors."""
    return [storage._cdata for storage in _storages(tensors) if storage is not None]  # noqa: SLF001


def _storages(tensors: Sequence[torch.Tensor]) -> list[torch.UntypedStorage | None]:
    """The storage of each tensor; None for tensors without one."""
    try:
        return [tensor.untyped_storage() for tensor in tensors]
    except _NO_STORAGE:
        return list(map(_storage, tensors))


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except _NO_STORAGE:
        return None


def _items(item: object, path: str, *, tensors: bool) -> Iterator[tuple[str, object]]:
    """The objects in `item` with their paths; with `tensors`, also the tensors, under any path."""
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
    if type(item) is dict:  # the tensors at once, because there may be thousands
        if tensors:
            yield from ((path, child) for child in item.values() if isinstance(child, torch.Tensor))
        item = {key: child for key, child in item.items() if not isinstance(child, torch.Tensor)}
    try:
        shell = values.container(item, path)
    except HoldfastError:
        return  # a key that cannot be a name: the save raises that error when it names the state
    for name, child in shell[1] if shell is not None else ():
        yield from _items(child, join(path, name), tensors=tensors)


def _is_trained(item: object) -> bool:
    adapter = adapter_of(item)
    return isinstance(item, nn.Module) or (adapter is not None and adapter.spans_ranks)


def _parts(objects: Sequence[object]) -> Iterator[StatePart]:
    """The parts for those `objects` that can be recognised."""
    for item in objects:
        itself = _object(item)
        if itself is not None:
            yield StatePart(itself, partial(_numbers_in, item))


def _object(item: object) -> _Object | None:
    """The identity of an object; None if its class does not support weak references."""
    try:
        return _Object(innermost(item) if isinstance(item, nn.Module) else item)
    except TypeError:
        return None


def _numbers_in(item: object) -> list[int]:
    """The numbers by which the memory of a module's parameters is recognised; empty for other objects."""
    if not isinstance(item, nn.Module):
        return []
    return _numbers_of(local_parts(list(innermost(item).parameters())))


def _numbers_of_loose(items: Sequence[torch.Tensor | Piecewise]) -> list[int]:
    """The numbers by which the local memory of loose tensors is recognised."""
    whole = [item for item in items if isinstance(item, torch.Tensor) and not is_sharded(item)]
    storages = _storages(local_parts(whole))
    numbers = [_UNKNOWN if storage is None else storage._cdata for storage in storages]  # noqa: SLF001
    for item in items:
        if isinstance(item, Piecewise):
            numbers += _numbers_of([memory for _, memory in item.pieces]) or [_UNKNOWN]
        elif is_sharded(item):
            numbers += _numbers_of([shard.tensor for shard in item.local_shards()]) or [_UNKNOWN]
    return numbers
