"""Folders of ``torch_checkpointing``: for each rank and item a file of ``torch.save``, with the rank's own tensors.

They can be put together only where an item was saved with a resharder: ``metadata.pkl`` then says how its tensors are
divided.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np
import xxhash

from holdfast.decoding import decode_json
from holdfast.errors import HoldfastError, StateError
from holdfast.format.dtypes import DTYPES
from holdfast.format.names import component, join, rank_component, shown
from holdfast.format.values import MAX_DEPTH, Node, Open, leaf, same
from holdfast.interop.deepspeed_layout import FlatParts, whole_piece
from holdfast.interop.deepspeed_table import TensorTable
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged, unreadable
from holdfast.interop.pickle_machine import Globals, PickleError
from holdfast.interop.pickled_tree import CheckedNodes, RankParts, pickled_tree
from holdfast.interop.rank_records import Division, ItemRecord, RankRecords, decode_records, local_tensor_of
from holdfast.interop.strided_parts import behind, is_possible, is_row_major
from holdfast.interop.torch_archive import ArchiveError, ArchivePlace, TorchArchive, Windows
from holdfast.interop.torch_globals import ARCHIVE_GLOBALS, PickledTensor
from holdfast.wording import count

_METADATA: Final = "metadata.pkl"
_MAX_METADATA_NBYTES: Final = 1 << 30
_MAX_JSON_NBYTES: Final = 256 << 20
#: Most objects in the files of all ranks: a pickle can name one object many times.
_MAX_OBJECTS: Final = 1 << 24
_SHOWN: Final = 5
_SUBCLASS: Final = "torch._tensor _rebuild_from_type_v2"


class TorchCheckpointingFormat:
    """Folders that a ``CheckpointManager`` of torch_checkpointing 0.1 wrote, with a resharder."""

    kind: Final = "a folder of torch_checkpointing"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`."""
        return _METADATA in names

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`. Reads the metadata, and the pickle and the directory of each file."""
        path = folder.path(_METADATA)
        data = folder.storage.read(_METADATA, limit=_MAX_METADATA_NBYTES)
        try:
            records = decode_records(data)
            merging = _Merging(records, *_read_files(folder, records))
            tree = pickled_tree("", merging.state())
        except (PickleError, StateError) as error:
            raise damaged(path, f"is malformed: {error}") from error
        nodes: dict[str, Node | HoldfastError] = {
            name: _refused(folder, name, node) if isinstance(node, PickleError) else node
            for name, node in tree.nodes.items()
        }
        nodes[""] = Open("dict")
        digest = xxhash.xxh3_128(data)
        for key, archive in merging.archives.items():
            digest.update(f"{key}\0{archive.digest()}\0".encode(errors="surrogateescape"))
        return ForeignState(
            folder,
            _table(folder, merging).places({}),
            list(merging.archives),
            kind=TorchCheckpointingFormat.kind,
            identity=digest.hexdigest(),
            nodes=CheckedNodes(partial(dict, nodes)),
        )


class _Home(NamedTuple):
    """A tensor in the files of ranks: each rank's own, and how they make up the whole; None for that of one rank."""

    tensors: Mapping[int, tuple[str, PickledTensor]]
    division: Division | None


class _Merging:
    """The state that the objects of all ranks make up; `tensors` finds its tensors, by name."""

    def __init__(
        self,
        records: RankRecords,
        archives: Mapping[str, TorchArchive],
        objects: Mapping[str, Mapping[int, object]],
    ) -> None:
        self._records = records
        self._objects = objects
        self._left = _MAX_OBJECTS
        self.archives = archives
        self.tensors: dict[str, _Home] = {}

    def state(self) -> dict[str, object]:
        """The whole state."""
        return {key: self._merged(component(key), values, record) for key, values, record in self._items()}

    def _items(self) -> Sequence[tuple[str, Mapping[int, object], ItemRecord]]:
        return [(key, self._objects[key], record) for key, record in self._records.items.items()]

    def _merged(self, name: str, values: Mapping[int, object], record: ItemRecord, depth: int = 0) -> object:
        self._left -= len(values)
        if self._left < 0 or depth > MAX_DEPTH:
            raise PickleError("its objects refer to each other too often, or are nested too deeply")
        first = next(iter(values.values()), None)
        if all(isinstance(value, PickledTensor) for value in values.values()):
            return self._tensor(name, cast("Mapping[int, PickledTensor]", values), record)
        if all(type(value) is type(first) for value in values.values()):
            if isinstance(first, dict):
                return self._dict(name, cast("Mapping[int, dict[object, object]]", values), record, depth)
            if type(first) in (list, tuple) and len({len(cast("list[object]", each)) for each in values.values()}) == 1:
                columns = cast("Mapping[int, Sequence[object]]", values)
                parts = [
                    self._merged(join(name, str(at)), {rank: each[at] for rank, each in columns.items()}, record, depth + 1)
                    for at in range(len(columns[next(iter(columns))]))
                ]
                return parts if isinstance(first, list) else tuple(parts)
        if all(_is_same(first, value) for value in values.values()):
            return first
        if len(values) < self._records.world_size:
            return PickleError("some ranks have other values than others, and some have none")
        return RankParts(
            {
                rank: self._merged(join(name, rank_component(rank)), {rank: value}, record, depth + 1)
                for rank, value in values.items()
            },
            self._records.world_size,
        )

    def _dict(
        self, name: str, values: Mapping[int, dict[object, object]], record: ItemRecord, depth: int
    ) -> dict[object, object]:
        keys = dict.fromkeys(chain.from_iterable(values.values()))
        first = next(iter(values.values()))
        merged = {
            key: self._merged(
                join(name, component(key)),
                {rank: held[key] for rank, held in values.items() if key in held},
                record,
                depth + 1,
            )
            for key in keys
        }
        return merged if type(first) is dict else type(first)(merged)

    def _tensor(self, name: str, values: Mapping[int, PickledTensor], record: ItemRecord) -> object:
        division = record.divisions.get(name.partition("/")[2])
        held = {rank: (record.files[rank][0], tensor) for rank, tensor in values.items()}
        for key, tensor in held.values():
            self._check(name, key, tensor)
        if division is None and len(values) > 1:
            if len(values) < self._records.world_size:
                return PickleError("nothing says how the tensors of the ranks make up one")
            for rank in values:
                self.tensors[join(name, rank_component(rank))] = _Home({rank: held[rank]}, None)
            return RankParts(values, self._records.world_size)
        self.tensors[name] = _Home(held, division)
        return next(iter(values.values()))

    def _check(self, name: str, key: str, tensor: PickledTensor) -> None:
        if not is_possible(tensor):
            raise PickleError(f"{key!r:.200} has {shown(name):.200} with an impossible shape")
        needed, nbytes = behind(tensor) * DTYPES[tensor.dtype].itemsize, 0
        try:
            nbytes = self.archives[key].storage_nbytes(tensor.storage.key)
        except ArchiveError as error:
            raise PickleError(f"{key!r:.200}: {error}") from error
        if needed > nbytes:
            raise PickleError(f"the storage of {shown(name):.200} in {key!r:.200} is cut off")


def _is_same(one: object, other: object) -> bool:
    """Whether two ranks have the same plain value."""
    if one is other:
        return True
    mine, theirs = leaf(one), leaf(other)
    if mine is not None and theirs is not None:
        return same(mine, theirs)
    return type(one) is type(other) and bool(one == other)


def _read_files(
    folder: ForeignFolder, records: RankRecords
) -> tuple[dict[str, TorchArchive], dict[str, dict[int, object]]]:
    """The archives by their files, and the objects of each item by rank."""
    _check_files(folder, records)
    archives: dict[str, TorchArchive] = {}
    objects: dict[str, dict[int, object]] = {}
    for item, record in records.items.items():
        held = objects.setdefault(item, {})
        for rank, (key, form) in sorted(record.files.items()):
            if form == "TorchSerialization":
                held[rank] = _archived(folder, key, archives)
            elif form == "JsonSerialization":
                held[rank] = _json(folder, key)
            else:
                held[rank] = PickleError(f"it was written by {form!r:.60}, which holdfast does not read here")
    return archives, objects


def _check_files(folder: ForeignFolder, records: RankRecords) -> None:
    """Refuse a folder without some of its files."""
    keys = sorted({key for record in records.items.values() for key, _ in record.files.values()})
    missing = []
    for key in keys:
        if any(part in ("", ".", "..") for part in key.split("/")):
            raise PickleError(f"{key!r:.200} is no file in the folder")
        try:
            nbytes = folder.storage.nbytes(key)
        except ValueError as error:
            raise PickleError(f"{key!r:.200} is no file in the folder") from error
        if nbytes is None:
            missing.append(key)
    if missing:
        what = f"lacks {count(len(missing), 'file')} of {len(keys)}"
        details = [f"{shown(key):.200} is missing" for key in missing[:_SHOWN]]
        raise damaged(folder.location.url, what, action="Copy the missing files again.", details=details)


def _archived(folder: ForeignFolder, key: str, archives: dict[str, TorchArchive]) -> object:
    try:
        place = ArchivePlace(Windows(folder.storage, nbytes=4096), key, 0, folder.storage.nbytes(key) or 0)
        archive = archives[key] = TorchArchive(place)
        return archive.value(_GLOBALS, keep_unknown=True)
    except PickleError as error:
        raise unreadable(folder.path(key), f"cannot be read: {error}") from error
    except ArchiveError as error:
        raise damaged(folder.path(key), f"is malformed: {error}") from error


def _json(folder: ForeignFolder, key: str) -> object:
    try:
        return decode_json(folder.storage.read(key, limit=_MAX_JSON_NBYTES), Any)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise damaged(folder.path(key), f"is malformed ({error!s:.200})") from error


def _subclass(args: tuple[Any, ...]) -> object:
    """A DTensor as its local tensor, and any other tensor as in other archives."""
    local = local_tensor_of(args)
    if local is not None:
        return local
    make = ARCHIVE_GLOBALS[_SUBCLASS]
    assert callable(make)
    return make(args)


_GLOBALS: Final[Globals] = {**ARCHIVE_GLOBALS, _SUBCLASS: _subclass}


def _table(folder: ForeignFolder, merging: _Merging) -> TensorTable:
    table = TensorTable(folder, merging.archives, list(merging.archives))
    for name, home in merging.tensors.items():
        if home.division is None:
            ((key, tensor),) = home.tensors.values()
            table.whole(name, key, tensor)
            continue
        parts = home.division.parts()
        lost = [part.rank for part in parts if part.rank not in home.tensors]
        if lost:
            raise damaged(folder.location.url, f"has no part of {shown(name):.200} of rank {lost[0]}", tensor=name)
        chosen = [home.tensors[part.rank] for part in parts]
        pieces = _pieces(folder, name, home.division, [tensor for _, tensor in chosen])
        if not len(pieces.ranks):
            chosen = [next(iter(home.tensors.values()))]
        table.cut(name, home.division.shape, [key for key, _ in chosen], [tensor for _, tensor in chosen], pieces)
    return table


def _pieces(folder: ForeignFolder, name: str, division: Division, tensors: Sequence[PickledTensor]) -> FlatParts:
    """The boxes of a tensor in the local tensors of ranks, cut to boxes in row-major order."""
    if not division.shape:
        return whole_piece(())
    starts: list[Sequence[int]] = []
    sizes: list[Sequence[int]] = []
    ranks: list[int] = []
    firsts: list[int] = []
    for number, (part, tensor) in enumerate(zip(division.parts(), tensors, strict=True)):
        needed = tuple(max(box.start[axis] + box.size[axis] for _, box in part.boxes) for axis in range(len(tensor.shape)))
        if tensor.shape != needed or len(tensor.shape) != len(division.shape) or not is_row_major(tensor):
            what = f"has a part of {shown(name):.200} of shape {list(tensor.shape)}, strides {list(tensor.strides)}"
            raise damaged(folder.location.url, f"{what}, where {list(needed)} is needed", tensor=name)
        for whole, own in part.boxes:
            for offset, first, size in _rows(own.start, own.size, tensor):
                starts.append([at + more for at, more in zip(whole.start, offset, strict=True)])
                sizes.append(size)
                ranks.append(number)
                firsts.append(first)
    columns = (len(ranks), len(division.shape))
    return FlatParts(
        np.asarray(starts, np.int64).reshape(columns),
        np.asarray(sizes, np.int64).reshape(columns),
        np.asarray(ranks, np.int64),
        np.asarray(firsts, np.int64),
    )
