"""The archives of values in Megatron's folders: ``common.pt``, and objects among the items of files."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Final

from holdfast.format.dtypes import DTYPES
from holdfast.geometry import whole
from holdfast.interop.foreign_format import ForeignFolder, damaged
from holdfast.interop.item_places import Item, TensorItems
from holdfast.interop.pickle_machine import PickleError
from holdfast.interop.torch_archive import ArchiveError, ArchivePlace, TorchArchive, Windows
from holdfast.interop.torch_globals import PickledTensor

_NUMBERS: Final[Mapping[str, str]] = {"float32": "<f", "float64": "<d", "int64": "<q", "int32": "<i"}


@dataclass(frozen=True)
class ObjectArchive:
    """An archive of values: its `content`, with tensors as descriptions, and with objects of unknown classes as names,
    which are refused where they are looked up."""

    archive: TorchArchive
    file: str
    windows: Windows
    content: object

    @staticmethod
    def open(folder: ForeignFolder, windows: Windows, item: Item) -> ObjectArchive:
        """Open the archive at `item`, and read its values. Raises `CorruptError` where it is malformed."""
        try:
            archive = TorchArchive(ArchivePlace(windows, item.file, item.start, item.nbytes))
            return ObjectArchive(archive, item.file, windows, archive.value(keep_unknown=True))
        except (ArchiveError, PickleError) as error:
            raise damaged(folder.path(item.file), f"is malformed at byte {item.start}: {error}") from error

    def items(self, tensor: PickledTensor) -> TensorItems:
        """A tensor of the archive as one part in the file."""
        nbytes = prod(tensor.shape) * DTYPES[tensor.dtype].itemsize
        item = Item(self.file, self.archive.elements_offset(tensor), nbytes, is_bare=True)
        return TensorItems(tensor.dtype, tensor.shape, [(whole(tensor.shape), item)])

    def read(self, tensor: PickledTensor, nbytes: int) -> bytes:
        """The first bytes of a tensor that has at least so many."""
        return self.windows.read(self.file, self.archive.elements_offset(tensor), nbytes)

    def number(self, value: object) -> object:
        """A tensor of one element as a number; anything else as it is."""
        if not isinstance(value, PickledTensor) or prod(value.shape) != 1 or value.dtype not in _NUMBERS:
            return value
        form = struct.Struct(_NUMBERS[value.dtype])
        return form.unpack(self.read(value, form.size))[0]
