"""The tasks of an export: some files of the new folder, which one worker writes, or takes over after it checked them.

When files are durable, the worker creates a record with their digests. So a later call can tell a file that is whole
and sound from any other, and other systems' formats need no room for digests.

A task belongs to one call of an export, which has a mark in the folder until it ends or another call begins. A task
may go on after its call was interrupted. So it deletes nothing but its own records, replaces nothing, and publishes a
file only while the mark of its call is there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol, TypeVar

import msgspec

from holdfast.checkpoint.stored_state import StoredState
from holdfast.errors import ConfigurationError, CorruptError, NotFoundError
from holdfast.exporting.edge_blocks import EdgeBlocks
from holdfast.exporting.file_writes import in_windows, stored_digest, window_nbytes, write_by_windows, write_together
from holdfast.exporting.new_folder import NewFile
from holdfast.format.container import BLOCK_NBYTES
from holdfast.interop.stored_source import StoredSource, shared_store
from holdfast.io.buffers import WindowPools, window_pools
from holdfast.io.create_only import CreateOnlyWriter
from holdfast.phases import LOG
from holdfast.store.base import Location, Store

S = TypeVar("S", bound="_Sized")

#: The record of an export that has not ended.
RECORD_NAME: Final = "holdfast-export.json"
_RECORD_PREFIX: Final = "holdfast-export-"
#: Bytes of a new file that are put together at once, by each of the writer's threads. Each window opens the files that
#: it reads, and plans its reads: in windows half as large, that takes a tenth of the time of an export.
WINDOW_NBYTES: Final = 64 * BLOCK_NBYTES
#: A task has one file, or small ones one after another of so many bytes: neighbours share stored blocks.
_TASK_NBYTES: Final = 256 << 20
#: A record has one file, or small ones one after another of so many bytes: a record takes some milliseconds.
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

    @property
    def is_small(self) -> bool:
        """Whether each file fits into one window."""
        return all(file.aligned_nbytes <= WINDOW_NBYTES for group in self.groups for file in group.files)

    def by_group(self) -> Iterator[FilesTask]:
        """A task for each group."""
        return (replace(self, groups=(group,)) for group in self.groups)

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
            sound = [file for file in group.files if self._is_sound(storage, file)]
            new = [file for file in group.files if file not in sound]
            if wrong := [file.name for file in new if file.name in self.present]:
                damaged += wrong
                continue
            kept += [file.name for file in sound]
            advance(sum(file.data_nbytes for file in sound))
            digests = {file.name: known for file in sound if (known := self.present[file.name]) is not None}
            for files in in_windows(new, pools.windows.buffer_nbytes):
                written, num_read = self._write(storage, files, state, blocks, pools, advance)
                digests |= written
                bytes_read += num_read
            nbytes += sum(file.nbytes for file in new)
            done += sum(file.data_nbytes for file in group.files)
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
        is_sound = stored_digest(storage, file) == expected
        if not is_sound:
            LOG.warning("%s is not as it was written: it is written again", storage.path(file.name))
        return is_sound

    def _write(
        self,
        storage: Store,
        files: Sequence[NewFile],
        state: StoredState,
        blocks: EdgeBlocks,
        pools: WindowPools,
        advance: Callable[[int], None],
    ) -> tuple[dict[str, str], int]:
        """Write one file, or several that fit into one window. Returns their digests, and how many bytes were read."""

        def check() -> None:
            state.check_unchanged(all_files=False)
            self.call.check(storage)

        def writer(file: NewFile) -> CreateOnlyWriter:
            return writers.setdefault(file.name, CreateOnlyWriter(storage.writer(file.name, nbytes=file.nbytes), check))

        check()
        writers: dict[str, CreateOnlyWriter] = {}
        if window_nbytes(files) <= pools.windows.buffer_nbytes:
            digests, num_read = write_together(files, writer, state, blocks, pools, advance)
        else:
            (file,) = files
            digest, num_read = write_by_windows(file, writer(file), state, blocks, pools, advance)
            digests = {file.name: digest}
        for file in files:
            reread = self.read_back or writers[file.name].existed
            if reread and stored_digest(storage, file) != digests[file.name]:
                raise _bad_write(storage.path(file.name))
        return digests, num_read

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
    return [FileGroup(number, group) for number, group in enumerate(_joined(files, _RECORD_NBYTES))]


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
