"""The table of the tensors in DeepSpeed's files: the parts of each, and the places of their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from holdfast.format.dtypes import DTYPES
from holdfast.format.names import shown
from holdfast.geometry import Int64s, Shape
from holdfast.interop.deepspeed_layout import FlatParts, whole_piece
from holdfast.interop.foreign_format import ForeignFolder, damaged, unreadable
from holdfast.interop.given_places import ForeignTensor, GivenPlaces
from holdfast.interop.pickle_machine import UnreadTensorError
from holdfast.interop.torch_archive import ArchiveError, TorchArchive
from holdfast.interop.torch_globals import PickledTensor


class _Parts(NamedTuple):
    """A tensor with the source of each of its parts, and the part's first byte in that source."""

    tensor: ForeignTensor
    sources: Int64s
    firsts: Int64s


class TensorTable:
    """The tensors in the files `keys`, by the names that they get; `archives` are the opened files by their keys."""

    def __init__(self, folder: ForeignFolder, archives: Mapping[str, TorchArchive], keys: Sequence[str]) -> None:
        self._folder = folder
        self._archives = archives
        self._keys = keys
        self._numbers = {key: number for number, key in enumerate(keys)}
        self._tensors: dict[str, _Parts] = {}
        #: The file and the tensor in it that parts are cut from, and where its first element lies, once that is known.
        self._sources: list[tuple[str, PickledTensor]] = []
        self._known: dict[tuple[str, PickledTensor], int] = {}
        self._bases: dict[int, int] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def whole(self, name: str, key: str, tensor: PickledTensor) -> None:
        """Add a tensor that lies in one file."""
        self._add(name, tensor.shape, [key], [tensor], whole_piece(tensor.shape))

    def cut(
        self, name: str, shape: Shape, keys: Sequence[str], flats: Sequence[PickledTensor], pieces: FlatParts
    ) -> None:
        """Add a tensor whose `pieces` are in the flat tensors of the ranks, which lie in the files `keys`."""
        for key, flat in zip(keys, flats, strict=True):
            if flat.dtype != flats[0].dtype:
                what = f"holds {shown(name):.200} as {flat.dtype}, and the file of rank 0 as {flats[0].dtype}"
                raise damaged(self._folder.path(key), what, tensor=name)
        self._add(name, shape, keys, flats, pieces)

    def bytes_of(self, key: str, tensor: PickledTensor) -> bytes:
        """The elements of a small tensor."""
        return self.elements(key, tensor, 0, prod(tensor.shape))

    def elements(self, key: str, tensor: PickledTensor, first: int, numel: int) -> bytes:
        """The bytes of some elements of a tensor, in row-major order."""
        itemsize = DTYPES[tensor.dtype].itemsize
        start = self._base(self._source(key, tensor)) + first * itemsize
        return self._folder.storage.read(key, start=start, nbytes=numel * itemsize)

    def places(self, aliases: Mapping[str, str]) -> GivenPlaces:
        """The table as what the planner and the reader need."""
        ordered = [self._tensors[name] for name in sorted(self._tensors)]
        nothing = np.zeros(0, np.int64)
        sources = np.concatenate([nothing, *(parts.sources for parts in ordered)])
        firsts = np.concatenate([nothing, *(parts.firsts for parts in ordered)])

        def offsets_of(_: int, numbers: Int64s) -> Int64s:
            chosen, at = np.unique(sources[numbers], return_inverse=True)
            bases = np.asarray([self._base(source) for source in chosen.tolist()], np.int64)
            found: Int64s = bases[at] + firsts[numbers]
            return found

        nbytes = [self._folder.storage.nbytes(key) or 0 for key in self._keys]
        return GivenPlaces([parts.tensor for parts in ordered], nbytes, offsets_of, aliases=aliases)

    def _add(
        self, name: str, shape: Shape, keys: Sequence[str], tensors: Sequence[PickledTensor], pieces: FlatParts
    ) -> None:
        if name in self._tensors:
            raise damaged(
                self._folder.path(keys[0]), f"holds {shown(name):.200}, which another file holds too", tensor=name
            )
        sources = np.asarray([self._source(key, tensor) for key, tensor in zip(keys, tensors, strict=True)], np.int64)
        files = np.asarray([self._numbers[key] for key in keys], np.int64)
        foreign = ForeignTensor(name, tensors[0].dtype, shape, pieces.starts, pieces.sizes, files[pieces.ranks])
        itemsize = DTYPES[tensors[0].dtype].itemsize
        self._tensors[name] = _Parts(foreign, sources[pieces.ranks], pieces.firsts * itemsize)

    def _source(self, key: str, tensor: PickledTensor) -> int:
        source = key, tensor
        if source not in self._known:
            self._known[source] = len(self._sources)
            self._sources.append(source)
        return self._known[source]

    def _base(self, source: int) -> int:
        """The offset of a source's first element in its file. It is looked up when it is first asked for."""
        if source not in self._bases:
            key, tensor = self._sources[source]
            try:
                self._bases[source] = self._archives[key].elements_offset(tensor)
            except UnreadTensorError as error:
                raise unreadable(self._folder.path(key), f"holds a tensor that cannot be read: {error}") from error
            except ArchiveError as error:
                raise damaged(self._folder.path(key), f"holds a tensor that cannot be read: {error}") from error
        return self._bases[source]
