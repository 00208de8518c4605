"""A folder that an export writes, planned whole before a byte is written: a value that workers get parts of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import xxhash

from holdfast.exporting.element_source import GivenSegment, Segment
from holdfast.format.container import ALIGNMENT


@dataclass(frozen=True)
class Trailer:
    """Bytes at `start` of a file's data that depend on the CRC-32 of the segments at `of`, which lie before them.

    Until these are known, a `GivenSegment` of as many bytes stands for them. Workers get it, so `make` can be pickled.
    """

    start: int
    of: tuple[int, ...]
    make: Callable[[Sequence[int]], bytes]


@dataclass(frozen=True)
class NewFile:
    """A file to write: its `head`, whose length is a multiple of 4096, and then its data."""

    name: str
    head: bytes
    segments: Sequence[Segment]
    trailers: Sequence[Trailer] = ()

    @property
    def data_nbytes(self) -> int:
        """Bytes behind the head."""
        return self.segments[-1].start + self.segments[-1].nbytes if self.segments else 0

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.head) + self.data_nbytes

    @property
    def aligned_nbytes(self) -> int:
        """Size of the whole pages that the file fills."""
        return self.nbytes + -self.nbytes % ALIGNMENT

    def trailed(self, checksum: Callable[[int], int]) -> Iterator[tuple[int, bytes]]:
        """The bytes of each trailer, with their place in the data; `checksum` gives the CRC-32 of the segment at a
        place."""
        for trailer in self.trailers:
            yield trailer.start, trailer.make(list(map(checksum, trailer.of)))


@dataclass(frozen=True)
class NewFolder:
    """The content of a folder: small files that come first, the files with the tensors, and small ones that come last.

    Names may have folders before them, with ``/``.
    `identity` is that of the state that the tensors come from, and `num_tensors` counts them.
    """

    identity: str
    first: Mapping[str, bytes]
    files: Sequence[NewFile]
    last: Mapping[str, bytes]
    num_tensors: int

    @property
    def names(self) -> list[str]:
        """The names of all files, in the order in which they are written."""
        return [*self.first, *(file.name for file in self.files), *self.last]

    @cached_property
    def folders(self) -> list[str]:
        """The folders that the files lie in, sorted; "" is the root."""
        found = {""}
        for name in self.names:
            while (name := name.rpartition("/")[0]) not in found:
                found.add(name)
        return sorted(found)

    @cached_property
    def digest(self) -> str:
        """A digest of everything that decides about the bytes of the folder."""
        digest = xxhash.xxh3_128(self.identity.encode())
        for name, data in (*self.first.items(), *self.last.items()):
            digest.update(f"\0{name}\0{len(data)}\0".encode() + data)
        for file in self.files:
            digest.update(f"\0{file.name}\0{len(file.head)}\0".encode() + file.head)
            for segment in file.segments:
                digest.update(segment.data if isinstance(segment, GivenSegment) else repr(segment).encode())
        return digest.hexdigest()
