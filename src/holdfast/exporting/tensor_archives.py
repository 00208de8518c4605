"""Zip archives as ``torch.save`` writes them, around the bytes of tensors that are not there yet."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple, cast

import torch

from holdfast.exporting.archive_entries import ArchivedFile, DirectoryTrailer, TensorTrailer, directory_of
from holdfast.exporting.chosen_tensors import ExportTensor
from holdfast.exporting.element_source import GivenSegment, Segment, TensorSegment
from holdfast.exporting.new_folder import NewFile, Trailer
from holdfast.geometry import Box, Shape, whole

#: Where the bytes of a tensor begin in a file: at multiples of this.
_ALIGNMENT: Final = 64
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


class TensorArchive:
    """The archive of `value`, which may hold each `ArchivedTensor`, to lie at `start` of a file's data: its `segments`
    there, its `trailers`, and its `length` in bytes."""

    def __init__(self, value: object, *, start: int) -> None:
        self._start = start
        self._entries: list[ArchivedFile] = []
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
        known = b""
        for name, content in files:
            entry, written = ArchivedFile.known(f"archive/{name}", content, len(known))
            self._entries.append(entry)
            known += written
        if not stored:
            self._add(known + directory_of(self._entries, len(known)))
            return
        for number, part in stored.items():
            is_first = not self._tensors
            offset = len(known) if is_first else self._behind
            entry, begun = ArchivedFile.of_tensor(f"archive/data/{number}", part.nbytes, offset, start=self._start)
            self._tensors.append(len(self._entries))
            self._entries.append(entry)
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

    def _add(self, data: bytes) -> None:
        self.segments.append(GivenSegment(self._start + self._nbytes, data))
        self._nbytes += len(data)

    def _follow(self, header: bytes) -> None:
        """Add the descriptor of the tensor before, which has its checksum, and the header of the next one."""
        self._put_off((self._data[-1],), TensorTrailer(self._entries[self._tensors[-2]], header))

    def _finish(self) -> None:
        """Add the descriptor of the last tensor and the directory, which has all checksums."""
        self._put_off(tuple(self._data), DirectoryTrailer(tuple(self._entries), tuple(self._tensors), self._behind))

    def _put_off(self, of: tuple[int, ...], make: Callable[[Sequence[int]], bytes]) -> None:
        """Add bytes that the checksums of the segments at `of` decide."""
        self.trailers.append(Trailer(self._start + self._nbytes, of, make))
        self._add(bytes(len(make([0] * len(of)))))


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
