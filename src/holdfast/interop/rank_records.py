"""The metadata of ``torch_checkpointing``: which file of which rank has an item, and how each tensor is divided."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from holdfast.decoding import decode_json
from holdfast.format.manifest import MAX_AXES, MAX_NUMEL
from holdfast.format.names import component, join
from holdfast.format.values import MAX_WORLD_SIZE
from holdfast.geometry import Box, Shape
from holdfast.interop.pickle_machine import Globals, PickledObject, PickleError, pickled_objects, unpickled
from holdfast.interop.torch_globals import ARCHIVE_GLOBALS, PLAIN_GLOBALS, PickledTensor
from holdfast.plan.layout import Mesh, Placed, Placement, Replicate, Shard, StridedShard
from holdfast.plan.placements import division_order, local_boxes

_DTENSOR: Final = "DTensorShardingMetadata"
_VERSION: Final = "2."
_TORCH: Final = "TorchSerialization"
#: The names of `rank_file`.
_RANK_FILE: Final = re.compile(r"(?P<item>.+)_(?P<rank>0|[1-9][0-9]{0,8})\.pt")


class RankBoxes(NamedTuple):
    """The part of a tensor that `rank` holds: boxes of the whole tensor, each with the same box in the rank's own."""

    rank: int
    boxes: Sequence[tuple[Box, Box]]


class RankDivision(NamedTuple):
    """The division of a tensor: its shape, its dtype, and the ranks that together hold it, one for each part."""

    shape: Shape
    dtype: str
    spec: Placed

    def parts(self) -> list[RankBoxes]:
        """The parts, without copies: of the ranks that hold the same, the first one."""
        return _parts(self.spec, self.shape)


class ItemRecord(NamedTuple):
    """An item: for each rank that has it, its file and the format of that; and its tensors that are divided, by their
    names below the item.

    `lost` are the files that ranks lack of an item that nothing but its files describes."""

    files: Mapping[int, tuple[str, str]]
    divisions: Mapping[str, RankDivision]
    lost: Sequence[str] = ()


class RankRecords(NamedTuple):
    """The content of ``metadata.pkl``."""

    world_size: int
    items: Mapping[str, ItemRecord]

    def with_files(self, names: Iterable[str]) -> RankRecords:
        """These records and, of the files `names` beside them, those of items that the metadata does not mention: with
        no tensors, or saved without a resharder."""
        items: dict[str, ItemRecord] = {}
        for name in sorted(names):
            found = _RANK_FILE.fullmatch(name)
            if found is not None and found["item"] not in self.items and int(found["rank"]) < self.world_size:
                record = items.setdefault(found["item"], ItemRecord({}, {}))
                items[found["item"]] = record._replace(files={**record.files, int(found["rank"]): (name, _TORCH)})
        for item, record in items.items():
            lost = [rank_file(item, rank) for rank in range(self.world_size) if rank not in record.files]
            items[item] = record._replace(lost=lost)
        return self._replace(items={**self.items, **items})


def rank_file(item: str, rank: int) -> str:
    """The file of an item of a rank, where no layout says otherwise."""
    return f"{item}_{rank}.pt"


def decode_records(data: bytes) -> RankRecords:
    """The content of a ``metadata.pkl``. Runs no code from it. Raises `PickleError` where it is malformed."""
    try:
        return _decoded(unpickled(data, PLAIN_GLOBALS))
    except (KeyError, TypeError, ValueError, AttributeError, msgspec.MsgspecError) as error:
        if isinstance(error, PickleError):
            raise
        raise PickleError(f"it has another form than that of torch_checkpointing ({type(error).__name__})") from error


def _decoded(content: Any) -> RankRecords:
    version, world_size = content["version"], content["world_size"]
    if not (isinstance(version, str) and version.startswith(_VERSION)):
        raise PickleError("it is of a version that holdfast does not know")
    if type(world_size) is not int or not 0 < world_size <= MAX_WORLD_SIZE:
        raise PickleError("it has no number of ranks")
    items = {}
    for key, item in content["metadata"].items():
        if type(key) is not str:
            raise PickleError("an item has no name")
        items[key] = _item(key, item, world_size)
    return RankRecords(world_size, items)


def _item(key: str, item: Any, world_size: int) -> ItemRecord:
    files = {}
    for rank, layout in (item.get("rank_to_layout_info") or {}).items():
        if type(rank) is not int or not 0 <= rank < world_size:
            raise PickleError("an item is of a rank that does not exist")
        if layout is None:
            files[rank] = rank_file(key, rank), _TORCH
        else:
            files[rank] = str(layout["file_path"]), str(layout["serialization_format"]["type"])
    if not files:
        raise PickleError("an item has no files")
    divisions: dict[str, RankDivision] = {}
    for path, records in (item.get("nested_path_to_metadata") or {}).items():
        for record in records:
            sharding = record["sharding_metadata"]
            if sharding["type"] != _DTENSOR:
                raise PickleError(f"it divides a tensor by {str(sharding['type'])!r:.60}, which holdfast does not know")
            division = _division(sharding["data"])
            if divisions.setdefault(_name(path), division) != division:
                raise PickleError("ranks divide one tensor in several ways")
    return ItemRecord(files, divisions)


