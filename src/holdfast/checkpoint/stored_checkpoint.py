"""Partial reads of one stored checkpoint: its manifest, values, and any boxes of its tensors, verified on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from threading import RLock
from typing import Any

import numpy as np

from holdfast.checkpoint.data_files import OpenReader, open_reader
from holdfast.checkpoint.sealed import Sealed
from holdfast.checkpoint.stored_state import StateRecord, StoredState
from holdfast.errors import CorruptError, NotFoundError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format import values as value_codec
from holdfast.format.container import TABLE_OFFSET, Files, num_blocks, parse_table
from holdfast.format.digests import digests_of
from holdfast.format.manifest import DecodedManifest, ValueBlock
from holdfast.format.tombstones import removed_key
from holdfast.format.values import Node
from holdfast.io.buffers import pipeline_pool
from holdfast.io.jobs import DataFile, Extent, ReadJob
from holdfast.io.reader import read_files
from holdfast.store.base import Bytes, FileReader, Store
from holdfast.wording import count

#: Most bytes of digest tables that are kept, for many small reads: those of 256 GiB of data.
_TABLES_NBYTES = 4 << 20


class Checkpoint(StoredState):
    """A sealed checkpoint, for reading. Reads open no epoch and change nothing. Safe for several threads."""

    manifest: DecodedManifest
    files: Files
    has_digests = True

    def __init__(self, sealed: Sealed) -> None:
        """Read and check the manifest.

        Raises:
            CorruptError: the manifest is not the one that was sealed, or is missing (``corrupt.incomplete``).
        """
        self.sealed, self.seal = sealed, sealed.seal
        self.catalogue = sealed.catalogue
        self.digests = digests_of(self.seal.reader_features)
        manifest = self._read_manifest()
        super().__init__(manifest, self.catalogue, folder=self.path(self.seal.manifest.name).rpartition("/")[0])
        #: Verified digest tables that were read last, by file.
        self._tables: dict[int, bytes] = {}
        self._lock = RLock()  # a handler of a signal may read while its thread reads
        self._check_seal()

    def _read_manifest(self) -> DecodedManifest:
        file = self.seal.manifest
        copy = self.catalogue.nearest(file.name)
        with self._sealed_file(file.name):
            data = copy.store.read(copy.key, limit=min(file.nbytes, fmt.MAX_FILE_NBYTES))
        if len(data) != file.nbytes or self.digests.hex(data) != file.digest:
            raise self._corrupt(file.name, "it is not the manifest that the seal describes")
        return fmt.decode(data, path=copy.path)

    def _check_seal(self) -> None:
        """Raise `CorruptError` unless manifest, seal and run belong to one checkpoint."""
        body, seal, run_id = self.manifest.body, self.seal, self.sealed.run_id
        if (seal.checkpoint_id, seal.place, seal.step) != (body.checkpoint_id, self.manifest.place, body.step):
            raise self._corrupt(records.SEAL_NAME, "its manifest describes another checkpoint")
        if run_id is not None and run_id != body.run_id:
            raise self._corrupt(seal.manifest.name, f"it belongs to another run ({body.run_id})")
        if [file.name for file in seal.files] != self.manifest.file_names:
            raise self._corrupt(
                records.SEAL_NAME, f"it does not list the {count(body.num_files, 'data file')} of its manifest"
            )
        if self.manifest.digests is not self.digests:
            raise self._corrupt(records.SEAL_NAME, "seal and manifest disagree on whether the checkpoint is signed")
        if any(not fmt.is_still_name(file.name) for file in seal.referenced):
            raise self._corrupt(records.SEAL_NAME, "it names an earlier checkpoint for tensors that training changes")
        # Checked before any caller allocates memory for the tensors that the manifest claims.
        if fmt.data_nbytes(body) > sum(file.nbytes for file in seal.files):
            raise self._corrupt(records.SEAL_NAME, "its files are smaller than the tensors of its manifest")

    @cached_property
    def record(self) -> StateRecord:
        """The facts that seal and manifest record about it."""
        body = self.manifest.body
        return StateRecord(
            location=self.storage.location,
            identity=self.seal.checkpoint_id,
            step=self.seal.step,
            place=self.seal.place,
            in_history=self.sealed.commit is not None,
            metrics=body.metrics,
            diverged=body.diverged,
        )

    @property
    def storage(self) -> Store:
        """The store of the checkpoint's folder."""
        return self.sealed.storage

    @cached_property
    def nodes(self) -> Mapping[str, Node]:
        """The table of values by path. Listing paths reads nothing.

        Looking up the first value of a file reads all values of that file; it raises `CorruptError` for damaged bytes.
        """
        return _LazyValues(self.manifest.body.values, self._values)

    @cached_property
    def _paths(self) -> frozenset[str]:
        """The paths of all values."""
        return frozenset(path for block in self.manifest.body.values for path in block.paths)

    def values_in(self, files: Collection[int]) -> dict[str, Node]:
        """The part of the table of values that lies in `files`. Raises the same errors as looking up `nodes`."""
        blocks = (block for block in self.manifest.body.values if block.file in files)
        return {path: node for block in blocks for path, node in self._values(block).items()}

    def open_file(
        self,
        index: int,
        *,
        data_start: int,
        data_nbytes: int,
        verify: bool = True,
        open_reader: OpenReader = open_reader,
    ) -> DataFile:
        """Open a data file, and check its size, and with `verify` its digest table, against the seal."""
        name, sealed = self.manifest.file_name(index), self.seal.files[index]
        with self._sealed_file(name):
            file = super().open_file(
                index, data_start=data_start, data_nbytes=data_nbytes, verify=verify, open_reader=open_reader
            )
        reader = file.reader
        try:
            if not reader.nbytes == sealed.nbytes == data_start + data_nbytes:
                raise self._corrupt(name, f"it has {reader.nbytes} bytes instead of {data_start + data_nbytes}")
            return replace(
                file, table=self._table(reader, index, data_nbytes) if verify else None, digests=self.digests
            )
        except BaseException:
            reader.close()
            raise

    def _table(self, reader: FileReader, index: int, data_nbytes: int) -> bytes:
        table = self._tables.get(index)
        if table is None:
            table = self._read_table(reader, index, data_nbytes)
            with self._lock:
                self._tables[index] = table
                while sum(map(len, self._tables.values())) > _TABLES_NBYTES:
                    self._tables.pop(next(iter(self._tables)), None)
        return table

    def _read_table(self, reader: FileReader, index: int, data_nbytes: int) -> bytes:
        text = np.empty(2 * self.digests.nbytes * num_blocks(data_nbytes), np.uint8)
        reader.read_at(TABLE_OFFSET, text)
        table = parse_table(text.tobytes())
        if self.digests.hex(table) != self.seal.files[index].digest:
            raise self._corrupt(
                self.manifest.file_name(index), "its digest table is not the one that the seal describes"
            )
        return table

    def _values(self, block: ValueBlock) -> dict[str, Node]:
        columns = self.files.columns(np.asarray([block.file], np.int64))
        data_start, data_nbytes = int(columns.data_starts[0]), int(columns.data_nbytes[0])
        out = np.empty(0, np.uint8)

        def deliver(_: int, offset: int, data: Bytes) -> None:
            out[offset : offset + len(data)] = data

        def open_() -> DataFile:
            nonlocal out
            file = self.open_file(block.file, data_start=data_start, data_nbytes=data_nbytes)
            out = np.empty(block.capacity, np.uint8)  # the file has as many bytes
            return file

        extent = Extent(data_nbytes - block.capacity, data_nbytes)
        with pipeline_pool() as pool:
            job = ReadJob(data_nbytes, open_, [extent], deliver)  # mostly of one chunk
            read_files([job], pool=pool, on_corrupt=self.corrupt_block, num_threads=1)
        name = self.manifest.file_name(block.file)
        nodes = unpack_values(out.tobytes(), path=self.path(name))
        if list(nodes) != sorted(block.paths):  # decoding has found the nodes sorted
            raise self._corrupt(name, "its values are not those that the manifest lists")
        unheld = next((part for part in value_codec.parts(nodes) if part not in self._paths), None)
        if unheld is not None:
            raise self._corrupt(name, f"its values refer to {unheld!r}, which no data file holds")
        known, aliases = self.numbers, self.manifest.body.aliases
        lost = [name for name in value_codec.tensors(nodes) if name not in known and name not in aliases]
        if lost:
            raise self._corrupt(name, f"its values refer to tensor {min(lost)!r}, which the manifest does not list")
        return nodes

    @contextmanager
    def _sealed_file(self, name: str) -> Iterator[None]:
        """Turn a missing file, in a ``with`` block that opens one of the checkpoint's, into a `CorruptError`.

        The seal proves that the file existed, so its absence is damage. The checkpoint must not seem never to have
        existed.
        """
        try:
            yield
        except NotFoundError as error:
            what = f"is incomplete: {error.message}"
            action = "Restore the file from another copy of the run, or load an older checkpoint."
            holder = next((file.checkpoint for file in self.seal.referenced if file.name == name), None)
            if holder is not None:
                what = f"needs {name!r} of the earlier checkpoint {holder}, which is not there: {error.message}"
                action = (
                    f"Put that file into the folder {holder} beside this checkpoint's folder, or into this folder. To "
                    "copy one checkpoint alone, make it self-contained first: holdfast compact RUN@PLACE."
                )
            if self._is_removed():
                what = "was deleted from its run after it was opened: by a keep policy, `holdfast prune` or `rm`."
                action = "Read another checkpoint. Pin the one you read, and no policy deletes it: `holdfast pin`."
            raise CorruptError(
                f"the checkpoint of step {self.seal.step} {what}",
                code="corrupt.incomplete",
                action=action,
                path=self.path(name),
                step=self.seal.step,
                tier=self.catalogue.nearest(name).tier.value,
            ) from error

    def _is_removed(self) -> bool:
        """Whether the run of the checkpoint has a tombstone for it."""
        commit = self.sealed.commit
        return commit is not None and self.sealed.storage.nbytes(removed_key(commit.place)) is not None

    def _corrupt(self, name: str, what: str, tensor: str | None = None) -> CorruptError:
        error = super()._corrupt(name, what, tensor)
        error.step = self.seal.step
        return error


