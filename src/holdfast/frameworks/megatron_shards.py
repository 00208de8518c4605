"""The descriptors of Megatron's sharded state dicts, as pieces of logical tensors.

Types are known by their names, so nothing here imports Megatron. A `ShardedTensor` is a box of the tensor that its key
names. A `ShardedTensorFactory` cuts a fused parameter into several of these; each of them is a strided view of the
parameter, also where the factory copies it, so the parameter's own memory is what a load fills. Two ranks that hold
replicas have the same box, which `Piecewise` stores once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from holdfast.errors import StateError
from holdfast.frameworks.megatron_ranges import (
    StridedPart,
    boxes_in_range,
    dense_part,
    flat_position,
    is_one_range,
)
from holdfast.frameworks.piecewise import Piecewise
from holdfast.geometry import Box, FlatRange, Shape
from holdfast.wording import kind_of

_MODULE: Final = "megatron.core.dist_checkpointing.mapping"

#: A part of a logical tensor, and the memory that holds it.
HeldPiece = tuple[FlatRange | Box, torch.Tensor]


@dataclass(frozen=True)
class HeldShard:
    """This rank's part `box` of the logical tensor `key` of `shape`: the elements `view` of a local tensor.

    `owner` is that tensor; or, with a `first`, the 1-d memory of its elements from number `first` on. With
    `may_resize`, the stored tensor may have another shape, because of padding. `is_regular` says that the parts of all
    ranks have one size.
    """

    key: str
    shape: Shape
    box: Box
    owner: torch.Tensor
    view: StridedPart
    first: int | None
    may_resize: bool
    is_regular: bool

    def pieces(self) -> list[HeldPiece]:
        """The part itself, in the memory of `owner`."""
        if self.first is not None:
            return self.pieces_of(self.owner, self.first)
        held = self.owner.detach()
        start = held.storage_offset() + self.view.offset
        return [(self.box, held.as_strided(self.view.size, self.view.strides, start).view(self.box.size))]

    def pieces_of(self, memory: torch.Tensor, first: int) -> list[HeldPiece]:
        """The parts of the logical tensor whose elements lie in `memory`, which is contiguous and has the elements from
        number `first` on of something that is laid out as `owner` is, such as an optimizer's state."""
        flat = memory.detach().reshape(-1)
        start, stop = first, first + flat.numel()
        if self.view.is_dense and self.is_regular and is_one_range(self.box, self.shape):
            low, high = max(start, self.view.offset), min(stop, self.view.offset + self.box.numel)
            at = flat_position(self.box.start, self.shape) - self.view.offset
            return [(FlatRange(at + low, at + high), flat[low - start : high - start])] if low < high else []
        return [self._piece(flat, box, at - start) for box, at in boxes_in_range(self.view, start, stop)]

    def _piece(self, flat: torch.Tensor, box: Box, at: int) -> HeldPiece:
        """A box in the coordinates of the view as a piece of the logical tensor."""
        held = flat.as_strided(box.size, self.view.strides, flat.storage_offset() + at)
        prepended = len(self.box.size) - len(box.size)
        inner = self.box.start[prepended:]
        start = (*self.box.start[:prepended], *(a + b for a, b in zip(inner, box.start, strict=True)))
        size = (1,) * prepended + box.size
        return Box(start, size), held.view(size) if prepended else held


class HeldObject(NamedTuple):
    """A `ShardedObject`: its name among all of its key, its value, the path of the object in the tree, and whether this
    rank is the one that stores it."""

    name: str
    value: object
    path: str
    is_main: bool


class ShardedTree(NamedTuple):
    """The content of a sharded state dict: the shards of tensors, and the objects."""

    shards: Sequence[HeldShard]
    objects: Sequence[HeldObject]


def read_tree(tree: object) -> ShardedTree:
    """The shards and objects in a tree that ``sharded_state_dict()`` returned.

    Objects that Megatron does not save (`LocalNonpersistentObject`) are left out. Raises `StateError`, code
    ``state.megatron``, for anything else, and for a factory that does more than to cut its tensor.
    """
    shards: list[HeldShard] = []
    objects: list[HeldObject] = []
    for path, item in _leaves("", tree):
        kind = kind_in_megatron(item)
        if kind == "ShardedTensor":
            shards.append(_shard(item))
        elif kind == "ShardedTensorFactory":
            shards += _factory_shards(item)
        elif kind == "ShardedObject":
            held: Any = item
            objects.append(HeldObject(_object_name(held), held.data, path, _is_main(held.replica_id)))
        elif kind != "LocalNonpersistentObject":
            raise _refused(path, f"is {kind_of(item)}, which says nothing about the other ranks")
    return ShardedTree(shards, objects)


def kind_in_megatron(item: object) -> str | None:
    """The name of the class of descriptors that `item` belongs to; None for anything else."""
    return next((base.__qualname__ for base in type(item).__mro__ if base.__module__ == _MODULE), None)


