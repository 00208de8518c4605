"""Sources of the bytes that a writer writes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from holdfast.store.base import Bytes


class Source(Protocol):
    """Bytes to write. Several threads call `read_into` at once, for disjoint ranges."""

    @property
    def nbytes(self) -> int:
        """Number of bytes; it does not change."""

    def read_into(self, start: int, out: Bytes) -> None:
        """Copy bytes [start, start + len(out)) to `out`."""


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
        stop = start + len(out)
        index = bisect_right(self._offsets, start) - 1
        while start < stop:
            begin, end = self._offsets[index], min(self._offsets[index + 1], stop)
            if start < end:
                self._sources[index].read_into(start - begin, out[: end - start])
                out = out[end - start :]
                start = end
            index += 1
