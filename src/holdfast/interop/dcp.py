"""Folders of ``torch.distributed.checkpoint`` (DCP), also where FSDP, Accelerate or torchtitan wrote them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, pairwise
from typing import Final

import numpy as np
import xxhash

from holdfast.errors import HoldfastError
from holdfast.format.manifest import MAX_AXES, MAX_NUMEL
from holdfast.format.names import shown
from holdfast.geometry import Int64s
from holdfast.interop.dcp_metadata import DcpMetadata, Item, TensorItems, decode_metadata, name_of
from holdfast.interop.dcp_values import dcp_nodes
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged, unreadable
from holdfast.interop.given_places import ForeignTensor, GivenPlaces, uncovered
from holdfast.interop.pickle_machine import ForbiddenGlobalError, PickleError
from holdfast.interop.torch_archive import ArchiveError, ArchivePlace, TorchArchive, Windows
from holdfast.wording import count

METADATA: Final = ".metadata"
_DATA_SUFFIX: Final = ".distcp"
_RANK_METADATA: Final = re.compile(r"__[0-9]+\.metadata")
_MAX_METADATA_NBYTES: Final = 4 << 30
_SHOWN: Final = 5


class DcpFormat:
    """Folders of DCP: a pickle ``.metadata``, and files in which each item is an archive of ``torch.save``."""

    kind: Final = "a folder of torch.distributed.checkpoint"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`; also a folder whose save did not finish."""
        return METADATA in names or any(name.endswith(_DATA_SUFFIX) for name in names)

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`. Reads the metadata alone."""
        path = folder.path(METADATA)
        if METADATA not in folder.names:
            raise _unfinished(folder)
        data = folder.storage.read(METADATA, limit=_MAX_METADATA_NBYTES)
        try:
            metadata = decode_metadata(data)
        except ForbiddenGlobalError as error:
            raise unreadable(path, f"is refused: {error}, so the file may be an attack") from error
        except PickleError as error:
            raise damaged(path, f"is malformed: {error}") from error
        files = sorted({item.file for item in _items(metadata)})
        nbytes = _sizes(folder, metadata, files)
        places = _places(folder, metadata, files, nbytes)
        return ForeignState(
            folder,
            places,
            files,
            kind=DcpFormat.kind,
            identity=xxhash.xxh3_128_hexdigest(data),
            nodes=dcp_nodes(folder, metadata),
        )


def _unfinished(folder: ForeignFolder) -> HoldfastError:
    path = folder.location.url
    if any(map(_RANK_METADATA.fullmatch, folder.names)):
        what = "was saved with use_collectives=False: each rank described its own part, and nothing describes the whole"
        return unreadable(path, what, action="Load it with dcp.load on the layout that saved it, and save that again.")
    return damaged(path, f"has no {METADATA}: its save did not finish", action="Use another checkpoint.")


def _items(metadata: DcpMetadata) -> chain[Item]:
    parts = (item for tensor in metadata.tensors.values() for _, item in tensor.parts)
    return chain(parts, (item for _, item in metadata.values.values()))


def _sizes(folder: ForeignFolder, metadata: DcpMetadata, files: Sequence[str]) -> list[int]:
    """The sizes of the data files. Refuses items that are outside their files, or cannot be read."""
    _check_missing(folder, metadata, files)
    needed: defaultdict[str, int] = defaultdict(int)
    for item in _items(metadata):
        needed[item.file] = max(needed[item.file], item.start + item.nbytes)
        if item.transforms:
            what = f"was written through {', '.join(item.transforms):.100}, which holdfast cannot undo"
            raise unreadable(folder.path(item.file), what)
    sizes = []
    for file in files:
        found = folder.storage.nbytes(file)
        if found is None or found < needed[file]:
            raise damaged(folder.path(file), f"is cut off: it has {found} bytes, and needs {needed[file]}")
        sizes.append(found)
    return sizes


def _check_missing(folder: ForeignFolder, metadata: DcpMetadata, files: Sequence[str]) -> None:
    missing = {file for file in files if file not in folder.names}
    if not missing:
        return
    lost = [name for name, tensor in metadata.tensors.items() if any(item.file in missing for _, item in tensor.parts)]
    lost += [name for name, (_, item) in metadata.values.items() if item.file in missing]
    total = len(metadata.tensors) + len(metadata.values)
    held = f"with all or a part of {len(lost)} of {total} entries"
    what = f"lacks {count(len(missing), 'file')} of {len(files)}, {held}"
    details = [f"{shown(file):.200} is missing" for file in sorted(missing)[:_SHOWN]]
    details += [f"{shown(name):.200} is not whole without it" for name in lost[:_SHOWN]]
    raise damaged(folder.location.url, what, action="Copy the missing files again.", details=details)


def _places(folder: ForeignFolder, metadata: DcpMetadata, files: Sequence[str], nbytes: Sequence[int]) -> GivenPlaces:
    numbers = {file: number for number, file in enumerate(files)}
    named = sorted(((name_of(tensor.path), tensor) for tensor in metadata.tensors.values()), key=lambda pair: pair[0])
    tensors = [_checked(folder, name, tensor, numbers) for name, tensor in named]
    for (name, _), (following, _) in pairwise(named):
        if name == following:
            raise damaged(folder.path(METADATA), f"has {shown(name):.200} twice", tensor=name)
    return GivenPlaces(tensors, nbytes, _ItemOffsets(folder, named).find)


def _checked(folder: ForeignFolder, name: str, tensor: TensorItems, numbers: Mapping[str, int]) -> ForeignTensor:
    """The parts of a tensor as columns. Refuses parts that do not make it up."""
    path, num_axes = folder.path(METADATA), len(tensor.shape)
    boxes = [box for box, _ in tensor.parts]
    extents = [*tensor.shape, *chain.from_iterable((*box.start, *box.size) for box in boxes), 0]
    if num_axes > MAX_AXES or max(extents) > MAX_NUMEL or any(len(box.size) != num_axes for box in boxes):
        raise damaged(path, f"has {shown(name):.200} with an impossible shape", tensor=name)
    starts = np.asarray([box.start for box in boxes], np.int64).reshape(len(boxes), num_axes)
    sizes = np.asarray([box.size for box in boxes], np.int64).reshape(len(boxes), num_axes)
    owners = np.asarray([numbers[item.file] for _, item in tensor.parts], np.int64)
    made = ForeignTensor(name, tensor.dtype, tensor.shape, starts, sizes, owners)
    if (fault := uncovered(made)) is not None:
        raise damaged(path, f"is damaged: tensor {shown(name):.200} {fault}", tensor=name)
    return made


class _ItemOffsets:
    """The offsets of tensors' elements. Each is found when it is first asked for, in the archive of its item."""

    def __init__(self, folder: ForeignFolder, named: Sequence[tuple[str, TensorItems]]) -> None:
        self._folder = folder
        self._named = named
        self._windows = Windows(folder.storage)
        firsts = np.cumsum([0, *(len(tensor.parts) for _, tensor in named)])
        #: The number of the first part of each tensor, and the number of all parts.
        self._firsts: Int64s = firsts.astype(np.int64)
        self._offsets: Int64s = np.full(int(firsts[-1]), -1, np.int64)

    def find(self, file: int, numbers: Int64s) -> Int64s:
        """As `OffsetsOf`."""
        for number in numbers[self._offsets[numbers] < 0].tolist():
            self._offsets[number] = self._found(number)
        found: Int64s = self._offsets[numbers]
        return found

    def _found(self, number: int) -> int:
        at = int(np.searchsorted(self._firsts, number, side="right")) - 1
        name, tensor = self._named[at]
        box, item = tensor.parts[number - int(self._firsts[at])]
        place = ArchivePlace(self._windows, item.file, item.start, item.nbytes)
        try:
            return TorchArchive(place).tensor_offset(tensor.dtype, box.size)
        except ArchiveError as error:
            what = f"holds no {shown(name):.200} at byte {item.start}: {error}"
            raise damaged(self._folder.path(item.file), what, tensor=name) from error
