"""Folders of ``torch_checkpointing``: for each rank and item a file of ``torch.save``, with the rank's own tensors.

They can be put together only where an item was saved with a resharder: ``metadata.pkl`` then says how its tensors are
divided.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product
from math import prod
from typing import Any, Final, NamedTuple, cast

import msgspec
import numpy as np
import xxhash

from holdfast.decoding import decode_json
from holdfast.errors import HoldfastError, StateError
from holdfast.format.dtypes import DTYPES
from holdfast.format.names import component, join, rank_component, shown
from holdfast.format.values import MAX_DEPTH, leaf, same
from holdfast.geometry import Box, Shape
from holdfast.interop.deepspeed_layout import FlatParts
from holdfast.interop.deepspeed_table import TensorTable
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged, unreadable
from holdfast.interop.given_places import GivenPlaces
from holdfast.interop.pickle_machine import ForbiddenGlobalError, PickleError
from holdfast.interop.pickled_tree import CheckedNodes, PickledTree, RankParts, pickled_tree
from holdfast.interop.rank_records import (
    RANK_GLOBALS,
    ItemRecord,
    RankDivision,
    RankRecords,
    decode_records,
)
from holdfast.interop.strided_parts import behind, is_possible, is_row_major
from holdfast.interop.torch_archive import ArchiveError, ArchivePlace, TorchArchive, Windows
from holdfast.interop.torch_globals import PickledTensor
from holdfast.wording import count

_METADATA: Final = "metadata.pkl"
_MAX_METADATA_NBYTES: Final = 1 << 30
_MAX_JSON_NBYTES: Final = 256 << 20
#: Most boxes that one tensor is read in.
_MAX_PARTS: Final = 1 << 20
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
            records = decode_records(data).with_files(folder.names)
            merging = _Merging(records, *_read_files(folder, records))
            tree = pickled_tree("", merging.state())
        except ForbiddenGlobalError as error:
            raise unreadable(path, f"is refused: {error}, so the file may be an attack") from error
        except (PickleError, StateError) as error:
            raise damaged(path, f"is malformed: {error}") from error
        digest = xxhash.xxh3_128(data)
        for key, archive in merging.archives.items():
            digest.update(f"{key}\0{archive.digest()}\0".encode(errors="surrogateescape"))
        return ForeignState(
            folder,
            _places(folder, merging, tree),
            list(merging.archives),
            kind=TorchCheckpointingFormat.kind,
            identity=digest.hexdigest(),
            nodes=CheckedNodes(partial(tree.open_nodes, partial(_refused, folder))),
            described_by=(_METADATA,),
        )


class _MergedTensor(NamedTuple):
    """A tensor in the files of ranks: each rank's own, and how they make up the whole; None for that of one rank."""

    tensors: Mapping[int, tuple[str, PickledTensor]]
    division: RankDivision | None


class _LostFileError(PickleError):
    """A rank has no file of an item that nothing but the files describes."""


