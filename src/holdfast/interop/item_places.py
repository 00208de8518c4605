"""Tensors whose parts are items of files: ranges of bytes that hold an archive of ``torch.save``, or bare elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from math import prod
from typing import Final, NamedTuple

import numpy as np

from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import MAX_AXES, MAX_NUMEL
from holdfast.format.names import shown
from holdfast.geometry import Box, Int64s, Shape
from holdfast.interop.foreign_format import ForeignFolder, damaged, unreadable
from holdfast.interop.given_places import ForeignTensor, GivenPlaces, uncovered
from holdfast.interop.pickle_machine import UnreadTensorError
from holdfast.interop.torch_archive import ArchiveError, ArchivePlace, TorchArchive, Windows

#: Room for the end of an archive, its padding, and the beginning of the next; larger ones read bytes of large tensors.
_WINDOW_NBYTES: Final = 16 << 10


class Item(NamedTuple):
    """One item of a file: its first byte and its size. `transforms` names what its bytes were put through.

    It is an archive, or with `is_bare` the elements themselves. Where it has several parts, `stored` is the shape of
    the tensor in it, and `first` the part's first element there.
    """

    file: str
    start: int
    nbytes: int
    transforms: tuple[str, ...] = ()
    is_bare: bool = False
    stored: Shape | None = None
    first: int = 0


class TensorItems(NamedTuple):
    """A tensor, and its parts with the item of each."""

    dtype: str
    shape: Shape
    parts: Sequence[tuple[Box, Item]]


def item_places(
    folder: ForeignFolder, metadata: str, tensors: Sequence[tuple[str, TensorItems]], nbytes: Mapping[str, int]
) -> GivenPlaces:
    """The places of `tensors`, by name. `metadata` is the path of the file that describes them, for messages, and
    `nbytes` has the sizes of the files, in their order.

    Raises `CorruptError`, code ``corrupt.foreign``, for parts that do not make up their tensor, and for names that
    occur twice.
    """
    named = sorted(tensors, key=lambda pair: pair[0])
    numbers = {file: number for number, file in enumerate(nbytes)}
    checked = [_checked(metadata, name, tensor, numbers) for name, tensor in named]
    for (name, _), (following, _) in pairwise(named):
        if name == following:
            raise damaged(metadata, f"has {shown(name):.200} twice", tensor=name)
    return GivenPlaces(checked, list(nbytes.values()), _ItemOffsets(folder, named).find)


def _checked(path: str, name: str, tensor: TensorItems, numbers: Mapping[str, int]) -> ForeignTensor:
    """The parts of a tensor as columns. Refuses parts that do not make it up."""
    num_axes = len(tensor.shape)
    boxes = [box for box, _ in tensor.parts]
    extents = [*tensor.shape, *chain.from_iterable((*box.start, *box.size) for box in boxes), 0]
    if num_axes > MAX_AXES or max(extents) > MAX_NUMEL or prod(filter(None, tensor.shape)) > MAX_NUMEL:
        raise damaged(path, f"has {shown(name):.200} with an impossible shape", tensor=name)
    if any(len(box.size) != num_axes for box in boxes):
        raise damaged(path, f"has {shown(name):.200} with an impossible shape", tensor=name)
    starts = np.asarray([box.start for box in boxes], np.int64).reshape(len(boxes), num_axes)
    sizes = np.asarray([box.size for box in boxes], np.int64).reshape(len(boxes), num_axes)
    owners = np.asarray([numbers[item.file] for _, item in tensor.parts], np.int64)
    itemsize = DTYPES[tensor.dtype].itemsize
    if any(not _is_room(item, prod(box.size) * itemsize) for box, item in tensor.parts):
        raise damaged(path, f"has {shown(name):.200} with a part whose bytes do not fit its shape", tensor=name)
    made = ForeignTensor(name, tensor.dtype, tensor.shape, starts, sizes, owners)
    if (fault := uncovered(made)) is not None:
        raise damaged(path, f"is damaged: tensor {shown(name):.200} {fault}", tensor=name)
    return made


def _is_room(item: Item, nbytes: int) -> bool:
    """Whether an item can hold elements of so many bytes; an archive has more beside them."""
    return item.nbytes == nbytes if item.is_bare else item.nbytes >= nbytes


class _ItemOffsets:
    """The offsets of tensors' elements. Each is found when it is first asked for, in the archive of its item."""

    def __init__(self, folder: ForeignFolder, named: Sequence[tuple[str, TensorItems]]) -> None:
        self._folder = folder
        self._named = named
        self._windows = Windows(folder.storage, nbytes=_WINDOW_NBYTES)
        firsts = np.cumsum([0, *(len(tensor.parts) for _, tensor in named)])
        #: The number of the first part of each tensor, and the number of all parts.
        self._firsts: Int64s = firsts.astype(np.int64)
        self._offsets: Int64s = np.full(int(firsts[-1]), -1, np.int64)

    def find(self, file: int, numbers: Int64s) -> Int64s:
        """As `OffsetsOf`."""
        # In the order of the items in the file, so that its pages are read once.
        for number in sorted(numbers[self._offsets[numbers] < 0].tolist(), key=self._item_start):
            self._offsets[number] = self._found(number)
        found: Int64s = self._offsets[numbers]
        return found

    def _part(self, number: int) -> tuple[str, TensorItems, Box, Item]:
        at = int(np.searchsorted(self._firsts, number, side="right")) - 1
        name, tensor = self._named[at]
        return name, tensor, *tensor.parts[number - int(self._firsts[at])]

    def _item_start(self, number: int) -> int:
        return self._part(number)[3].start

    def _found(self, number: int) -> int:
        name, tensor, box, item = self._part(number)
        if item.is_bare:
            return item.start
        place = ArchivePlace(self._windows, item.file, item.start, item.nbytes)
        try:
            shape = box.size if item.stored is None else item.stored
            start = TorchArchive(place).tensor_offset(tensor.dtype, shape)
            return start + item.first * DTYPES[tensor.dtype].itemsize
        except UnreadTensorError as error:
            what = f"holds {shown(name):.200} in a form that holdfast does not read: {error}"
            action = (
                "Load the folder with the library that wrote it, and save that tensor again after "
                ".resolve_conj().contiguous()."
            )
            raise unreadable(self._folder.path(item.file), what, action=action) from error
        except ArchiveError as error:
            what = f"holds no {shown(name):.200} at byte {item.start}: {error}"
            raise damaged(self._folder.path(item.file), what, tensor=name) from error
