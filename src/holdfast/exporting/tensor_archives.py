"""Zip archives as ``torch.save`` writes them, around the bytes of tensors that are not there yet."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, cast

import torch

from holdfast.exporting.chosen_tensors import ExportTensor
from holdfast.exporting.element_source import GivenSegment, Segment, TensorSegment
from holdfast.exporting.new_folder import NewFile, Trailer
from holdfast.geometry import Box, Shape, whole

#: Where the bytes of a tensor begin in a file: at multiples of this.
_ALIGNMENT: Final = 64
_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_DESCRIPTOR, _LARGE_DESCRIPTOR = struct.Struct("<IIII"), struct.Struct("<IIQQ")
_CENTRAL: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_END, _LARGE_END = struct.Struct("<IHHHHIIH"), struct.Struct("<IQHHIIQQQQ")
_LOCATOR: Final = struct.Struct("<IIQI")
_EXTRA: Final = struct.Struct("<2sH")
#: The checksum and the sizes stand behind the bytes.
_SIZES_BEHIND: Final = 8
#: The greatest size and offset, and the greatest number of entries, in the old form of the format. Each of these fields
#: that is too small has all bits set, and another field has the number, in the form of 64 bits ("zip64").
_MOST_NBYTES: Final = 0xFFFFFFFE
_MOST_ENTRIES: Final = 0xFFFE
_ELSEWHERE, _MANY = 0xFFFFFFFF, 0xFFFF
_ZIP64: Final = b"\x01\x00"
#: The version of the format that readers of the form of 64 bits need.
_LARGE_VERSION: Final = 45
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


class ArchivedTensor(NamedTuple):
    """A part of a tensor, as a tensor of its own inside the object that an archive holds."""

    tensor: ExportTensor
    box: Box

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.box.numel * self.tensor.itemsize


def whole_tensor(tensor: ExportTensor) -> ArchivedTensor:
    """All of a tensor."""
    return ArchivedTensor(tensor, whole(tensor.shape))


class _PickledByName:
    """An object of a class that is not there: a pickle has the name of the class."""


def named_object(module: str, name: str, fields: Mapping[str, object]) -> object:
    """An object for an archive that readers see as one of class `name` of `module`, with these attributes."""
    made = type(name, (_PickledByName,), {"__module__": module})()
    vars(made).update(fields)
    return made


def archive_file(name: str, value: object) -> NewFile:
    """The file that ``torch.save(value)`` writes, with the tensors that `ArchivedTensor` stands for in `value`."""
    archive = TensorArchive(value, start=0)
    return NewFile(name, b"", archive.segments, archive.trailers)


def archived(value: object) -> bytes:
    """The content of the file that ``torch.save(value)`` writes, for a value that holds no `ArchivedTensor`."""
    (segment,) = TensorArchive(value, start=0).segments
    assert isinstance(segment, GivenSegment)
    return segment.data


class _ArchivedFile(NamedTuple):
    """A file in an archive: where its header lies, and what the directory says of it."""

    name: str
    offset: int
    nbytes: int
    checksum: int
    flags: int

    def central(self) -> bytes:
        name = self.name.encode("ascii")
        large = [number for number in (self.nbytes, self.nbytes, self.offset) if number > _MOST_NBYTES]
        extra = _EXTRA.pack(_ZIP64, 8 * len(large)) + struct.pack(f"<{len(large)}Q", *large) if large else b""
        sizes = self.checksum, _short(self.nbytes), _short(self.nbytes), len(name), len(extra)
        version = _LARGE_VERSION if large else 0
        head = (0x02014B50, version, version, self.flags, 0, 0, 0)
        return _CENTRAL.pack(*head, *sizes, 0, 0, 0, 0, _short(self.offset)) + name + extra

    def descriptor(self) -> bytes:
        kind = _LARGE_DESCRIPTOR if self.nbytes > _MOST_NBYTES else _DESCRIPTOR
        return kind.pack(0x08074B50, self.checksum, self.nbytes, self.nbytes)


class TensorArchive:
    """The archive of `value`, which may hold each `ArchivedTensor`, to lie at `start` of a file's data: its `segments`
    there, its `trailers`, and its `length` in bytes."""

    def __init__(self, value: object, *, start: int) -> None:
        self._start = start
        self._entries: list[_ArchivedFile] = []
        #: The entries of tensors, by their place among all entries, and the place of the bytes of each in the file.
        self._tensors: list[int] = []
        self._data: list[int] = []
        self._nbytes = 0
        self.segments: list[Segment] = []
        self.trailers: list[Trailer] = []
        data, tensors = _pickled(value)
        files = [("data.pkl", data), ("byteorder", b"little"), ("version", b"3\n")]
        files += [(f"data/{number}", part) for number, part in enumerate(tensors) if isinstance(part, bytes)]
        stored = {number: part for number, part in enumerate(tensors) if isinstance(part, ArchivedTensor)}
        known = b"".join(self._known(f"archive/{name}", content, before) for name, content, before in _placed(files))
        if not stored:
            self._add(known + self._directory(self._entries, len(known)))
            return
        for number, part in stored.items():
            is_first = not self._tensors
            begun = self._begin(f"archive/data/{number}", part.nbytes, len(known) if is_first else self._behind)
            if is_first:
                self._add(known + begun)
            else:
                self._follow(begun)
            self._data.append(self._start + self._nbytes)
            if part.nbytes:
                self.segments.append(TensorSegment(self._start + self._nbytes, part.tensor, part.box))
                self._nbytes += part.nbytes
        self._finish()

    @property
    def length(self) -> int:
        """Bytes of the whole archive."""
        return self._nbytes

    @property
    def _behind(self) -> int:
        """The offset of the next entry, which begins behind the descriptor of the last tensor."""
        return self._nbytes + len(self._entries[-1].descriptor())

    def _known(self, name: str, content: bytes, offset: int) -> bytes:
        """An entry whose content is known."""
        entry = _ArchivedFile(name, offset, len(content), zlib.crc32(content), 0)
        self._entries.append(entry)
        sizes = entry.checksum, len(content), len(content), len(name), 0
        return _LOCAL.pack(0x04034B50, 0, 0, 0, 0, 0, *sizes) + name.encode("ascii") + content

    def _begin(self, name: str, nbytes: int, offset: int) -> bytes:
        """The header of the entry of a tensor; a field of padding aligns its bytes."""
        self._tensors.append(len(self._entries))
        self._entries.append(_ArchivedFile(name, offset, nbytes, 0, _SIZES_BEHIND))
        is_large = nbytes > _MOST_NBYTES
        extra = _EXTRA.pack(_ZIP64, 16) + struct.pack("<QQ", nbytes, nbytes) if is_large else b""
        room = _LOCAL.size + len(name) + len(extra) + _EXTRA.size
        padding = -(self._start + offset + room) % _ALIGNMENT
        extra += _EXTRA.pack(b"FB", padding) + bytes(padding)
        size = _ELSEWHERE if is_large else 0
        sizes = 0, size, size, len(name), len(extra)
        version = _LARGE_VERSION if is_large else 0
        return _LOCAL.pack(0x04034B50, version, _SIZES_BEHIND, 0, 0, 0, *sizes) + name.encode("ascii") + extra

    def _add(self, data: bytes) -> None:
        self.segments.append(GivenSegment(self._start + self._nbytes, data))
        self._nbytes += len(data)

    def _follow(self, header: bytes) -> None:
        """Add the descriptor of the tensor before, which has its checksum, and the header of the next one."""
        entry = self._entries[self._tensors[-2]]

        def made(checksums: Sequence[int]) -> bytes:
            return entry._replace(checksum=checksums[0]).descriptor() + header

        self.trailers.append(Trailer(self._start + self._nbytes, (self._data[-1],), made))
        self._add(bytes(len(made([0]))))

    def _finish(self) -> None:
        """Add the descriptor of the last tensor and the directory, which has all checksums."""
        behind = self._behind

        def made(checksums: Sequence[int]) -> bytes:
            entries = list(self._entries)
            for at, checksum in zip(self._tensors, checksums, strict=True):
                entries[at] = entries[at]._replace(checksum=checksum)
            return entries[-1].descriptor() + self._directory(entries, behind)

        self.trailers.append(Trailer(self._start + self._nbytes, tuple(self._data), made))
        self._add(bytes(len(made([0] * len(self._data)))))

    @staticmethod
    def _directory(entries: Sequence[_ArchivedFile], offset: int) -> bytes:
        """The directory of the archive, which lies at `offset` of it, and the end."""
        directory, number = b"".join(entry.central() for entry in entries), len(entries)
        large = b""
        if max(offset, len(directory)) > _MOST_NBYTES or number > _MOST_ENTRIES:
            versions = (_LARGE_VERSION, _LARGE_VERSION)
            large = _LARGE_END.pack(0x06064B50, 44, *versions, 0, 0, number, number, len(directory), offset)
            large += _LOCATOR.pack(0x07064B50, 0, offset + len(directory), 1)
        short = number if number <= _MOST_ENTRIES else _MANY
        sizes = _short(len(directory)), _short(offset)
        return directory + large + _END.pack(0x06054B50, 0, 0, short, short, *sizes, 0)


def _placed(files: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes, int]]:
    """The name and content of each of the first entries, and where it begins."""
    nbytes = (_LOCAL.size + len(f"archive/{name}") + len(content) for name, content in files)
    return [(*file, offset) for file, offset in zip(files, accumulate(nbytes, initial=0), strict=False)]


def _short(number: int) -> int:
    """A size or an offset in a field of 32 bits."""
    return number if number <= _MOST_NBYTES else _ELSEWHERE


class _StorageStub(NamedTuple):
    """The storage of a tensor, which an archive has as an entry of its own."""

    reference: tuple[str, object, str, str, int]


class _ArchivePickler(pickle._Pickler):  # noqa: SLF001 - only the one in Python can name a class that is not there
    """A pickler that puts the calls that rebuild a tensor in place of each `ArchivedTensor` and of each live tensor.

    `tensors` gets the content of each storage, by its number.
    """

    write: Callable[[bytes], object]
    memoize: Callable[[object], object]

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=2)
        self._numbers: dict[tuple[str, Box], int] = {}
        self.tensors: list[ArchivedTensor | bytes] = []

    def persistent_id(self, item: object) -> object:
        return item.reference if isinstance(item, _StorageStub) else None

    def reducer_override(self, item: object) -> Any:
        if isinstance(item, ArchivedTensor):
            # Equal parts share a storage.
            number = self._numbers.setdefault((item.tensor.name, item.box), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(item)
            return _rebuilt(item.tensor.dtype, item.box.size, number, item.nbytes)
        if isinstance(item, torch.Tensor):
            data = item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            self.tensors.append(data)
            dtype = str(item.dtype).removeprefix("torch.")
            return _rebuilt(dtype, tuple(item.shape), len(self.tensors) - 1, len(data))
        return NotImplemented

    def save_global(self, obj: Any, name: str | None = None) -> None:
        if isinstance(obj, type) and issubclass(obj, _PickledByName):
            self.write(f"c{obj.__module__}\n{obj.__name__}\n".encode("ascii"))
            self.memoize(obj)
        else:
            cast(Any, super()).save_global(obj, name)


def _rebuilt(dtype: str, shape: Shape, number: int, nbytes: int) -> tuple[object, tuple[object, ...]]:
    """The function and the arguments that rebuild a contiguous tensor with the storage of this number."""
    strides = tuple(accumulate(reversed(shape[1:]), lambda one, other: one * max(other, 1), initial=1))[::-1]
    hooks: OrderedDict[str, object] = OrderedDict()
    layout = (0, shape, strides if shape else (), False, hooks)
    kind = getattr(torch, dtype)
    if dtype in _STORAGES:
        reference = ("storage", getattr(torch, _STORAGES[dtype]), str(number), "cpu", nbytes // kind.itemsize)
        return torch._utils._rebuild_tensor_v2, (_StorageStub(reference), *layout)  # noqa: SLF001 - the format names it
    storage = _StorageStub(("storage", torch.UntypedStorage, str(number), "cpu", nbytes))
    return torch._utils._rebuild_tensor_v3, (storage, *layout, kind)  # noqa: SLF001 - the format names it


def _pickled(value: object) -> tuple[bytes, list[ArchivedTensor | bytes]]:
    """The pickle that ``torch.save`` writes for `value`, and the content of the storages in their order."""
    out = io.BytesIO()
    pickler = _ArchivePickler(out)
    pickler.dump(value)
    return out.getvalue(), pickler.tensors
