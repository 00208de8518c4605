"""Zip archives as ``torch.save`` writes them for one tensor, around bytes that are not there yet."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, Final, NamedTuple

import torch

from holdfast.geometry import Shape

#: Where the bytes of a tensor begin in a file: at multiples of this.
_ALIGNMENT: Final = 64
_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_DESCRIPTOR: Final = struct.Struct("<IIII")
_CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_END: Final = struct.Struct("<IHHHHIIH")
_EXTRA: Final = struct.Struct("<2sH")
#: The checksum and the sizes stand behind the bytes.
_SIZES_BEHIND: Final = 8
_TENSOR: Final = "archive/data/0"
#: The storage classes of the dtypes that older versions of torch have; others are stored as bytes.
_STORAGES: Final[Mapping[str, str]] = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
}
#: Most bytes of a tensor in one archive: sizes are words of 32 bits, and readers hold all of an archive in memory.
MAX_NBYTES: Final = 512 << 20


class _ArchivedFile(NamedTuple):
    """A file in an archive: where its header lies, and what the directory says of it."""

    name: str
    offset: int
    nbytes: int
    checksum: int
    flags: int

    def central(self) -> bytes:
        name = self.name.encode("ascii")
        sizes = self.checksum, self.nbytes, self.nbytes, len(name)
        return _CENTRAL.pack(0x02014B50, 0, 0, self.flags, 0, 0, 0, *sizes, 0, 0, 0, 0, 0, self.offset) + name


class TensorArchive:
    """The archive of a tensor of `shape`, to lie at `start` of a file: `prefix`, `nbytes` bytes of the tensor, and
    `suffix_nbytes` bytes that `suffix` makes."""

    def __init__(self, dtype: str, shape: Shape, nbytes: int, *, start: int) -> None:
        assert nbytes <= MAX_NBYTES
        self._nbytes = nbytes
        self._entries: list[_ArchivedFile] = []
        self.prefix = b""
        for name, data in (("data.pkl", _pickled(dtype, shape, nbytes)), ("byteorder", b"little"), ("version", b"3\n")):
            self._add(f"archive/{name}", data)
        self._begin(start)
        self.suffix_nbytes = len(self.suffix(0))

    @property
    def length(self) -> int:
        """Bytes of the whole archive."""
        return len(self.prefix) + self._nbytes + self.suffix_nbytes

    def suffix(self, checksum: int) -> bytes:
        """The bytes behind those of the tensor, whose CRC-32 is `checksum`."""
        entries = [*self._entries[:-1], self._entries[-1]._replace(checksum=checksum)]
        directory = b"".join(entry.central() for entry in entries)
        behind = len(self.prefix) + self._nbytes + _DESCRIPTOR.size
        end = _END.pack(0x06054B50, 0, 0, len(entries), len(entries), len(directory), behind, 0)
        return _DESCRIPTOR.pack(0x08074B50, checksum, self._nbytes, self._nbytes) + directory + end

    def _add(self, name: str, data: bytes) -> None:
        entry = _ArchivedFile(name, len(self.prefix), len(data), zlib.crc32(data), 0)
        self._entries.append(entry)
        sizes = entry.checksum, len(data), len(data), len(name), 0
        self.prefix += _LOCAL.pack(0x04034B50, 0, 0, 0, 0, 0, *sizes) + name.encode("ascii") + data

    def _begin(self, start: int) -> None:
        """Begin the entry of the tensor; a field of padding aligns its bytes."""
        self._entries.append(_ArchivedFile(_TENSOR, len(self.prefix), self._nbytes, 0, _SIZES_BEHIND))
        room = _LOCAL.size + len(_TENSOR) + _EXTRA.size
        padding = -(start + len(self.prefix) + room) % _ALIGNMENT
        sizes = 0, 0, 0, len(_TENSOR), _EXTRA.size + padding
        self.prefix += _LOCAL.pack(0x04034B50, 0, 0, _SIZES_BEHIND, 0, 0, *sizes) + _TENSOR.encode("ascii")
        self.prefix += _EXTRA.pack(b"FB", padding) + bytes(padding)


class _StorageStub(NamedTuple):
    """The storage of a tensor, which an archive has as an entry of its own."""

    reference: tuple[str, object, str, str, int]


class _TensorStub(NamedTuple):
    """A tensor, as the call and the arguments that rebuild it."""

    rebuild: object
    arguments: tuple[object, ...]


class _TensorPickler(pickle.Pickler):
    def persistent_id(self, item: object) -> object:
        return item.reference if isinstance(item, _StorageStub) else None

    def reducer_override(self, item: object) -> Any:
        return (item.rebuild, item.arguments) if isinstance(item, _TensorStub) else NotImplemented


def _pickled(dtype: str, shape: Shape, nbytes: int) -> bytes:
    """The pickle that ``torch.save`` writes for a contiguous tensor."""
    strides = tuple(accumulate(reversed(shape[1:]), lambda one, other: one * max(other, 1), initial=1))[::-1]
    hooks: OrderedDict[str, object] = OrderedDict()
    layout = (0, shape, strides if shape else (), False, hooks)
    kind = getattr(torch, dtype)
    if dtype in _STORAGES:
        storage = _StorageStub(("storage", getattr(torch, _STORAGES[dtype]), "0", "cpu", nbytes // kind.itemsize))
        stub = _TensorStub(torch._utils._rebuild_tensor_v2, (storage, *layout))  # noqa: SLF001 - the format names it
    else:
        storage = _StorageStub(("storage", torch.UntypedStorage, "0", "cpu", nbytes))
        stub = _TensorStub(torch._utils._rebuild_tensor_v3, (storage, *layout, kind))  # noqa: SLF001 - the format names it
    out = io.BytesIO()
    _TensorPickler(out, protocol=2).dump(stub)
    return out.getvalue()
