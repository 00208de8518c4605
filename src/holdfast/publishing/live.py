"""A state in memory as a checkpoint: its manifest is on all ranks, each data file in the memory of one rank alone.

Nothing is copied to make it. A data file is the sources that a save would write it from, and has no digests: what is
read from memory was not stored.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Final, NoReturn

import numpy as np
import xxhash

from holdfast.errors import NotFoundError, StorageError
from holdfast.format import manifest as fmt
from holdfast.format.container import Files
from holdfast.format.records import FileSeal, Seal
from holdfast.run.checkpoint import Checkpoint
from holdfast.run.history import Located
from holdfast.storage.base import Bytes, FileReader
from holdfast.transfer.sources import BytesSource, JoinedSources, Source

#: What messages call it.
NAME: Final = "the source of the transfer"
_NO_DIGEST: Final = "0" * 32


class LiveStorage:
    """A `Storage` of what is in the memory of this process. It is read only."""

    def __init__(self) -> None:
        self.uri = NAME
        self._objects: dict[str, FileReader] = {}

    def add(self, key: str, data: FileReader) -> None:
        """Show `data` under `key`."""
        self._objects[key] = data

    def path(self, key: str) -> str:
        """What messages call the object."""
        return f"{self.uri}/{key}"

    def read(self, key: str, *, start: int = 0, nbytes: int | None = None, limit: int | None = None) -> bytes:
        """As `Storage.read`; nothing here is larger than who put it there knows, so there is no `limit`."""
        reader = self.reader(key)
        out = np.empty(reader.nbytes - start if nbytes is None else nbytes, np.uint8)
        reader.read_at(start, out)
        return out.tobytes()

    def nbytes(self, key: str) -> int | None:
        """As `Storage.nbytes`."""
        data = self._objects.get(key)
        return None if data is None else data.nbytes

    def list(self, folder: str) -> builtins.list[str]:
        """As `Storage.list`; there are no folders."""
        return [] if folder else sorted(self._objects)

    def reader(self, key: str) -> FileReader:
        """As `Storage.reader`."""
        if key not in self._objects:
            raise NotFoundError(
                f"{self.path(key)} is not in the memory of this rank.",
                code="not_found.object",
                action="Read it on the rank that owns it.",
                path=self.path(key),
            )
        return self._objects[key]

    def leftovers(self, folder: str, *, older_than_s: float = 0.0) -> builtins.list[str]:
        """As `Storage.leftovers`."""
        return []

    def create(self, key: str, data: bytes) -> NoReturn:
        """Raises `StorageError`."""
        raise self._read_only(key)

    def writer(self, key: str, *, nbytes: int) -> NoReturn:
        """Raises `StorageError`."""
        raise self._read_only(key)

    def delete(self, key: str) -> NoReturn:
        """Raises `StorageError`."""
        raise self._read_only(key)

    def _read_only(self, key: str) -> StorageError:
        return StorageError(
            f"{self.path(key)} cannot be changed: it is live memory, seen as a file.",
            code="storage.read_only",
            action="Change the tensors themselves.",
            path=self.path(key),
        )


class LiveFile:
    """A file of `nbytes` as a `FileReader`: `sources` one after another from `data_start` on, and zeros elsewhere."""

    alignment = 1

    def __init__(self, sources: Sequence[Source], *, data_start: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._data_start = data_start
        self._sources = JoinedSources(sources)

    def read_at(self, offset: int, out: Bytes) -> None:
        """As `FileReader.read_at`; of sources, whole elements."""
        start = offset - self._data_start
        first, last = max(start, 0), min(start + len(out), self._sources.nbytes)
        out[: first - start] = 0
        out[max(last - start, 0) :] = 0
        if first < last:
            self._sources.read_into(first, out[first - start : last - start])

    def close(self) -> None:
        """Does nothing: the memory is the state's."""


def live_checkpoint(manifest: bytes) -> Checkpoint:
    """The checkpoint that `manifest` describes; its data files are opened elsewhere."""
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
    storage = LiveStorage()
    storage.add(fmt.NAME, LiveFile([BytesSource(manifest)], data_start=0, nbytes=len(manifest)))
    return Checkpoint(Located(storage, None, None, "", seal))
