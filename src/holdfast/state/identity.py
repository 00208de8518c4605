"""The objects that a state consists of, recognised again from one call to the next.

A load that fills the very objects that are saved later makes a job go on from what it loaded; a load into other
objects, such as a teacher, only reads. Objects are recognised without being kept alive: modules, optimizers and objects
with a ``state_dict`` by themselves, tensors by their memory, so that ``model.state_dict()`` is as good as ``model``.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from holdfast.errors import HoldfastError
from holdfast.format import values
from holdfast.format.names import join
from holdfast.frameworks.adapters import unwrapped
from holdfast.frameworks.module import innermost
from holdfast.frameworks.stateful import is_stateful
from holdfast.run.session import Identity, Part
from holdfast.state.per_rank import PerRank
from holdfast.state.piecewise import Piecewise
from holdfast.state.placements import local_part


class _Object:
    """An object, by itself."""

    def __init__(self, item: object) -> None:
        self.key: Hashable = ("object", id(item))
        self._ref = weakref.ref(item)

    @property
    def is_alive(self) -> bool:
        return self._ref() is not None


class _TensorMemory:
    """The memory of a tensor, whichever tensors show it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._ref = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call] # torch has no types there
        self.key: Hashable = ("memory", self._ref.cdata)

    @property
    def is_alive(self) -> bool:
        return not self._ref.expired()  # type: ignore[no-untyped-call]


class Found(NamedTuple):
    """Where in a state an object is, and how it is recognised."""

    path: str
    part: Part


def parts_of(state: object) -> list[Part]:
    """The parts of a state that is saved, by which a load of it is recognised: its modules and optimizers. Where it has
    none, its objects with a ``state_dict``, else its tensors; none where it consists of values."""
    items = list(_items(state, ""))
    for kinds in (_is_trained, _is_object, _is_anything):
        chosen = [item for _, item in items if kinds(item)]
        if chosen:
            return [part for item in chosen if (part := _part(item)) is not None]
    return []


def found_in(state: object) -> list[Found]:
    """All parts of a state that was loaded, with their paths."""
    return [Found(path, part) for path, item in _items(state, "") if (part := _part(item)) is not None]


def memory_of(tensors: Iterable[torch.Tensor]) -> list[Identity]:
    """How the memory of local tensors is recognised; that of tensors of kinds that have no storage is not."""
    return [memory for tensor in tensors if (memory := _memory(tensor)) is not None]


def _memory(tensor: torch.Tensor) -> _TensorMemory | None:
    try:
        return _TensorMemory(tensor)
    except (ValueError, RuntimeError, NotImplementedError):  # not initialised yet, nested, of a subclass
        return None


def _items(item: object, path: str) -> Iterator[tuple[str, object]]:
    """Objects and tensors in `item`, with their paths."""
    if isinstance(item, PerRank):
        item = item.value
    if not isinstance(item, torch.Tensor):
        item = unwrapped(item)
    if _is_object(item) or isinstance(item, (torch.Tensor, Piecewise)):
        yield path, item
        return
    if path.count("/") >= values.MAX_DEPTH:
        return
    try:
        shell = values.container(item, path)
    except HoldfastError:
        return  # a key that has no name: the save says so when it names the state
    for name, child in shell[1] if shell is not None else ():
        yield from _items(child, join(path, name))


def _is_trained(item: object) -> bool:
    return isinstance(item, (nn.Module, Optimizer))


def _is_object(item: object) -> bool:
    return _is_trained(item) or is_stateful(item)


def _is_anything(_: object) -> bool:
    return True


def _part(item: object) -> Part | None:
    """How `item` is recognised; None for an object that cannot be."""
    if isinstance(item, torch.Tensor):
        return Part(None, lambda: memory_of([local_part(item)]))
    if isinstance(item, Piecewise):
        return Part(None, lambda: memory_of(memory for _, memory in item.pieces))
    if isinstance(item, nn.Module):
        inner = innermost(item)
        return Part(_Object(inner), lambda: memory_of(local_part(each) for each in inner.parameters()))
    try:
        return Part(_Object(item), list)
    except TypeError:  # a class whose instances take no weak references
        return None
