"""The manifest of a torchsnapshot folder: the entries of all ranks, as one nested state.

A path in the manifest is the number of a rank and the keys from the root on. Entries that all ranks share are there
once, and the shards of a sharded tensor are in the entries of their ranks.
"""

from __future__ import annotations

import struct
from base64 import b64decode
from binascii import Error as Base64Error
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote

import msgspec

from holdfast.decoding import decode_json
from holdfast.errors import StateError
from holdfast.format.dtypes import DTYPES
from holdfast.format.values import MAX_DEPTH
from holdfast.geometry import Box, Shape
from holdfast.interop.item_places import Item, TensorItems
from holdfast.interop.pickle_machine import PickleError
from holdfast.interop.pickled_tree import RankParts, nodes_of

_CONTAINERS: Final = ("dict", "OrderedDict", "list")
_TENSORS: Final = ("Tensor", "ChunkedTensor", "ShardedTensor")
_VALUES: Final = ("int", "str", "bool", "bytes", "float")
_DOUBLE: Final = struct.Struct("<d")


class ManifestError(ValueError):
    """A manifest is malformed."""


class SnapshotEntry(msgspec.Struct, frozen=True):
    """One entry: a container, a tensor, an object with a file of its own, or a value."""

    type: str
    keys: tuple[str | int, ...] = ()
    location: str = ""
    serializer: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    replicated: bool = False
    byte_range: tuple[int, int] | None = None
    serialized_value: str = ""
    shards: tuple[SnapshotShard, ...] = ()
    chunks: tuple[SnapshotShard, ...] = ()


