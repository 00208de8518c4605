"""A folder that an export writes: planned whole before a byte is written, filled file by file, and resumable.

Each file gets its name when it is whole and durable. A small record says which export is under way; it is created first
and deleted last. Files without which other systems do not recognise the folder come after all others, so that a folder
that is not whole shows it.
"""

from __future__ import annotations

import shutil
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Final

import msgspec
import numpy as np
import xxhash

from holdfast.checkpoint.stored_state import StoredState
from holdfast.decoding import decode_json
from holdfast.errors import ConfigurationError, StorageError
from holdfast.exporting.checksums import joined_checksum
from holdfast.exporting.edge_blocks import EdgeBlocks
from holdfast.exporting.element_source import ElementSource, GivenSegment, Segment, TensorSegment, segments_between
from holdfast.format.container import BLOCK_NBYTES
from holdfast.io.buffers import NUM_THREADS, BufferPool
from holdfast.io.sources import Source
from holdfast.io.writer import write_file
from holdfast.reports import size
from holdfast.run.paths import some
from holdfast.store.base import Bytes, FileWriter, Store

#: The record of an export that has not ended.
RECORD_NAME: Final = "holdfast-export.json"
#: Bytes of a new file that are put together at once, by each of the writer's threads.
WINDOW_NBYTES: Final = 32 * BLOCK_NBYTES


