"""Archives that ``torch.save`` wrote, read by parts: the bytes of a tensor in them, and plain values.

An archive is a zip file of stored entries: a pickle, and the bytes of each storage. It may lie anywhere in a larger
file, as the items of DCP do.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections import deque
from functools import lru_cache
from itertools import pairwise
from math import prod
from threading import RLock
from typing import Any, Final, NamedTuple

import xxhash

from holdfast.format.dtypes import DTYPES
from holdfast.geometry import Shape
from holdfast.interop.pickle_machine import Globals, PickleError, UnreadTensorError, unpickled
from holdfast.interop.strided_parts import is_row_major
from holdfast.interop.torch_globals import ARCHIVE_GLOBALS, PickledTensor, persistent
from holdfast.store.base import Store

#: The pickle of a tensor has a few hundred bytes; a value may be as large as this.
_MAX_TENSOR_PICKLE_NBYTES: Final = 64 << 10
_MAX_PICKLE_NBYTES: Final = 256 << 20
_PAGE_NBYTES: Final = 4096
#: An archive is read at its end, then at its beginning.
_NUM_WINDOWS: Final = 4
_LOCAL_HEADER_NBYTES: Final = 30
#: The checksum of an entry that torch wrote with ``set_crc32_options(False)``.
_NO_CHECKSUM: Final = 0
#: The flag of an entry whose name is in UTF-8.
_UTF8: Final = 0x800


#: What `zipfile` raises for bytes that are no archive.
_NO_ZIP: Final = (
    zipfile.BadZipFile,
    zipfile.LargeZipFile,
    OSError,
    ValueError,
    NotImplementedError,
    OverflowError,
    struct.error,
)


class ArchiveError(ValueError):
    """An archive is malformed, or holds something else than was expected."""


class Windows:
    """Small reads from files of a store, by way of the windows that were read last: archives often lie side by side, so
    that the end of one and the beginning of the next are in one window.

    A window has `nbytes`. Safe for several threads.
    """

    def __init__(self, storage: Store, *, nbytes: int = 64 << 10) -> None:
        self._storage = storage
        self._nbytes = nbytes
        self._lock = RLock()
        #: The file, the first byte and the bytes of each window, the newest first.
        self._windows: deque[tuple[str, int, bytes]] = deque(maxlen=_NUM_WINDOWS)
        self._sizes: dict[str, int] = {}

    def read(self, key: str, start: int, nbytes: int) -> bytes:
        """Bytes of a file that has at least so many."""
        if nbytes > self._nbytes:
            return self._storage.read(key, start=start, nbytes=nbytes)
        with self._lock:
            for of, first, data in self._windows:
                if of == key and first <= start <= start + nbytes <= first + len(data):
                    return data[start - first : start - first + nbytes]
            low = start // _PAGE_NBYTES * _PAGE_NBYTES
            if key not in self._sizes:
                self._sizes[key] = self._storage.nbytes(key) or 0
            held = max(min(self._nbytes, self._sizes[key] - low), start + nbytes - low)
            data = self._storage.read(key, start=low, nbytes=held)
            self._windows.appendleft((key, low, data))
            return data[start - low : start - low + nbytes]


class ArchivePlace(NamedTuple):
    """An archive that lies in file `key`: its first byte, and its size."""

    files: Windows
    key: str
    start: int
    nbytes: int


class _Window(io.RawIOBase):
    """The bytes of an archive as a file that can be read and sought."""

    def __init__(self, place: ArchivePlace) -> None:
        super().__init__()
        self._place = place
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._place.nbytes}[whence]
        if base + offset < 0:
            raise OSError("a position before the archive")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, out: Any) -> int:
        nbytes = min(len(out), max(self._place.nbytes - self._at, 0))
        if nbytes:
            place = self._place
            memoryview(out).cast("B")[:nbytes] = place.files.read(place.key, place.start + self._at, nbytes)
        self._at += nbytes
        return nbytes


class TorchArchive:
    """One archive, opened. Raises `ArchiveError` where it is malformed. Several threads may ask it for storages."""

    def __init__(self, place: ArchivePlace) -> None:
        self._place = place
        self._lock = RLock()
        if place.nbytes <= 2 * _PAGE_NBYTES:
            self._file: io.BufferedIOBase = io.BytesIO(place.files.read(place.key, place.start, place.nbytes))
        else:
            self._file = io.BufferedReader(_Window(place), _PAGE_NBYTES)
        try:
            with zipfile.ZipFile(self._file) as archive:
                self._entries = archive.infolist()
                starts = sorted([*(entry.header_offset for entry in self._entries), archive.start_dir])
        except _NO_ZIP as error:
            raise ArchiveError(f"it is no zip archive ({error!s:.100})") from error
        self._names = {entry.filename: entry for entry in self._entries}
        if len(self._names) != len(self._entries):
            raise ArchiveError("it has an entry twice")
        #: Where what follows an entry begins, by the beginning of the entry.
        self._ends = dict(pairwise(starts))
        pickles = [name for name in self._names if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ArchiveError("it is no archive of torch.save: it has no single data.pkl")
        self._root = pickles[0].removesuffix("data.pkl")

    @property
    def saved_as(self) -> str:
        """The name of the file that ``torch.save`` wrote, without its suffix; "archive" where it did not know it."""
        return self._root.removesuffix("/")

    @property
    def directory(self) -> bytes:
        """The names, sizes, places and checksums of the entries, as text: archives with other content have another."""
        rows = (f"{each.filename}\0{each.file_size}\0{each.header_offset}\0{each.CRC}\n" for each in self._entries)
        return "".join(rows).encode("utf-8", "surrogatepass")

    def value(self, known: Globals = ARCHIVE_GLOBALS, *, keep_unknown: bool = False) -> object:
        """The object in the archive, with tensors as `PickledTensor`; see `unpickled`. Raises `PickleError`, too."""
        return unpickled(self._pickle(_MAX_PICKLE_NBYTES), known, persistent=persistent, keep_unknown=keep_unknown)

    def tensor_offset(self, dtype: str, shape: Shape) -> int:
        """The place of the first byte of the archive's only tensor, counted from the file's beginning.

        Raises `ArchiveError` unless it is a tensor of this dtype and shape, and `UnreadTensorError` unless its elements
        lie there in row-major order.
        """
        try:
            found = _unpickled_tensor(self._pickle(_MAX_TENSOR_PICKLE_NBYTES))
        except UnreadTensorError:
            raise
        except PickleError as error:
            raise ArchiveError(f"its pickle is no tensor: {error}") from error
        if found is None:
            raise ArchiveError("it holds a value instead of a tensor")
        if (found.dtype, found.shape) != (dtype, shape):
            raise ArchiveError(f"it holds {found.dtype}{list(found.shape)} instead of {dtype}{list(shape)}")
        return self.elements_offset(found)

    def storage_nbytes(self, key: str) -> int:
        """The size of a storage, as the archive's directory has it."""
        return self._entry(f"data/{key}").file_size

    def storage_offset(self, key: str) -> int:
        """The place of the first byte of a storage, counted from the file's beginning."""
        with self._lock:
            return self._place.start + self._data_start(self._entry(f"data/{key}"))

    def digest(self) -> str:
        """A digest of the pickle and of the directory, which has a checksum of each storage."""
        digest = xxhash.xxh3_128(self._read(self._entry("data.pkl"), _MAX_PICKLE_NBYTES))
        digest.update(self.directory)
        return digest.hexdigest()

    def elements_offset(self, tensor: PickledTensor) -> int:
        """The place of the first byte of a tensor of this archive, counted from the file's beginning.

        Raises `ArchiveError` unless the elements are there, and `UnreadTensorError` unless they are in row-major order.
        """
        if prod(tensor.shape) and not is_row_major(tensor):
            raise UnreadTensorError(f"its elements are not in row-major order (strides {list(tensor.strides)})")
        nbytes = self.storage_nbytes(tensor.storage.key)
        if (tensor.first + prod(tensor.shape)) * DTYPES[tensor.dtype].itemsize > nbytes:
            raise ArchiveError(f"its storage has {nbytes} bytes, less than its tensor")
        return self.storage_offset(tensor.storage.key) + tensor.first * DTYPES[tensor.dtype].itemsize

    def _pickle(self, limit: int) -> bytes:
        order = self._names.get(f"{self._root}byteorder")
        if order is not None and self._read(order, 16) != b"little":
            raise ArchiveError("its numbers are not in little-endian order")
        return self._read(self._entry("data.pkl"), limit)

    def _entry(self, name: str) -> zipfile.ZipInfo:
        entry = self._names.get(self._root + name)
        if entry is None:
            raise ArchiveError(f"its entry {name:.100} is missing")
        return entry

    def _read(self, entry: zipfile.ZipInfo, limit: int) -> bytes:
        if entry.file_size > limit:
            raise ArchiveError(
                f"its entry {entry.filename:.100} has {entry.file_size} bytes, over the limit of {limit}"
            )
        self._file.seek(self._data_start(entry))
        data = self._file.read(entry.file_size)
        if entry.CRC not in (_NO_CHECKSUM, zlib.crc32(data)):
            raise ArchiveError(f"its entry {entry.filename:.100} does not match its checksum")
        return data

    def _data_start(self, entry: zipfile.ZipInfo) -> int:
        """The place of an entry's first byte in the archive."""
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or entry.file_size != entry.compress_size:
            raise ArchiveError(f"its entry {entry.filename:.100} is compressed or encrypted")
        if not 0 <= entry.header_offset < self._place.nbytes:
            raise ArchiveError(f"its entry {entry.filename:.100} begins before it, or behind it")
        self._file.seek(entry.header_offset)
        header = self._file.read(_LOCAL_HEADER_NBYTES)
        if len(header) != _LOCAL_HEADER_NBYTES or header[:4] != b"PK\x03\x04":
            raise ArchiveError(f"its entry {entry.filename:.100} has no header")
        lengths = int.from_bytes(header[26:28], "little"), int.from_bytes(header[28:30], "little")
        encoding = "utf-8" if entry.flag_bits & _UTF8 else "cp437"  # as zipfile decoded it
        if self._file.read(lengths[0]) != entry.orig_filename.encode(encoding):
            raise ArchiveError(f"its entry {entry.filename:.100} has another name in its header")
        start = entry.header_offset + _LOCAL_HEADER_NBYTES + sum(lengths)
        if start + entry.file_size > min(self._ends[entry.header_offset], self._place.nbytes):
            raise ArchiveError(f"its entry {entry.filename:.100} is cut off, or runs into the next one")
        return start


@lru_cache(maxsize=256)
def _unpickled_tensor(data: bytes) -> PickledTensor | None:
    """The tensor in a pickle; None where it holds something else. Most archives of one tensor have one of few pickles:
    those of equal shapes are equal."""
    found = unpickled(data, ARCHIVE_GLOBALS, persistent=persistent)
    return found if isinstance(found, PickledTensor) else None