class SnapshotShard(msgspec.Struct, frozen=True):
    """A part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: SnapshotEntry


class _MetadataFile(msgspec.Struct):
    """The part of the metadata that is read."""

    world_size: int
    manifest: dict[str, SnapshotEntry]


class SnapshotManifest(NamedTuple):
    """The entries by their paths without a rank, each by its rank."""

    world_size: int
    entries: Mapping[str, Mapping[int, SnapshotEntry]]


def decode_snapshot(data: bytes) -> SnapshotManifest:
    """Decode the metadata of a snapshot. Raises `ManifestError` where it is malformed."""
    try:
        found = decode_json(data, _MetadataFile)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ManifestError(f"{error!s:.200}") from error
    entries: defaultdict[str, dict[int, SnapshotEntry]] = defaultdict(dict)
    for path, entry in found.manifest.items():
        rank, _, logical = path.partition("/")
        if not (rank.isdecimal() and len(rank) < 10 and int(rank) < found.world_size and logical):
            raise ManifestError(f"{path!r:.200} is no path of one of {found.world_size} ranks")
        if logical.count("/") >= MAX_DEPTH:
            raise ManifestError(f"{path!r:.200} is nested too deeply")
        entries[logical][int(rank)] = entry
    return SnapshotManifest(found.world_size, entries)


def locations(manifest: SnapshotManifest) -> list[str]:
    """The files that the entries name, sorted."""
    found: set[str] = set()
    for by_rank in manifest.entries.values():
        for entry in by_rank.values():
            found.update(each.tensor.location for each in (*entry.shards, *entry.chunks))
            found.update([entry.location] if entry.type in ("Tensor", "object") else [])
    return sorted(found)


def nested_state(
    manifest: SnapshotManifest, nbytes: Mapping[str, int], read: Callable[[SnapshotEntry], object]
) -> dict[str, object]:
    """The state, with `TensorItems` for tensors and `RankParts` for what each rank has for itself.

    `nbytes` are the sizes of the files, and `read` reads an object from its file. Raises `ManifestError`.
    """
    return _State(manifest, nbytes, read).root()


class _State:
    """The nested state under construction."""

    def __init__(
        self, manifest: SnapshotManifest, nbytes: Mapping[str, int], read: Callable[[SnapshotEntry], object]
    ) -> None:
        self._manifest = manifest
        self._nbytes = nbytes
        self._read = read
        #: The last component of each path, by the path of its container.
        self._below: defaultdict[str, list[str]] = defaultdict(list)
        for path in manifest.entries:
            above, _, last = path.rpartition("/")
            self._below[above].append(last)
        self._num_built = 0

    def root(self) -> dict[str, object]:
        state = {unquote(name): self._built(name) for name in self._below[""]}
        if self._num_built != len(self._manifest.entries):
            raise ManifestError("it has entries that belong to no container")
        return state

    def _built(self, path: str) -> object:
        by_rank = self._manifest.entries[path]
        self._num_built += 1
        kinds = {entry.type for entry in by_rank.values()}
        if kinds & set(_CONTAINERS):
            if len(kinds) > 1:
                raise ManifestError(f"{path!r:.200} is {' and '.join(sorted(kinds))} on different ranks")
            return self._list(path) if kinds == {"list"} else self._dict(path, by_rank)
        if kinds == {"ShardedTensor"}:
            return _guarded(lambda: self._sharded(path, list(by_rank.values())))
        shared = next((entry for entry in by_rank.values() if entry.replicated), None)
        if shared is not None:
            return self._leaf(path, shared)
        parts = {rank: self._leaf(path, entry) for rank, entry in by_rank.items()}
        first, *others = parts.values()
        if all(_is_same(first, other) for other in others):
            return first
        return RankParts(parts, self._manifest.world_size)

    def _list(self, path: str) -> list[object]:
        names = self._below[path]
        if set(names) != set(map(str, range(len(names)))):
            raise ManifestError(f"list {path!r:.200} lacks entries")
        return [self._built(f"{path}/{index}") for index in range(len(names))]

    def _dict(self, path: str, by_rank: Mapping[int, SnapshotEntry]) -> dict[str | int, object]:
        keys = dict.fromkeys(key for entry in by_rank.values() for key in entry.keys)
        names = {key: str(key).replace("%", "%25").replace("/", "%2F") for key in keys}
        if len(set(names.values())) != len(names):
            raise ManifestError(f"dict {path!r:.200} has two keys that look alike")
        held = set(self._below[path])
        items = {key: self._built(f"{path}/{name}") for key, name in names.items() if name in held}
        is_ordered = next(iter(by_rank.values())).type == "OrderedDict"
        return OrderedDict(items) if is_ordered else items

    def _leaf(self, path: str, entry: SnapshotEntry) -> object:
        if entry.type == "Tensor":
            whole = SnapshotShard((0,) * len(entry.shape), entry.shape, entry)
            return _guarded(lambda: self._tensor(path, entry.dtype, entry.shape, [whole]))
        if entry.type == "ChunkedTensor":
            return _guarded(lambda: self._tensor(path, entry.dtype, entry.shape, entry.chunks))
        if entry.type == "object":
            return self._read(entry)
        return _value(path, entry)

    def _sharded(self, path: str, entries: Sequence[SnapshotEntry]) -> TensorItems:
        """A tensor whose shape is given by its shards alone. Ranks may hold the same shard."""
        shards = {(each.offsets, each.sizes): each for entry in entries for each in entry.shards}
        if not shards or len({len(offsets) for offsets, _ in shards}) > 1:
            raise ManifestError(f"tensor {path!r:.200} has no shards of one number of axes")
        ends = [[a + b for a, b in zip(*shard, strict=False)] for shard in shards]
        shape = tuple(map(max, zip(*ends, strict=False)))
        first = next(iter(shards.values()))
        return self._tensor(path, first.tensor.dtype, shape, list(shards.values()))

    def _tensor(self, path: str, dtype: str, shape: Shape, shards: Sequence[SnapshotShard]) -> TensorItems:
        name = dtype.removeprefix("torch.")
        if name not in DTYPES:
            raise PickleError(f"its dtype {dtype:.40} is none that holdfast knows")
        numbers = [*shape, *(number for each in shards for number in (*each.offsets, *each.sizes))]
        if min(numbers, default=0) < 0:
            raise ManifestError(f"tensor {path!r:.200} has an impossible shape")
        parts = []
        for each in shards:
            if (each.tensor.dtype, each.tensor.shape) != (dtype, each.sizes) or len(each.offsets) != len(each.sizes):
                raise ManifestError(f"tensor {path!r:.200} has a part of another dtype or shape")
            parts.append((Box(each.offsets, each.sizes), self._item(path, each.tensor)))
        return TensorItems(name, shape, parts)

    def _item(self, path: str, entry: SnapshotEntry) -> Item:
        """The item of a part of a tensor. Refuses one outside its file."""
        if entry.serializer not in ("buffer_protocol", "torch_save"):
            raise PickleError(f"it was written by {entry.serializer!r:.40}, which holdfast does not read")
        nbytes = self._nbytes[entry.location]
        start, stop = entry.byte_range or (0, nbytes)
        if not 0 <= start <= stop <= nbytes:
            raise ManifestError(f"tensor {path!r:.200} has bytes {start} to {stop} of a file of {nbytes}")
        return Item(entry.location, start, stop - start, is_bare=entry.serializer == "buffer_protocol")


def _guarded(build: Callable[[], object]) -> object:
    """The result of `build`, or the reason why it cannot be read."""
    try:
        return build()
    except PickleError as error:
        return error


def _is_same(first: object, other: object) -> bool:
    """Whether two ranks have one value. Tensors are not compared: that would read them."""
    try:
        return nodes_of("", first) == nodes_of("", other)
    except (PickleError, StateError):
        return False


def _value(path: str, entry: SnapshotEntry) -> object:
    text = entry.serialized_value
    try:
        if entry.type == "int":
            return int(text)
        if entry.type == "bool":
            return {"True": True, "False": False}[text]
        if entry.type == "str":
            return text
        if entry.type == "bytes":
            return b64decode(text, validate=True)
        if entry.type == "float":
            (number,) = _DOUBLE.unpack(b64decode(text, validate=True))
            return number
    except (ValueError, KeyError, struct.error, Base64Error) as error:
        raise ManifestError(f"value {path!r:.200} is malformed") from error
    raise ManifestError(f"{path!r:.200} has the unknown type {entry.type!r:.40}")
