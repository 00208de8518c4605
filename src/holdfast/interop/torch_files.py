"""Files of ``torch.save``: single ones, also those of Lightning, and folders of ``pytorch_model*.bin``."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import prod
from typing import Final, NamedTuple

import numpy as np
import xxhash

from holdfast.errors import HoldfastError
from holdfast.format.dtypes import DTYPES
from holdfast.format.names import shown
from holdfast.format.values import Node
from holdfast.geometry import Int64s
from holdfast.interop.foreign_format import ForeignFolder, ForeignState, damaged, unreadable
from holdfast.interop.given_places import ForeignTensor, GivenPlaces
from holdfast.interop.pickle_machine import ForbiddenGlobalError, PickleError
from holdfast.interop.pickled_tree import CheckedNodes, PickledTree, pickled_tree
from holdfast.interop.strided_parts import StridedParts, behind, is_possible, strided_parts
from holdfast.interop.torch_archive import ArchiveError, ArchivePlace, TorchArchive, Windows
from holdfast.interop.torch_globals import PickledTensor
from holdfast.interop.torch_optimizers import optimizer_parts
from holdfast.interop.weight_files import INDEX_SUFFIX, check_index, find_weight_files

_SUFFIXES: Final = (".pt", ".pth", ".bin", ".ckpt", ".pt.tar", ".pth.tar")
#: The names of models in folders of transformers, diffusers, peft and accelerate.
_MODEL: Final = re.compile(r"(?:.+_)?model(?:-[0-9]{5}-of-[0-9]{5})?\.bin")
_FIRST: Final = "pytorch_model.bin"
_ZIP: Final = b"PK\x03\x04"
#: The first bytes of the format before torch 1.6: a pickle of a number.
_LEGACY: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
#: Most parts of all tensors of a file together, unless each is one.
_MAX_PARTS: Final = 1 << 20
#: Memory for the headers of an archive's entries: they lie far apart, so larger reads would be wasted.
_WINDOW_NBYTES: Final = 4096


class TorchFileFormat:
    """Files of ``torch.save`` since torch 1.6: zip archives of a pickle, and of the bytes of each storage."""

    kind: Final = "a file of torch.save"

    def recognises(self, names: Collection[str]) -> bool:
        """As `ForeignFormat.recognises`: a file by its ending, and a folder by the names of models."""
        if len(names) == 1 and next(iter(names)).endswith(_SUFFIXES):
            return True
        return any(name.endswith(".bin" + INDEX_SUFFIX) or _MODEL.fullmatch(name) for name in names)

    def open(self, folder: ForeignFolder) -> ForeignState:
        """As `ForeignFormat.open`. Reads the pickle and the directory of each file."""
        names = folder.names
        if len(names) > 1 or names[0].endswith(INDEX_SUFFIX):
            names = tuple(filter(_MODEL.fullmatch, names))
        files, index = find_weight_files(folder, names, first=_FIRST)
        saved = [_open_file(folder, file) for file in files]
        if index is not None:
            held = {(str(key), each.file) for each in saved for key in each.keys}
            check_index(folder, index, held)
        return _state(folder, saved)


class _SavedFile(NamedTuple):
    """One file: its size, its archive, the keys of the dict in it, and the tree of that."""

    file: str
    nbytes: int
    archive: TorchArchive
    keys: Collection[object]
    tree: PickledTree


class _SavedTensor(NamedTuple):
    """The file of a tensor, by its number, and its place in that."""

    file: int
    tensor: PickledTensor


def _open_file(folder: ForeignFolder, file: str) -> _SavedFile:
    path, storage = folder.path(file), folder.storage
    nbytes = storage.nbytes(file)
    if nbytes is None:
        raise damaged(path, "is missing")
    _check_beginning(path, storage.read(file, nbytes=min(nbytes, len(_LEGACY))))
    try:
        archive = TorchArchive(ArchivePlace(Windows(storage, nbytes=_WINDOW_NBYTES), file, 0, nbytes))
        value = archive.value()
        if not isinstance(value, dict):
            what = "holds something else than a dict, so its content has no names"
            raise unreadable(path, what, action="Save it again inside a dict, such as {'model': ...}.")
        # The root of a state is no optimizer, so one that is a whole file gets a name.
        tree = pickled_tree("", value if optimizer_parts(value) is None else {"optimizer": value})
        _check_tensors(archive, tree)
    except ForbiddenGlobalError as error:
        action = (
            "If you trust the file, load it with torch.load(weights_only=False), and save its tensors and plain "
            "values again."
        )
        raise unreadable(path, f"is refused: {error}, so the file may be an attack", action=action) from error
    except PickleError as error:
        raise unreadable(path, f"cannot be read: {error}") from error
    except ArchiveError as error:
        raise damaged(path, f"is malformed: {error}") from error
    return _SavedFile(file, nbytes, archive, value.keys(), tree)


def _check_beginning(path: str, beginning: bytes) -> None:
    """Refuse a file that is no archive, by its first bytes."""
    if beginning == _LEGACY:
        what = "is in the format that torch.save had before torch 1.6"
        raise unreadable(path, what, action="Load it with torch.load, and save it again with torch.save.")
    if not beginning.startswith(_ZIP):
        raise damaged(path, "is no file of torch.save: it is no zip archive")


def _check_tensors(archive: TorchArchive, tree: PickledTree) -> None:
    """Refuse tensors that are outside their storages. Raises `ArchiveError`."""
    for name, tensor in tree.tensors.items():
        if not is_possible(tensor):
            raise ArchiveError(f"its tensor {shown(name):.200} has an impossible shape")
        needed, held = behind(tensor) * DTYPES[tensor.dtype].itemsize, archive.storage_nbytes(tensor.storage.key)
        if needed > held:
            raise ArchiveError(f"the storage of {shown(name):.200} has {held} bytes, and its tensor needs {needed}")


def _state(folder: ForeignFolder, saved: Sequence[_SavedFile]) -> ForeignState:
    homes: dict[str, _SavedTensor] = {}
    nodes: dict[str, Node | HoldfastError] = {}
    digest = xxhash.xxh3_128()
    for number, each in enumerate(saved):
        digest.update(f"{each.file}\0{each.nbytes}\0{each.archive.digest()}\0".encode(errors="surrogateescape"))
        path = folder.path(each.file)
        for name, node in each.tree.open_nodes(partial(_refused, path)).items():
            if name and name in nodes:
                raise damaged(path, f"holds {shown(name):.200} a second time", tensor=name)
            nodes[name] = node
        homes.update((name, _SavedTensor(number, tensor)) for name, tensor in each.tree.tensors.items())
    aliases = _aliases(homes)
    whole: list[_DividedTensor] = []
    num_parts = 0
    for name in sorted(homes.keys() - aliases.keys()):
        file, tensor = homes[name]
        parts = strided_parts(tensor)
        if parts is None or num_parts + len(parts.firsts) > max(_MAX_PARTS, len(homes)):
            names = [name, *(alias for alias, of in aliases.items() if of == name)]
            aliases = {alias: of for alias, of in aliases.items() if of != name}
            nodes.update((each, _too_scattered(folder.path(saved[file].file), each, tensor)) for each in names)
            continue
        num_parts += len(parts.firsts)
        whole.append(_DividedTensor(name, homes[name], parts))
    places = GivenPlaces(
        [each.foreign() for each in whole],
        [each.nbytes for each in saved],
        _StorageOffsets(folder, saved, whole).find,
        aliases=aliases,
    )
    return ForeignState(
        folder,
        places,
        [each.file for each in saved],
        kind=TorchFileFormat.kind if len(saved) == 1 else "a folder of torch.save files",
        identity=digest.hexdigest(),
        nodes=CheckedNodes(partial(dict, nodes)),
    )


def _too_scattered(path: str, name: str, tensor: PickledTensor) -> HoldfastError:
    what = f"holds {shown(name):.200} in another order than row by row (strides {list(tensor.strides)})"
    action = "Load the file with torch.load, and save that tensor again after .contiguous()."
    return unreadable(path, what, action=action)


def _refused(path: str, name: str, error: PickleError) -> HoldfastError:
    action = "Leave it out with select=, or load the file with torch.load and save it again as plain values."
    return unreadable(path, f"holds {shown(name):.200}, which cannot be read: {error}", action=action)


def _aliases(homes: Mapping[str, _SavedTensor]) -> dict[str, str]:
    """For each tensor that has the same memory and form as another one, the first name of those."""
    alike: defaultdict[_SavedTensor, list[str]] = defaultdict(list)
    for name, home in homes.items():
        if prod(home.tensor.shape):
            alike[home].append(name)
    return {name: min(names) for names in alike.values() for name in names if name != min(names)}


class _DividedTensor(NamedTuple):
    """A tensor that is read, and its parts."""

    name: str
    saved: _SavedTensor
    parts: StridedParts

    def foreign(self) -> ForeignTensor:
        """The tensor with its parts in its file."""
        (file, tensor), parts = self.saved, self.parts
        files = np.full(len(parts.firsts), file, np.int64)
        return ForeignTensor(self.name, tensor.dtype, tensor.shape, parts.starts, parts.sizes, files)


class _StorageOffsets:
    """The offsets of the parts of tensors. Where the entry of a storage begins is read when it is first asked for."""

    def __init__(self, folder: ForeignFolder, saved: Sequence[_SavedFile], tensors: Sequence[_DividedTensor]) -> None:
        self._folder = folder
        self._saved = saved
        self._tensors = tensors
        nothing = np.zeros(0, np.int64)
        counts = [len(each.parts.firsts) for each in tensors]
        #: For each part, the number of its tensor, and its place in the storage in bytes.
        self._owners: Int64s = np.repeat(np.arange(len(tensors)), counts)
        firsts = (each.parts.firsts * DTYPES[each.saved.tensor.dtype].itemsize for each in tensors)
        self._firsts: Int64s = np.concatenate([nothing, *firsts])
        self._starts: dict[tuple[int, str], int] = {}

    def find(self, file: int, numbers: Int64s) -> Int64s:
        """As `OffsetsOf`."""
        needed, at = np.unique(self._owners[numbers], return_inverse=True)
        starts = np.asarray([self._start(file, owner) for owner in needed.tolist()], np.int64)
        found: Int64s = starts[at] + self._firsts[numbers]
        return found

    def _start(self, file: int, owner: int) -> int:
        """The offset of the storage of a tensor."""
        name, (_, tensor), _ = self._tensors[owner]
        key = file, tensor.storage.key
        start = self._starts.get(key)
        if start is None:
            try:
                start = self._starts[key] = self._saved[file].archive.storage_offset(tensor.storage.key)
            except ArchiveError as error:
                path = self._folder.path(self._saved[file].file)
                raise damaged(path, f"holds no {shown(name):.200}: {error}", tensor=name) from error
        return start