class _Merging:
    """The state that the objects of all ranks make up."""

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
        #: The home of each tensor in the merged state, by the identity of the object that stands for it there.
        self.homes: dict[int, _MergedTensor] = {}
        self._standing: list[PickledTensor] = []

    def state(self) -> dict[str, object]:
        """The whole state."""
        return {
            key: self._merged(component(key), self._objects[key], record) for key, record in self._records.items.items()
        }

    def _merged(self, name: str, values: Mapping[int, object], record: ItemRecord, depth: int = 0) -> object:
        self._left -= len(values)
        if self._left < 0 or depth > MAX_DEPTH:
            raise PickleError("its objects refer to each other too often, or are nested too deeply")
        first = next(iter(values.values()), None)
        is_container = isinstance(first, dict) or type(first) in (list, tuple)
        if record.lost and not is_container:
            more = f", and {count(len(record.lost) - 1, 'more file')}" if len(record.lost) > 1 else ""
            return _LostFileError(f"{shown(record.lost[0]):.200} is missing{more}")
        if all(isinstance(value, PickledTensor) for value in values.values()):
            return self._tensor(name, cast("Mapping[int, PickledTensor]", values), record)
        if all(type(value) is type(first) for value in values.values()):
            if isinstance(first, dict):
                return self._dict(name, cast("Mapping[int, dict[object, object]]", values), record, depth)
            if type(first) in (list, tuple) and len({len(cast("list[object]", each)) for each in values.values()}) == 1:
                columns = cast("Mapping[int, Sequence[object]]", values)
                parts = [
                    self._merged(
                        join(name, str(at)), {rank: each[at] for rank, each in columns.items()}, record, depth + 1
                    )
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
        if division is None and (len(values) > 1 or 0 not in values):  # one for all ranks is of the first one
            if len(values) < self._records.world_size:
                return PickleError("nothing says how the tensors of the ranks make up one")
            own = {rank: self._stand(_MergedTensor({rank: held[rank]}, None)) for rank in values}
            return RankParts(own, self._records.world_size)
        return self._stand(_MergedTensor(held, division))

    def _stand(self, home: _MergedTensor) -> PickledTensor:
        """A tensor that stands for `home` in the merged state, and for nothing else."""
        _, tensor = next(iter(home.tensors.values()))
        self._standing.append(tensor._replace())
        self.homes[id(self._standing[-1])] = home
        return self._standing[-1]

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
        return archive.value(RANK_GLOBALS)
    except ForbiddenGlobalError as error:
        raise unreadable(folder.path(key), f"is refused: {error}, so the file may be an attack") from error
    except PickleError as error:
        raise unreadable(folder.path(key), f"cannot be read: {error}") from error
    except ArchiveError as error:
        raise damaged(folder.path(key), f"is malformed: {error}") from error


def _json(folder: ForeignFolder, key: str) -> object:
    try:
        return decode_json(folder.storage.read(key, limit=_MAX_JSON_NBYTES), Any)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise damaged(folder.path(key), f"is malformed ({error!s:.200})") from error


def _refused(folder: ForeignFolder, name: str, error: PickleError) -> HoldfastError:
    what = f"holds {shown(name):.200}, which cannot be read: {error}"
    if isinstance(error, _LostFileError):
        action = "Copy the file again. If that rank saved no such item, leave the item out with select=."
        return damaged(folder.location.url, what, action=action)
    action = "Leave it out with select=, or load it with torch_checkpointing and save it again as plain values."
    return unreadable(folder.location.url, what, action=action)


def _places(folder: ForeignFolder, merging: _Merging, tree: PickledTree) -> GivenPlaces:
    table = TensorTable(folder, merging.archives, list(merging.archives))
    for name, tensor in tree.tensors.items():
        home = merging.homes[id(tensor)]
        if home.division is None:
            ((key, own),) = home.tensors.values()
            table.whole(name, key, own)
            continue
        parts = home.division.parts()
        lost = [part.rank for part in parts if part.rank not in home.tensors]
        if lost:
            raise damaged(folder.location.url, f"has no part of {shown(name):.200} of rank {lost[0]}", tensor=name)
        chosen = [home.tensors[part.rank] for part in parts] or list(home.tensors.values())[:1]
        pieces = _pieces(folder, name, home.division, [own for _, own in chosen])
        table.cut(name, home.division.shape, [key for key, _ in chosen], [own for _, own in chosen], pieces)
    return table.places({})


def _pieces(folder: ForeignFolder, name: str, division: RankDivision, tensors: Sequence[PickledTensor]) -> FlatParts:
    """The boxes of a tensor in the local tensors of ranks, cut to boxes whose elements lie one after another."""
    starts: list[Shape] = []
    sizes: list[Shape] = []
    ranks: list[int] = []
    firsts: list[int] = []
    for number, (part, tensor) in enumerate(zip(division.parts(), tensors, strict=False)):
        axes = range(len(division.shape))
        needed = tuple(max(own.start[axis] + own.size[axis] for _, own in part.boxes) for axis in axes)
        if tensor.shape != needed or not is_row_major(tensor) or tensor.dtype != division.dtype:
            what = f"has a part of {shown(name):.200} of {tensor.dtype} and shape {list(tensor.shape)} (strides "
            what += f"{list(tensor.strides)}), where {division.dtype} and {list(needed)} are needed"
            raise damaged(folder.location.url, what, tensor=name)
        for whole, own in part.boxes:
            for run in contiguous_boxes(own, needed):
                starts.append(tuple(np.add(whole.start, np.subtract(run.box.start, own.start)).tolist()))
                sizes.append(run.box.size)
                ranks.append(number)
                firsts.append(run.first)
        if len(firsts) > _MAX_PARTS:
            what = f"divides {shown(name):.200} into too many rows"
            raise unreadable(folder.location.url, what)
    columns = (len(ranks), len(division.shape))
    return FlatParts(
        np.asarray(starts, np.int64).reshape(columns),
        np.asarray(sizes, np.int64).reshape(columns),
        np.asarray(ranks, np.int64),
        np.asarray(firsts, np.int64),
    )


class _ContiguousBox(NamedTuple):
    """A box whose elements lie one after another in a tensor, from element `first` on."""

    box: Box
    first: int


def contiguous_boxes(box: Box, shape: Shape) -> Iterator[_ContiguousBox]:
    """`box` of a tensor of this shape, cut into boxes whose elements lie one after another."""
    inner = len(shape)
    while inner and box.size[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)  # this axis may be cut, and all behind it are whole
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    for outer in product(*(range(extent) for extent in box.size[:inner])):
        start = (*(at + more for at, more in zip(box.start, outer, strict=False)), *box.start[inner:])
        size = (*(1 for _ in outer), *box.size[inner:])
        yield _ContiguousBox(Box(start, size), sum(at * stride for at, stride in zip(start, strides, strict=True)))
