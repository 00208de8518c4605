"""A live state as a checkpoint: all ranks have its manifest, and each data file is in the memory of one rank alone.

Making it copies nothing. A data file consists of the sources from which a save would write it. It has no digests,
because its bytes were never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import xxhash

from holdfast.checkpoint.reading import Checkpoint
from holdfast.checkpoint.sealed import Sealed
from holdfast.format import manifest as fmt
from holdfast.format.container import Files
from holdfast.format.records import FileSeal, Seal
from holdfast.io.sources import BytesSource, JoinedSources, Source
from holdfast.store.base import Bytes
from holdfast.store.memory import FilesInMemory

#: The name of the source in messages.
NAME: Final = "the source of the transfer"
_NO_DIGEST: Final = "0" * 32


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


def live_checkpoint(manifest: bytes) -> Checkpoint:
    """The checkpoint that `manifest` describes; the transfer adds its data files elsewhere."""
    decoded = fmt.decode(manifest, path=NAME)
    body = decoded.body
    columns = Files(decoded).columns(np.arange(body.num_files), np.zeros(1, np.int64))
    sizes = (columns.data_starts + columns.data_nbytes).tolist()
    seal = Seal(
        checkpoint_id=body.checkpoint_id,
        place=decoded.place,
        step=body.step,
        manifest=FileSeal(fmt.NAME, len(manifest), xxhash.xxh3_128_hexdigest(manifest)),
        files=tuple(FileSeal(fmt.file_name(index), nbytes, _NO_DIGEST) for index, nbytes in enumerate(sizes)),
    )
    storage = FilesInMemory(NAME)
    storage.add(fmt.NAME, LiveFile([BytesSource(manifest)], data_start=0, nbytes=len(manifest)))
    return Checkpoint(Sealed(storage, "", seal))