def _name(path: object) -> str:
    """The name of a tensor below its item, from the JSON of its path."""
    if not isinstance(path, str):
        raise PickleError("a tensor has no path")
    keys = decode_json(path.encode(), list[str | int | bool | float | None])
    return join("", *map(component, keys))


def _division(data: Any) -> RankDivision:
    shape, mesh = tuple(data["global_shape"]), data["mesh_spec"]
    ranks, mesh_shape = tuple(mesh["mesh_data"]), tuple(mesh["mesh_shape"])
    counts = (*shape, *ranks, *mesh_shape)
    if len(shape) > MAX_AXES or len(mesh_shape) > MAX_AXES or len(ranks) > MAX_WORLD_SIZE:
        raise PickleError("a tensor has an impossible shape or mesh")
    if not all(type(number) is int and 0 <= number <= MAX_NUMEL for number in counts):
        raise PickleError("a tensor has an impossible shape or mesh")
    placements = tuple(_placement(placement, len(shape)) for placement in data["placements"])
    if len(placements) != len(mesh_shape) or np.prod(mesh_shape, dtype=float) != len(ranks):
        raise PickleError("a tensor has other placements than its mesh has axes")
    return RankDivision(shape, str(data["dtype"]).removeprefix("torch."), _placed(mesh_shape, ranks, placements))


def _placement(placement: Any, num_axes: int) -> Placement:
    kind = placement["type"]
    if kind == "Replicate":
        return Replicate()
    axis = placement["dim"]
    if type(axis) is not int or not 0 <= axis < num_axes or kind not in ("Shard", "StridedShard"):
        raise PickleError("a tensor has a placement that does not exist")
    if kind == "Shard":
        return Shard(axis)
    factor = placement["split_factor"]
    if type(factor) is not int or not 0 < factor <= MAX_WORLD_SIZE:
        raise PickleError("a tensor has a placement that does not exist")
    return StridedShard(axis, factor)


def _placed(mesh_shape: Shape, ranks: Shape, placements: tuple[Placement, ...]) -> Placed:
    """The division with its mesh axes in the order in which they divide the tensor. torch divides by the numbers that
    ranks have in their groups, and these are sorted."""
    held = np.asarray(ranks, np.int64).reshape(mesh_shape)
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Replicate):
            held = np.sort(held, axis=axis)
    strided = any(isinstance(placement, StridedShard) for placement in placements)
    order = division_order(mesh_shape, placements) if strided else None
    if order is not None:
        held = held.transpose(order)
        turned = [placements[axis] for axis in order]
        placements = tuple(Shard(each.axis) if isinstance(each, StridedShard) else each for each in turned)
    return Placed(Mesh(held.shape, tuple(held.reshape(-1).tolist())), placements)


@lru_cache(maxsize=4096)  # thousands of tensors have few shapes
def _parts(spec: Placed, shape: Shape) -> list[RankBoxes]:
    found: dict[tuple[tuple[Box, Box], ...], int] = {}
    for rank in sorted(spec.mesh.ranks):
        boxes = tuple(local_boxes(spec, shape, rank))
        if boxes:
            found.setdefault(boxes, rank)
    return [RankBoxes(rank, boxes) for boxes, rank in found.items()]


def local_tensor(args: tuple[Any, ...]) -> object:
    """A pickled DTensor as its local tensor, from the arguments of torch's function; any other tensor as elsewhere."""
    _, kind, _, state = args
    if kind is not _DTENSOR_TYPE:
        plain = ARCHIVE_GLOBALS[_SUBCLASS]
        assert callable(plain)
        return plain(args)
    fields = state if isinstance(state, tuple) else (state,)  # attributes, and those in slots
    local = next((each["_local_tensor"] for each in fields if isinstance(each, dict) and "_local_tensor" in each), None)
    if not isinstance(local, PickledTensor):
        raise PickleError("a DTensor has no local tensor")
    return local


_SUBCLASS: Final = "torch._tensor _rebuild_from_type_v2"
_DTENSOR_TYPE: Final = PickledObject("torch.distributed.tensor DTensor", ())
_TENSOR: Final = "torch.distributed.tensor"
#: The globals of files of ranks. Nothing is looked at in the objects that describe a DTensor: the metadata says it.
RANK_GLOBALS: Final[Globals] = {
    **ARCHIVE_GLOBALS,
    **pickled_objects(
        "torch._utils _rebuild_wrapper_subclass",
        "torch.serialization _get_layout",
        "torch.distributed._mesh_layout _FlatLayout",
        "torch.distributed._mesh_layout _MeshLayout",
        "torch.distributed.device_mesh DeviceMesh",
        *(f"{_TENSOR}._dtensor_spec {name}" for name in ("DTensorSpec", "TensorMeta", "ShardOrderEntry")),
        *(f"{_TENSOR}.placement_types {name}" for name in ("Replicate", "Shard", "_StridedShard")),
    ),
    _SUBCLASS: local_tensor,
    "torch.distributed.tensor DTensor": _DTENSOR_TYPE,
}