@dataclass(frozen=True)
class Trailer:
    """Bytes at `start` of a file's data that depend on the CRC-32 of the segments at `of`, which lie before them.

    Until these are known, a `GivenSegment` of as many bytes stands for them.
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


class _ExportRecord(msgspec.Struct, frozen=True):
    """The content of the record: the digest of the planned folder."""

    digest: str


@dataclass(frozen=True)
class WrittenFolder:
    """The outcome: the files that earlier calls had written, and the bytes that this one wrote and read."""

    kept: tuple[str, ...]
    nbytes: int
    bytes_read: int


def finished_files(storage: Store, folder: NewFolder) -> frozenset[str]:
    """The files of `folder` that an earlier, interrupted export has written into the place `storage`.

    Raises `ConfigurationError`, code ``config.destination``, where the place holds anything else.
    """
    found = list(_files_in(storage, folder))
    if not found:
        return frozenset()
    where = storage.location.url
    if RECORD_NAME not in found:
        raise ConfigurationError(
            f"{where} is not empty: it holds {some(found)}.",
            code="config.destination",
            action="Name a new or an empty folder.",
            path=where,
        )
    sizes = {file.name: file.nbytes for file in folder.files}
    sizes |= {name: len(data) for name, data in (*folder.first.items(), *folder.last.items())}
    wrong = [name for name in found if name != RECORD_NAME and sizes.get(name) != storage.nbytes(name)]
    if wrong or not _is_record_of(storage.read(RECORD_NAME), folder):
        other = f", such as {wrong[0]}" if wrong else ""
        raise ConfigurationError(
            f"{where} holds a part of another export{other}.",
            code="config.destination",
            action="Repeat that export as it was begun, or name another folder, or remove this one.",
            path=where,
        )
    return frozenset(found) - {RECORD_NAME}


def _files_in(storage: Store, folder: NewFolder) -> Iterator[str]:
    """The names in the root of `storage` and in the folders that `folder` has there, but not these themselves."""
    folders = folder.folders
    for above in folders:
        for name in storage.list(above):
            path = f"{above}/{name}" if above else name
            if path not in folders:
                yield path


def _is_record_of(data: bytes, folder: NewFolder) -> bool:
    try:
        return decode_json(data, _ExportRecord).digest == folder.digest
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def write_folder(
    storage: Store,
    folder: NewFolder,
    state: StoredState,
    *,
    advance: Callable[[int], None],
    finish: Callable[[], None] | None = None,
) -> WrittenFolder:
    """Write `folder` into the place `storage`, with the tensors of `state`. Blocks until all of it is durable.

    Files that an interrupted call has finished stay. Memory is bounded: a window for each thread of the writer, and
    the edge blocks. `advance` gets the bytes done since its last call, of such files too. `finish` is the last step,
    for what lies outside of the folder: a call that continues an interrupted one makes it again.

    Raises as `finished_files`, and `StorageError`, code ``storage.full``, where the disk lacks the space: both before
    anything is written. Later errors leave a folder that the same call continues.
    """
    kept = finished_files(storage, folder)
    todo = [file for file in folder.files if file.name not in kept]
    _check_space(storage, sum(file.nbytes for file in todo))
    storage.create(RECORD_NAME, msgspec.json.encode(_ExportRecord(folder.digest)))
    for above in folder.folders:
        for leftover in storage.leftovers(above):
            storage.delete(f"{above}/{leftover}" if above else leftover)
    _create(storage, folder.first, kept)
    advance(sum(file.data_nbytes for file in folder.files if file.name in kept))
    blocks = EdgeBlocks()
    with BufferPool(NUM_THREADS * WINDOW_NBYTES, buffer_nbytes=WINDOW_NBYTES) as pool:
        for file in todo:
            _write(storage, file, state, blocks, pool, advance)
    _create(storage, folder.last, kept)
    if finish is not None:
        finish()
    storage.delete(RECORD_NAME)
    created = [len(data) for name, data in (*folder.first.items(), *folder.last.items()) if name not in kept]
    return WrittenFolder(tuple(sorted(kept)), sum(file.nbytes for file in todo) + sum(created), blocks.bytes_read)


def _create(storage: Store, files: Mapping[str, bytes], kept: Iterable[str]) -> None:
    for name, data in files.items():
        if name not in kept:
            storage.create(name, data)


def _check_space(storage: Store, nbytes: int) -> None:
    """Refuse a folder that its disk has no room for. Other processes may fill the disk meanwhile."""
    folder = storage.location.folder
    if folder is None:
        return
    there = next((place for place in (folder, *folder.parents) if place.exists()), Path("/"))
    free = shutil.disk_usage(there).free
    if nbytes > free:
        raise StorageError(
            f"{folder} needs {size(nbytes)}, but its disk has only {size(free)} free.",
            code="storage.full",
            action="Free space, or name a folder on another disk.",
            path=str(folder),
        )


def _write(
    storage: Store,
    file: NewFile,
    state: StoredState,
    blocks: EdgeBlocks,
    pool: BufferPool,
    advance: Callable[[int], None],
) -> None:
    source: Source = ElementSource(state, file.segments, blocks, advance)
    writer = storage.writer(file.name, nbytes=file.nbytes)
    if file.trailers:
        source = checksummed = _ChecksummedSource(source, file)
        writer = _TrailedWriter(writer, file, checksummed)
    write_file(writer, [source], data_start=len(file.head), header=lambda _: file.head, pool=pool)


class _ChecksummedSource:
    """The data of a file, and the CRC-32 of each tensor segment that has passed."""

    def __init__(self, source: Source, file: NewFile) -> None:
        self._source = source
        self._segments = file.segments
        #: By the start of a segment: the checksums of its pieces, each with the piece's place and size.
        self._pieces: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._lock = Lock()
        self.nbytes = source.nbytes

    def read_into(self, start: int, out: Bytes) -> None:
        """As `Source.read_into`."""
        self._source.read_into(start, out)
        for segment in segments_between(self._segments, start, start + len(out)):
            if isinstance(segment, TensorSegment):
                low, high = max(start, segment.start), min(start + len(out), segment.start + segment.nbytes)
                checksum = zlib.crc32(out[low - start : high - start].data)
                with self._lock:
                    self._pieces[segment.start].append((low, high - low, checksum))

    def checksum(self, segment: int) -> int:
        """The CRC-32 of the segment that begins at `segment`, after all of it has passed; 0 for one without bytes."""
        checksum = 0
        for _, nbytes, piece in sorted(self._pieces[segment]):
            checksum = joined_checksum(checksum, piece, nbytes)
        return checksum


class _TrailedWriter:
    """A writer that puts the trailers into a file before it publishes it."""

    def __init__(self, writer: FileWriter, file: NewFile, source: _ChecksummedSource) -> None:
        self._writer = writer
        self._file = file
        self._source = source

    @property
    def alignment(self) -> int:
        """As `FileWriter.alignment`."""
        return self._writer.alignment

    def write_at(self, offset: int, data: Bytes) -> None:
        """As `FileWriter.write_at`."""
        self._writer.write_at(offset, data)

    def publish(self, nbytes: int) -> None:
        """As `FileWriter.publish`."""
        for trailer in self._file.trailers:
            data = np.frombuffer(trailer.make([self._source.checksum(of) for of in trailer.of]), np.uint8)
            self._writer.write_at(len(self._file.head) + trailer.start, data)
        self._writer.publish(nbytes)

    def abort(self) -> None:
        """As `FileWriter.abort`."""
        self._writer.abort()
