"""A live state as data files: all ranks have its table, and each file is in the memory of one rank alone.

Making it copies nothing. A data file consists of the sources from which a save would write it. It has no digests,
because its bytes were never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.checkpoint.catalogue import Catalogue, FileCopy, Tier
from holdfast.checkpoint.data_files import DataFiles
from holdfast.format.manifest import DecodedTable, file_name
from holdfast.io.sources import JoinedSources, Source
from holdfast.store.base import Bytes
from holdfast.store.memory import FilesInMemory

#: The name of the source in messages.
NAME: Final = "the source of the transfer"


class LiveFile:
    """The `FileReader` of a live data file of `nbytes`: `sources` one after another from `data_start` on, and zeros
    elsewhere."""

    alignment = 1
    memory = None

    def __init__(self, sources: Sequence[Source], *, data_start: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._data_start = data_start
        self._sources = JoinedSources(sources)

    def read_at(self, offset: int, out: Bytes) -> None:
        """As `FileReader.read_at`; reads of sources must be of whole elements."""
        start = offset - self._data_start
        first, last = max(start, 0), min(start + len(out), self._sources.nbytes)
        out[: first - start] = 0
        out[max(last - start, 0) :] = 0
        if first < last:
            self._sources.read_into(first, out[first - start : last - start])

    def close(self) -> None:
        """Do nothing: the memory belongs to the state."""


def live_files(table: DecodedTable, store: FilesInMemory, holders: Sequence[int]) -> DataFiles:
    """The data files of the state that `table` describes: each is in the `store` of one of the ranks `holders`."""
    copies = {
        file_name(index): (FileCopy(store, file_name(index), Tier.LIVE_MEMORY, holder),)
        for index, holder in enumerate(holders)
    }
    return DataFiles(table, Catalogue(copies), folder=NAME)
