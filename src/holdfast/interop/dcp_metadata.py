"""The metadata of a DCP folder: which part of which tensor is which item of which file.

ByteCheckpoint writes the same records in classes of its own. Its items of tensors are bare elements, which a header in
the metadata describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from holdfast.collector import collector_paused
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import MAX_NUMEL
from holdfast.format.names import component, join
from holdfast.format.values import MAX_DEPTH, TorchValue
from holdfast.geometry import Box, Shape
from holdfast.interop.flattened_parts import with_whole_shape
from holdfast.interop.item_places import Item, TensorItems
from holdfast.interop.pickle_machine import (
    Globals,
    PickledObject,
    PickleError,
    UnreadTensorError,
    pickled_objects,
    unpickled,
)
from holdfast.interop.strided_parts import is_row_major
from holdfast.interop.torch_globals import ARCHIVE_GLOBALS, PLAIN_GLOBALS, PickledTensor, persistent, shape_of

_METADATA: Final = "torch.distributed.checkpoint.metadata"
_TENSOR: Final = f"{_METADATA} TensorStorageMetadata"
_BYTES: Final = f"{_METADATA} BytesStorageMetadata"
#: The module in which torch before 2.4 had the properties of tensors.
_OLD: Final = "torch.distributed._shard.sharded_tensor.metadata"
_BYTE_CHECKPOINT: Final = "bytecheckpoint.checkpointer.meta_type"
#: Versions of Python write the names of these classes in several ways; none of them is looked at.
_UNREAD: Final = (
    f"{_METADATA} StorageMeta",
    f"{_METADATA} _MEM_FORMAT_ENCODING",
    f"{_OLD} MEM_FORMAT_ENCODING",
    "torch.serialization _get_layout",
    *(
        f"{module} {name}"
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath")
    ),
)
#: What Megatron-core up to 0.15 says about tensors that it stored in ranges.
_WHOLE_SHAPE: Final = "nd_reformulated_orig_global_shape"
#: The classes of the plans that Megatron keeps in its metadata, which nothing here looks at either.
_PLANS: Final = (
    *(
        f"torch.distributed.checkpoint.planner {name}"
        for name in ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")
    ),
    "megatron.core.dist_checkpointing.strategies.torch MCoreSavePlan",
    "megatron.core.dist_checkpointing.strategies.torch MCoreMetadata",
)
_GLOBALS: Final[Globals] = {
    **PLAIN_GLOBALS,
    **pickled_objects(
        _TENSOR,
        _BYTES,
        f"{_METADATA} Metadata",
        f"{_METADATA} TensorProperties",
        f"{_OLD} TensorProperties",
        f"{_METADATA} ChunkStorageMetadata",
        f"{_METADATA} MetadataIndex",
        "torch.distributed.checkpoint.filesystem _StorageInfo",
        f"{_BYTE_CHECKPOINT} Metadata",
        f"{_BYTE_CHECKPOINT} _StorageInfo",
        *_UNREAD,
        *_PLANS,
    ),
}

#: The name of the class of items, by that of the class of metadata.
_ITEMS: Final = {
    f"{_METADATA} Metadata": "torch.distributed.checkpoint.filesystem _StorageInfo",
    f"{_BYTE_CHECKPOINT} Metadata": f"{_BYTE_CHECKPOINT} _StorageInfo",
}

#: The path of an entry in the nested state dict: keys of dicts, and indexes of lists.
StatePath = tuple[str | int, ...]


class DcpTensor(NamedTuple):
    """A tensor by its path in the state."""

    path: StatePath
    items: TensorItems


class DcpMetadata(NamedTuple):
    """The content of a folder, by the flat names of DCP."""

    tensors: Mapping[str, DcpTensor]
    values: Mapping[str, tuple[StatePath, Item]]


def moved(tensor: DcpTensor, path: StatePath, prefix: str) -> DcpTensor:
    """The tensor under another path, in files below `prefix`."""
    parts = [(box, item._replace(file=prefix + item.file)) for box, item in tensor.items.parts]
    return DcpTensor(path, tensor.items._replace(parts=parts))


@collector_paused()
def decode_metadata(data: bytes) -> DcpMetadata:
    """The content of a ``.metadata`` file. Runs no code from it.

    Raises `ForbiddenGlobalError` for a global that no metadata has, and `PickleError` for anything else that is wrong.
    """
    try:
        return _decoded(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, PickleError):
            raise
        raise PickleError(
            f"it has another form than metadata of DCP ({type(error).__name__}: {error!s:.100})"
        ) from error


def name_of(path: StatePath) -> str:
    """The name of an entry of a nested state dict."""
    return join("", *(component(key) if isinstance(key, str) else str(key) for key in path))


def _decoded(data: bytes) -> DcpMetadata:
    root = unpickled(data, _GLOBALS)
    if not isinstance(root, PickledObject) or root.name not in _ITEMS:
        raise PickleError("it has no Metadata where one belongs")
    metadata = root.fields
    if metadata.get("user_defined_dict"):
        raise UnreadTensorError("it describes flat parameters (save_decomposed_model_optimizer), not the original ones")
    paths = metadata.get("planner_data") or {}
    ranges = _whole_shapes(metadata.get("mcore_data"))
    homes = _homes(metadata["storage_data"], _ITEMS[root.name], metadata.get("all_tensor_metadata"))
    tensors: dict[str, DcpTensor] = {}
    values: dict[str, tuple[StatePath, Item]] = {}
    # Each key of a path is also in a name, so a sound pickle is larger than the paths in it.
    num_characters = 0
    taken: set[StatePath] = set()
    for name, entry in metadata["state_dict_metadata"].items():
        if not isinstance(name, str):
            raise PickleError("an entry has no name")
        path = _path(paths.get(name, (name,)))
        num_characters += sum(len(key) for key in path if isinstance(key, str))
        if num_characters > 2 * len(data):
            raise PickleError("it has paths that are longer than the names of their entries")
        if path in taken:
            raise PickleError(f"it has {name!r:.200} twice")
        taken.add(path)
        if isinstance(entry, PickledObject) and entry.name == _TENSOR:
            tensors[name] = _tensor(name, path, entry.fields, homes)
            if name in ranges:
                tensors[name] = DcpTensor(path, with_whole_shape(tensors[name].items, ranges[name]))
        elif isinstance(entry, PickledObject) and entry.name == _BYTES:
            values[name] = path, _home(name, None, homes)
        else:
            raise PickleError(f"{name!r:.200} is neither a tensor nor a value")
    return DcpMetadata(tensors, values)


def _whole_shapes(found: object) -> dict[str, Shape]:
    """The shapes of the tensors that Megatron has stored in ranges, by name."""
    shapes = {
        name: about[_WHOLE_SHAPE]
        for name, about in (found.items() if isinstance(found, dict) else ())
        if isinstance(about, dict) and _WHOLE_SHAPE in about
    }
    return {name: shape_of(shape) for name, shape in shapes.items()}


def _fields(record: object, name: str) -> dict[str, Any]:
    if not isinstance(record, PickledObject) or record.name != name:
        raise PickleError(f"it has no {name.rpartition(' ')[2]} where one belongs")
    return record.fields


def _path(path: object) -> StatePath:
    # The message does not show it: tuples that share their parts have a text without an end.
    if not isinstance(path, tuple) or not 0 < len(path) <= MAX_DEPTH or not isinstance(path[0], str):
        raise PickleError(f"an object of type {type(path).__name__} is no path of a state dict (1 to {MAX_DEPTH} keys)")
    if not all(type(key) is str or (type(key) is int and 0 <= key <= MAX_NUMEL) for key in path):
        raise PickleError("a path of a state dict has a key that is neither a text nor an index")
    return path


def _homes(
    storage: Mapping[PickledObject, object], kind: str, headers: Mapping[PickledObject, object] | None
) -> dict[tuple[str, Shape | None], Item]:
    """The item of each part, by name and first element; None for a value. Items are of the class `kind`. With
    `headers`, those of tensors are bare."""
    plain = {} if headers is None else {_index(index): _is_plain(header) for index, header in headers.items()}
    homes: dict[tuple[str, Shape | None], Item] = {}
    for index, info in storage.items():
        place = _fields(index, f"{_METADATA} MetadataIndex")
        at = place.get("offset")
        item = _fields(info, kind)
        start, nbytes = shape_of((item["offset"], item["length"]))
        file, transforms = item["relative_path"], tuple(item.get("transform_descriptors") or ())
        if not isinstance(file, str) or not isinstance(place["fqn"], str):
            raise PickleError("an item has no file or no name")
        if not all(isinstance(transform, str) for transform in transforms):
            raise PickleError("an item was put through something without a name")
        is_bare = headers is not None and at is not None
        if is_bare and not plain.get(_index(index)):
            transforms = ("an order of elements that is not row-major",)
        homes[_index(index)] = Item(file, start, nbytes, transforms, is_bare)
    return homes


def _index(index: object) -> tuple[str, Shape | None]:
    """The name and the first element of a part; None for a value."""
    place = _fields(index, f"{_METADATA} MetadataIndex")
    at = place.get("offset")
    return place["fqn"], None if at is None else shape_of(at)


def _is_plain(header: object) -> bool:
    """Whether a header is that of a tensor whose elements lie in row-major order from the beginning of its item on."""
    if not isinstance(header, bytes):
        return False
    tensor = unpickled(header, ARCHIVE_GLOBALS, persistent=persistent)
    return isinstance(tensor, PickledTensor) and tensor.first == 0 and is_row_major(tensor)


def _home(name: str, at: Shape | None, homes: Mapping[tuple[str, Shape | None], Item]) -> Item:
    item = homes.get((name, at))
    if item is None:
        where = "" if at is None else f" at {list(at)}"
        raise PickleError(f"{name!r:.200}{where} is in no file")
    return item


def _tensor(
    name: str, path: StatePath, entry: Mapping[str, Any], homes: Mapping[tuple[str, Shape | None], Item]
) -> DcpTensor:
    properties = entry["properties"]
    if not isinstance(properties, PickledObject) or not isinstance(properties.state, tuple) or not properties.state:
        raise PickleError(f"tensor {name!r:.200} has no properties")
    dtype = properties.state[0]
    if not isinstance(dtype, TorchValue) or dtype.text not in DTYPES:
        raise PickleError(f"tensor {name!r:.200} has no known dtype")
    parts = []
    for chunk in entry["chunks"]:
        fields = _fields(chunk, f"{_METADATA} ChunkStorageMetadata")
        box = Box(shape_of(fields["offsets"]), shape_of(fields["sizes"]))
        parts.append((box, _home(name, box.start, homes)))
    return DcpTensor(path, TensorItems(dtype.text, shape_of(entry["size"]), parts))
