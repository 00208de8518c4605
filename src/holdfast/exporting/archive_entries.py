"""The entries of zip archives as ``torch.save`` writes them, and the bytes that depend on the checksums of tensors.

Torch is not needed here: workers that write archives do without it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

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


class ArchivedFile(NamedTuple):
    """A file in an archive: where its header lies, and what the directory says of it."""

    name: str
    offset: int
    nbytes: int
    checksum: int
    flags: int

    @staticmethod
    def known(name: str, content: bytes, offset: int) -> tuple[ArchivedFile, bytes]:
        """A file whose content is known, and its bytes in the archive."""
        entry = ArchivedFile(name, offset, len(content), zlib.crc32(content), 0)
        sizes = entry.checksum, len(content), len(content), len(name), 0
        return entry, _LOCAL.pack(0x04034B50, 0, 0, 0, 0, 0, *sizes) + name.encode("ascii") + content

    @staticmethod
    def of_tensor(name: str, nbytes: int, offset: int, *, start: int) -> tuple[ArchivedFile, bytes]:
        """A file with the bytes of a tensor, and the header before them; a field of padding aligns them. The archive
        begins at `start`."""
        is_large = nbytes > _MOST_NBYTES
        extra = _EXTRA.pack(_ZIP64, 16) + struct.pack("<QQ", nbytes, nbytes) if is_large else b""
        room = _LOCAL.size + len(name) + len(extra) + _EXTRA.size
        padding = -(start + offset + room) % _ALIGNMENT
        extra += _EXTRA.pack(b"FB", padding) + bytes(padding)
        size = _ELSEWHERE if is_large else 0
        sizes = 0, size, size, len(name), len(extra)
        head = (0x04034B50, _LARGE_VERSION if is_large else 0, _SIZES_BEHIND, 0, 0, 0)
        entry = ArchivedFile(name, offset, nbytes, 0, _SIZES_BEHIND)
        return entry, _LOCAL.pack(*head, *sizes) + name.encode("ascii") + extra

    def central(self) -> bytes:
        """The entry of the directory."""
        name = self.name.encode("ascii")
        large = [number for number in (self.nbytes, self.nbytes, self.offset) if number > _MOST_NBYTES]
        extra = _EXTRA.pack(_ZIP64, 8 * len(large)) + struct.pack(f"<{len(large)}Q", *large) if large else b""
        sizes = self.checksum, _short(self.nbytes), _short(self.nbytes), len(name), len(extra)
        version = _LARGE_VERSION if large else 0
        head = (0x02014B50, version, version, self.flags, 0, 0, 0)
        return _CENTRAL.pack(*head, *sizes, 0, 0, 0, 0, _short(self.offset)) + name + extra

    def descriptor(self) -> bytes:
        """The bytes behind a tensor: its checksum and sizes."""
        kind = _LARGE_DESCRIPTOR if self.nbytes > _MOST_NBYTES else _DESCRIPTOR
        return kind.pack(0x08074B50, self.checksum, self.nbytes, self.nbytes)


@dataclass(frozen=True)
class TensorTrailer:
    """The descriptor of a tensor, which has its checksum, and the known bytes behind it, as `Trailer.make`."""

    entry: ArchivedFile
    behind: bytes

    def __call__(self, checksums: Sequence[int]) -> bytes:
        """The bytes, from the checksums."""
        return self.entry._replace(checksum=checksums[0]).descriptor() + self.behind


@dataclass(frozen=True)
class DirectoryTrailer:
    """The descriptor of the last tensor and the directory, at `offset`, as `Trailer.make`. The checksums are those of
    the entries at `tensors`."""

    entries: tuple[ArchivedFile, ...]
    tensors: tuple[int, ...]
    offset: int

    def __call__(self, checksums: Sequence[int]) -> bytes:
        """The bytes, from the checksums."""
        entries = list(self.entries)
        for at, checksum in zip(self.tensors, checksums, strict=True):
            entries[at] = entries[at]._replace(checksum=checksum)
        return entries[-1].descriptor() + directory_of(entries, self.offset)


def directory_of(entries: Sequence[ArchivedFile], offset: int) -> bytes:
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


def _short(number: int) -> int:
    """A size or an offset in a field of 32 bits."""
    return number if number <= _MOST_NBYTES else _ELSEWHERE