class _LazyValues(Mapping[str, Node]):
    """The values of all files, read file by file on demand: of thousands, a rank needs its own and rank 0's."""

    def __init__(self, blocks: Sequence[ValueBlock], read: Callable[[ValueBlock], dict[str, Node]]) -> None:
        self._home = {path: block for block in blocks for path in block.paths}
        self._read = read
        self._tables: dict[int, dict[str, Node]] = {}
        self._lock = RLock()  # a handler of a signal may read while its thread reads

    def __getitem__(self, path: str) -> Node:
        block = self._home[path]
        table = self._tables.get(block.file)
        return (self._table(block) if table is None else table)[path]

    def get(self, path: str, default: Any = None) -> Any:
        """As `Mapping.get`, which would call `__getitem__`: a load asks for thousands of values."""
        block = self._home.get(path)
        if block is None:
            return default
        table = self._tables.get(block.file)
        return (self._table(block) if table is None else table).get(path, default)

    def _table(self, block: ValueBlock) -> dict[str, Node]:
        with self._lock:
            if block.file not in self._tables:
                self._tables[block.file] = self._read(block)
            return self._tables[block.file]

    def __contains__(self, path: object) -> bool:
        return path in self._home

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __len__(self) -> int:
        return len(self._home)


def pack_values(nodes: dict[str, Node], *, capacity: int | None = None) -> bytes:
    """The bytes of an ``@values`` entry: length, encoded table, zeros up to `capacity`."""
    encoded = value_codec.encode(nodes)
    packed = len(encoded).to_bytes(8, "little") + encoded
    return packed if capacity is None else packed.ljust(capacity, b"\0")


def unpack_values(data: bytes, *, path: str) -> dict[str, Node]:
    """The values in the bytes of an ``@values`` entry. Raises `CorruptError` for malformed bytes."""
    nbytes = int.from_bytes(data[:8], "little")
    if nbytes > len(data) - 8:
        raise CorruptError(
            f"{path} is damaged: its values claim to take {nbytes} bytes, but {len(data)} are there.",
            code="corrupt.values",
            action="Load another checkpoint of the run, or another copy of this one.",
            path=path,
        )
    try:
        return value_codec.decode(data[8 : 8 + nbytes])
    except CorruptError as error:
        error.message, error.path = f"{path} is damaged: {error.message}", path
        raise
