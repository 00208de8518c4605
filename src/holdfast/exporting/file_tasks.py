"""The tasks of an export: some files of the new folder, which one worker writes, or takes over after it checked them.

When files are durable, the worker creates a record with their digests. So a later call can tell a file that is whole
and sound from any other, and other systems' formats need no room for digests.

A task belongs to one call of an export, which has a mark in the folder until it ends or another call begins. A task
may go on after its call was interrupted. So it deletes nothing but its own records, replaces nothing, and publishes a
file only while the mark of its call is there.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import xxhash
from isal import isal_zlib

from holdfast.checkpoint.stored_state import StoredState
from holdfast.errors import ConfigurationError, CorruptError, NotFoundError
from holdfast.exporting.checksums import joined_checksum
from holdfast.exporting.edge_blocks import EdgeBlocks
from holdfast.exporting.element_source import ElementSource, TensorSegment, segments_between
from holdfast.exporting.new_folder import NewFile
from holdfast.format.container import BLOCK_NBYTES
from holdfast.interop.stored_source import StoredSource, shared_store
from holdfast.io.buffers import WindowPools, window_pools
from holdfast.io.create_only import CreateOnlyWriter
from holdfast.io.jobs import Extent
from holdfast.io.reread import stored_digests
from holdfast.io.sources import Source
from holdfast.io.writer import write_file
from holdfast.phases import LOG
from holdfast.store.base import Bytes, FileWriter, Location, Store

S = TypeVar("S", bound="_Sized")

#: The record of an export that has not ended.
RECORD_NAME: Final = "holdfast-export.json"
_RECORD_PREFIX: Final = "holdfast-export-"
#: Bytes of a new file that are put together at once, by each of the writer's threads. Each window opens the files that
#: it reads, and plans its reads: in windows half as large, that takes a tenth of the time of an export.
WINDOW_NBYTES: Final = 64 * BLOCK_NBYTES
#: A task has one file, or small ones one after another of so many bytes: neighbours share stored blocks.
_TASK_NBYTES: Final = 256 << 20
#: Folders of more files have a record for so many bytes of them, and others one for each file: a record takes some
#: milliseconds.
_FEW_FILES: Final = 100
_RECORD_NBYTES: Final = 64 << 20


class FilesRecord(msgspec.Struct, frozen=True):
    """The content of the record of finished files: the digest of the planned folder, and their digests by name."""

    digest: str
    files: dict[str, str]


@dataclass(frozen=True)
class ExportCall:
    """One call of an export: the random `token` in the names of its mark and its records; `data` is in the mark."""

    token: str
    data: bytes

    @staticmethod
    def new(digest: str) -> ExportCall:
        """A new call, which writes the planned folder with this digest."""
        return ExportCall(secrets.token_hex(8), msgspec.json.encode(FilesRecord(digest, {})))

    @property
    def mark(self) -> str:
        """The name of the mark."""
        return f"{_RECORD_PREFIX}call-{self.token}.json"

    @property
    def earlier(self) -> str:
        """The name of the record with the digests that earlier calls had recorded."""
        return f"{_RECORD_PREFIX}earlier-{self.token}.json"

    def record(self, number: int) -> str:
        """The name of the record of a group of files."""
        return f"{_RECORD_PREFIX}{number:06d}-{self.token}.json"

    def holds(self, storage: Store) -> bool:
        """Whether the mark is in the folder at the root of `storage`."""
        try:
            return storage.read(self.mark) == self.data
        except NotFoundError:
            return False

    def check(self, storage: Store) -> None:
        """Raise `ConfigurationError`, code ``config.destination``, unless the mark is in the folder."""
        if not self.holds(storage):
            where = storage.location.url
            raise ConfigurationError(
                f"another export into {where} has begun, or somebody removed its files.",
                code="config.destination",
                action="Let one export at a time write into a folder, and nothing else.",
                path=where,
            )


@dataclass(frozen=True)
class WrittenFiles:
    """The outcome of a task: the names of the files that were there, sound, and the bytes written and read.

    `damaged` are files that are not as they were written. Nothing of their groups was done: the caller deletes them.
    """

    kept: tuple[str, ...]
    damaged: tuple[str, ...]
    nbytes: int
    bytes_read: int
    data_nbytes: int


class FileGroup(NamedTuple):
    """The files with one record, and the number of that among all records of the folder."""

    number: int
    files: tuple[NewFile, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)


@dataclass(frozen=True)
class FilesTask:
    """Some files to write in the place `folder`, for a call; `digest` is that of the plan.

    `present` are those of the files that exist, each with the digest that a record gives; None where there is none, in
    a folder in which all files had been written. With `read_back`, new files are read again and compared.
    """

    source: StoredSource
    folder: Location
    call: ExportCall
    digest: str
    groups: tuple[FileGroup, ...]
    present: Mapping[str, str | None]
    read_back: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(group.nbytes for group in self.groups)

    @property
    def paths(self) -> tuple[str, ...]:
        """As `Task.paths`."""
        return tuple(f"{self.folder.url}/{file.name}" for group in self.groups for file in group.files)

    def without(self, damaged: Collection[str]) -> Iterator[FilesTask]:
        """The task that writes the groups of the files `damaged`, after these were deleted; none where it has none."""
        groups = tuple(group for group in self.groups if any(file.name in damaged for file in group.files))
        if groups:
            present = {name: digest for name, digest in self.present.items() if name not in damaged}
            yield replace(self, groups=groups, present=present)

    def run(self) -> WrittenFiles:
        """As `Task.run`: in a worker, which opens the state and the folder by itself."""
        storage = shared_store(self.folder, self.call.mark, self.call.data)
        state = self.source.open()
        with window_pools(WINDOW_NBYTES) as pools:
            return self.write(storage, state, EdgeBlocks(state.manifest.body.num_files), pools, lambda _: None)

    def write(
        self, storage: Store, state: StoredState, blocks: EdgeBlocks, pools: WindowPools, advance: Callable[[int], None]
    ) -> WrittenFiles:
        """Write the files that are not there, and the records. Blocks until all is durable."""
        kept, damaged, nbytes, done, bytes_read = list[str](), list[str](), 0, 0, 0
        for group in self.groups:
            digests: dict[str, str] = {}
            sound = [file.name for file in group.files if self._is_sound(storage, file)]
            if wrong := [file.name for file in group.files if file.name in self.present and file.name not in sound]:
                damaged += wrong
                continue
            for file in group.files:
                known = self.present.get(file.name)
                if file.name in sound:
                    kept.append(file.name)
                    advance(file.data_nbytes)
                else:
                    known, num_read = self._write(storage, file, state, blocks, pools, advance)
                    bytes_read += num_read
                    nbytes += file.nbytes
                if known is not None:
                    digests[file.name] = known
                done += file.data_nbytes
            if digests:
                self._create_record(storage, group.number, digests)
        return WrittenFiles(tuple(kept), tuple(damaged), nbytes, bytes_read, done)

    def _is_sound(self, storage: Store, file: NewFile) -> bool:
        """Whether a file is there as it was written. One without a digest counts."""
        if file.name not in self.present:
            return False
        expected = self.present[file.name]
        if expected is None:
            return True
        is_sound = _stored_digest(storage, file) == expected
        if not is_sound:
            LOG.warning("%s is not as it was written: it is written again", storage.path(file.name))
        return is_sound

    def _write(
        self,
        storage: Store,
        file: NewFile,
        state: StoredState,
        blocks: EdgeBlocks,
        pools: WindowPools,
        advance: Callable[[int], None],
    ) -> tuple[str, int]:
        """Write one file. Returns its digest, and how many bytes were read."""

        def check() -> None:
            state.check_unchanged(all_files=False)
            self.call.check(storage)

        check()
        source: Source
        source = elements = ElementSource(state, file.segments, blocks, pools.reads, advance)
        writer: FileWriter
        writer = created = CreateOnlyWriter(storage.writer(file.name, nbytes=file.nbytes), check)
        trailed: list[bytes] = []
        if file.trailers:
            source = checksummed = _ChecksummedSource(source, file)
            writer = _TrailedWriter(writer, file, checksummed, trailed)
        table = write_file(
            writer,
            [source],
            data_start=len(file.head),
            header=file.head,
            pool=pools.windows,
            in_order=storage.capabilities.in_order,
        )
        digest = _file_digest(file.head, table, b"".join(trailed))
        if (self.read_back or created.existed) and _stored_digest(storage, file) != digest:
            raise _bad_write(storage.path(file.name))
        return digest, elements.bytes_read

    def _create_record(self, storage: Store, number: int, digests: dict[str, str]) -> None:
        name = self.call.record(number)
        storage.create(name, msgspec.json.encode(FilesRecord(self.digest, digests)))
        if not self.call.holds(storage):  # this is a late task: nobody else removes its record
            storage.delete(name)
            self.call.check(storage)


def is_files_record(name: str) -> bool:
    """Whether a name is that of a record of finished files."""
    return name.startswith(_RECORD_PREFIX) and name.endswith(".json")


def file_groups(files: Sequence[NewFile]) -> list[FileGroup]:
    """The files with one record each. They follow from the plan alone, so that a later call has the same ones."""
    most = 0 if len(files) <= _FEW_FILES else _RECORD_NBYTES
    return [FileGroup(number, group) for number, group in enumerate(_joined(files, most))]


def task_groups(groups: Sequence[FileGroup]) -> Iterator[tuple[FileGroup, ...]]:
    """The groups of each task."""
    return _joined(groups, _TASK_NBYTES)


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


def _joined(items: Sequence[S], most_nbytes: int) -> Iterator[tuple[S, ...]]:
    """`items` one after another, in tuples of at most `most_nbytes`, or of one."""
    held: list[S] = []
    nbytes = 0
    for item in items:
        if held and nbytes + item.nbytes > most_nbytes:
            yield tuple(held)
            held, nbytes = [], 0
        held.append(item)
        nbytes += item.nbytes
    if held:
        yield tuple(held)


def _bad_write(path: str) -> CorruptError:
    return CorruptError(
        f"{path} does not have the bytes that were written.",
        code="corrupt.file",
        action="Check the disk and the memory of this machine, and repeat the call.",
        path=path,
    )


def _blanks(file: NewFile) -> list[Extent]:
    """The bytes of trailers, which stand as zeros in the data that is written first."""
    return [Extent(each.start, each.start + len(each.make([0] * len(each.of)))) for each in file.trailers]


def _file_digest(head: bytes, table: bytes, trailers: bytes) -> str:
    """The digest of a file: of its head, of the digest table of its data, and of the trailers, zeros in the table."""
    return xxhash.xxh3_128_hexdigest(head + table + trailers)


def _stored_digest(storage: Store, file: NewFile) -> str:
    start = len(file.head)
    head = storage.read(file.name, start=0, nbytes=start)
    table, trailers = stored_digests(
        storage, file.name, data_start=start, data_nbytes=file.data_nbytes, blanks=_blanks(file)
    )
    return _file_digest(head, table, trailers)


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
                checksum = isal_zlib.crc32(out[low - start : high - start].data)
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

    def __init__(self, writer: FileWriter, file: NewFile, source: _ChecksummedSource, trailed: list[bytes]) -> None:
        """`trailed` gets the bytes of the trailers."""
        self._writer = writer
        self._file = file
        self._source = source
        self._trailed = trailed

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
            made = trailer.make([self._source.checksum(of) for of in trailer.of])
            self._writer.write_at(len(self._file.head) + trailer.start, np.frombuffer(made, np.uint8))
            self._trailed.append(made)
        self._writer.publish(nbytes)

    def abort(self) -> None:
        """As `FileWriter.abort`."""
        self._writer.abort()
