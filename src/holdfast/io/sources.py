"""Sources of the bytes that a writer writes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Protocol, runtime_checkable

import numpy as np

from holdfast.store.base import Bytes, FileReader

#: Smaller pieces of memory are copied: a piece by itself takes longer on its way than their copy.
_IN_PLACE_NBYTES = 256 << 10


class Source(Protocol):
    """Bytes to write. Several threads call `read_into` at once, for disjoint ranges."""

    @property
    def nbytes(self) -> int:
        """Number of bytes; it does not change."""

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy bytes [start, start + len(out)) to `out`."""


@runtime_checkable
class HeldSource(Source, Protocol):
    """A source that may be memory of this process."""

    def held(self) -> Bytes | None:
        """All its bytes, where they lie in memory without gaps; else None. The memory may change at any time."""


class BytesSource:
    """A source of bytes in memory."""

    def __init__(self, data: bytes) -> None:
        self._data = np.frombuffer(data, np.uint8)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return len(self._data)

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy bytes [start, start + len(out)) to `out`."""
        out[:] = self._data[start : start + len(out)]


class OpenFileSource:
    """A source of the bytes of an open file, from `start` to its end."""

    def __init__(self, reader: FileReader, start: int) -> None:
        self._reader = reader
        self._start = start

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self._reader.nbytes - self._start

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy bytes [start, start + len(out)) to `out`."""
        self._reader.read_at(self._start + start, out)


class JoinedSources:
    """Several sources, one after another, as one."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._offsets = list(accumulate((source.nbytes for source in sources), initial=0))

    @property
    def nbytes(self) -> int:
        """Number of bytes of all sources together."""
        return self._offsets[-1]

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy bytes [start, start + len(out)) to `out`."""
        for source, first, nbytes in self._parts(start, start + len(out)):
            source.read_into(first, out[:nbytes])
            out = out[nbytes:]

    def pieces(self, start: int, stop: int, buffer: Bytes) -> list[Bytes]:
        """Bytes [start, stop), one array after the other: large ones where they lie in memory, the others as copies in
        `buffer`, which has room for all of them."""
        found: list[Bytes] = []
        num_copied, num_joined = 0, 0  # the bytes in `buffer`, and those of them that are in `found`
        for source, first, nbytes in self._parts(start, stop):
            held = source.held() if nbytes >= _IN_PLACE_NBYTES and isinstance(source, HeldSource) else None
            if held is None:
                source.read_into(first, buffer[num_copied : num_copied + nbytes])
                num_copied += nbytes
                continue
            found += [buffer[num_joined:num_copied]] if num_joined < num_copied else []
            num_joined = num_copied
            found.append(held[first : first + nbytes])
        return found + ([buffer[num_joined:num_copied]] if num_joined < num_copied else [])

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Source, int, int]]:
        """The parts of sources that make up bytes [start, stop): each source, the first byte of it, and how many."""
        index = bisect_right(self._offsets, start) - 1
        while start < stop:
            begin, end = self._offsets[index], min(self._offsets[index + 1], stop)
            if start < end:
                yield self._sources[index], start - begin, end - start
                start = end
            index += 1