def joined(held: Iterable[tuple[HeldShard, Iterable[HeldPiece]]], path: str) -> dict[str, Piecewise]:
    """The logical tensors, by key, whose pieces several shards hold, as the layers of a stacked tensor do.

    A piece that a rank holds twice in one memory, as a tied weight, counts once. Raises `StateError`, code
    ``state.megatron``, where the pieces do not fit together; `path` is that of the object, for messages.
    """
    shapes: dict[str, Shape] = {}
    pieces: dict[str, dict[FlatRange | Box, torch.Tensor]] = {}
    for shard, found in held:
        if shapes.setdefault(shard.key, shard.shape) != shard.shape:
            raise _refused(f"{path}/{shard.key}", f"has the shapes {shapes[shard.key]} and {shard.shape}")
        of_key = pieces.setdefault(shard.key, {})
        for part, memory in found:
            other = of_key.setdefault(part, memory)
            if other.data_ptr() != memory.data_ptr():
                raise _refused(f"{path}/{shard.key}", f"has {part} in two memories of one rank")
    return {key: _piecewise(f"{path}/{key}", shapes[key], of_key) for key, of_key in pieces.items() if of_key}


def _piecewise(name: str, shape: Shape, pieces: Mapping[FlatRange | Box, torch.Tensor]) -> Piecewise:
    try:
        return Piecewise(shape, list(pieces.items()), replicas="split")
    except (TypeError, ValueError) as error:
        raise _refused(name, f"cannot be saved: {error}") from error


def _leaves(path: str, item: object) -> Iterator[tuple[str, object]]:
    if isinstance(item, Mapping):
        for key, child in item.items():
            yield from _leaves(f"{path}/{key}" if path else str(key), child)
    elif isinstance(item, list | tuple):
        for number, child in enumerate(item):
            yield from _leaves(f"{path}/{number}", child)
    else:
        yield path, item


def _shard(item: Any, owner: torch.Tensor | None = None, view: StridedPart | None = None) -> HeldShard:
    """The shard that a `ShardedTensor` describes: `view` of `owner`, or all of its own data."""
    held = item.data if owner is None else owner
    _check_plain(item.key, held)
    part, first = item.flattened_range, None
    if part is not None:
        view, first = dense_part(0, _shape(item.local_shape)), part.start
    elif view is None:
        view = StridedPart(0, _shape(held.shape), _shape(held.stride()))
    size = (1,) * item.prepend_axis_num + _shape(item.local_shape)
    box = Box(_shape(item.global_offset), size)
    regular = item.axis_fragmentations is not None
    return HeldShard(
        item.key, _shape(item.global_shape), box, held, view, first, bool(item.allow_shape_mismatch), regular
    )


def _check_plain(key: str, held: object) -> None:
    """Refuse what has no memory of its own elements: views of a tensor in FP8 are copies, which a load would fill in
    vain."""
    if type(held) is not torch.Tensor and type(held) is not nn.Parameter:
        raise _refused(key, f"is {kind_of(held)}, and not a plain tensor")


def _factory_shards(factory: Any) -> list[HeldShard]:
    owner = factory.data
    _check_plain(factory.key, owner)
    made = _built(factory, owner)
    if factory.flattened_range is not None:
        raise _refused(factory.key, "is cut out of a flattened tensor by a factory")
    storage = owner.untyped_storage().data_ptr()
    if all(item.data.untyped_storage().data_ptr() == storage for item in made):
        begin = owner.storage_offset()
        views = [
            StridedPart(item.data.storage_offset() - begin, _shape(item.data.shape), _shape(item.data.stride()))
            for item in made
        ]
    else:
        views = _copied_views(factory, owner)
    return [_shard(item, owner, view) for item, view in zip(made, views, strict=True)]


def _copied_views(factory: Any, owner: torch.Tensor) -> list[StridedPart]:
    """The view of `owner` that each result of a factory is a copy of, from what the factory does to the numbers of the
    elements."""
    if not owner.is_contiguous():
        raise _refused(factory.key, "is not contiguous")
    numbers = torch.arange(owner.numel()).view(owner.shape)
    views = []
    for item in _built(factory, numbers):
        found = item.data
        first = int(found[(0,) * found.ndim]) if found.numel() else 0
        strides = tuple(
            int(found[tuple(int(axis == other) for other in range(found.ndim))]) - first if extent > 1 else 1
            for axis, extent in enumerate(found.shape)
        )
        last = first + sum((extent - 1) * stride for extent, stride in zip(found.shape, strides, strict=True))
        is_view = min(first, *strides, 1) >= 0 and last < owner.numel()
        if not is_view or not torch.equal(numbers.as_strided(found.shape, strides, first), found):
            raise _refused(factory.key, "goes through a factory that does more than to cut the tensor")
        views.append(StridedPart(first, _shape(found.shape), strides))
    return views


def _built(factory: Any, data: torch.Tensor) -> list[Any]:
    built = factory.build_fn(factory.key, data, factory.replica_id, factory.flattened_range)
    found: list[Any] = []
    for _, item in _leaves(factory.key, built):
        kind = kind_in_megatron(item)
        if kind == "ShardedTensor":
            found.append(item)
        elif kind != "LocalNonpersistentObject":
            raise _refused(factory.key, f"goes through a factory that makes {kind_of(item)}")
    return found


def _object_name(item: Any) -> str:
    offset, shape = (".".join(map(str, numbers)) for numbers in (item.global_offset, item.global_shape))
    return f"{item.key}/shard_{offset}_{shape}"


def _is_main(replica_id: int | tuple[int, ...]) -> bool:
    return not any(replica_id if isinstance(replica_id, tuple | list) else (replica_id,))


def _shape(numbers: Iterable[int]) -> Shape:
    return tuple(map(int, numbers))


def _refused(path: str, what: str) -> StateError:
    return StateError(
        f"{path!r} in Megatron's sharded state dict {what}.",
        code="state.megatron",
        action="Correct the sharded_state_dict of that module, or leave the module out of the state.",
        path=path,
    )
