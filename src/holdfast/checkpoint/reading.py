"""Partial reads of one stored checkpoint: its manifest, values, and any boxes of its tensors, verified on the way."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import pairwise
from threading import Lock
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.checkpoint.sealed import Sealed
from holdfast.errors import CorruptError, NotFoundError
from holdfast.format import manifest as fmt
from holdfast.format import records
from holdfast.format import values as value_codec
from holdfast.format.container import BLOCK_NBYTES, TABLE_OFFSET, Files, num_blocks, parse_table
from holdfast.format.dtypes import CARRIERS
from holdfast.format.manifest import DecodedManifest, ValueBlock
from holdfast.format.names import shown
from holdfast.format.values import Node
from holdfast.geometry import Box
from holdfast.io.buffers import pipeline_pool
from holdfast.io.reader import DataFile, Extent, ReadJob, ReadStats, read_files
from holdfast.plan.load import FileReads, ReadRequest, pieces, plan_load
from holdfast.plan.strided_runs import CopySpan, StridedRun, copy_spans
from holdfast.store.base import Bytes, FileReader
from holdfast.wording import count

OpenReader = Callable[[str], FileReader]

#: Most bytes of digest tables that are kept, for many small reads: those of 256 GiB of data.
_TABLES_NBYTES = 4 << 20
#: Wants up to this size are filled many at a time, where a run of bytes has all of their elements.
_FILLED_NBYTES = 1 << 20


class Targets(Protocol):
    """The targets of a read, by the numbers of the wants. Several threads call the methods, for disjoint elements."""

    def put(self, want: int, at: Box, elements: npt.NDArray[Any]) -> None:
        """Take elements (of the carrier type) for box `at`, relative to the wanted box."""

    def fill(self, wants: Sequence[int], data: Bytes) -> None:
        """Take all elements of several wants: `data` has those of one want after another, each in row-major order."""

    def memory(self, want: int) -> npt.NDArray[Any] | None:
        """The memory of a want in row-major order, to write carriers to; None where the reader must call `put`."""


class Checkpoint:
    """A sealed checkpoint, for reading. Reads open no epoch and change nothing. Safe for several threads."""

    def __init__(self, sealed: Sealed) -> None:
        """Read and check the manifest.

        Raises:
            CorruptError: the manifest is not the one that was sealed, or is missing (``corrupt.incomplete``).
        """
        self.sealed = sealed
        self.storage, self.seal = sealed.storage, sealed.seal
        file = self.seal.manifest
        with self._sealed_file(file.name):
            data = self.storage.read(sealed.key(file.name), limit=min(file.nbytes, fmt.MAX_FILE_NBYTES))
        if len(data) != file.nbytes or xxhash.xxh3_128_hexdigest(data) != file.digest:
            raise self._corrupt(file.name, "it is not the manifest that was sealed")
        self.manifest: DecodedManifest = fmt.decode(data, path=self.path(file.name))
        self.files = Files(self.manifest)
        #: Verified digest tables that were read last, by file.
        self._tables: dict[int, bytes] = {}
        self._lock = Lock()
        self._check_seal()

    def _check_seal(self) -> None:
        """Raise `CorruptError` unless manifest, seal and run belong to one checkpoint."""
        body, seal, run_id = self.manifest.body, self.seal, self.sealed.run_id
        if (seal.checkpoint_id, seal.place, seal.step) != (body.checkpoint_id, self.manifest.place, body.step):
            raise self._corrupt(records.SEAL_NAME, "it seals another checkpoint than its manifest describes")
        if run_id is not None and run_id != body.run_id:
            raise self._corrupt(seal.manifest.name, f"it belongs to another run ({body.run_id})")
        names = [fmt.file_name(index) for index in range(len(seal.files))]
        if len(names) != body.num_files or [file.name for file in seal.files] != names:
            raise self._corrupt(
                records.SEAL_NAME, f"it does not list the {count(body.num_files, 'data file')} of its manifest"
            )
        # Checked before any caller allocates memory for the tensors that the manifest claims.
        if fmt.data_nbytes(body) > sum(file.nbytes for file in seal.files):
            raise self._corrupt(records.SEAL_NAME, "its files are smaller than the tensors of its manifest")

    def path(self, name: str) -> str:
        """Full path of a file of the checkpoint."""
        return self.storage.path(self.sealed.key(name))

    @property
    def folder(self) -> str:
        """Full path of the checkpoint's folder."""
        return self.path(self.seal.manifest.name).rpartition("/")[0]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Number of each tensor, by name."""
        return {name: number for number, name in enumerate(self.manifest.body.names)}

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

    def read(
        self, wants: Sequence[ReadRequest], targets: Targets, *, verify: bool = True, first_file: int = 0
    ) -> ReadStats:
        """Deliver every element of `wants` to `targets`, each once. Blocks until all are delivered.

        Memory is bounded: three buffers of 2 MiB. With `verify`, every block that is read is checked against the
        seal before its elements are delivered.

        Raises:
            CorruptError: bytes are missing or altered; names the file and the tensors.
            StorageError: the store failed.
        """
        jobs = (job for _, job in self.jobs(wants, targets, verify=verify, first_file=first_file))
        with pipeline_pool() as pool:
            return read_files(jobs, pool=pool, on_corrupt=self.corrupt_block)

    def jobs(
        self,
        wants: Sequence[ReadRequest],
        targets: Targets,
        *,
        verify: bool = True,
        first_file: int = 0,
        open_reader: OpenReader | None = None,
    ) -> Iterator[tuple[int, ReadJob]]:
        """The jobs that `read` runs, one per file, each with the index of its file.

        `open_reader` opens files by key (default: the store's `reader`).
        """
        for reads in plan_load(self.files, wants, first_file=first_file):
            yield reads.file, self._job(reads, wants, targets, verify, open_reader)

    def idle_job(self, file: int, *, verify: bool, open_reader: OpenReader | None = None) -> ReadJob:
        """A job without extents, for a rank that reads a file only for others."""
        columns = self.files.columns(np.asarray([file], np.int64))
        data_start, data_nbytes = int(columns.data_starts[0]), int(columns.data_nbytes[0])
        open_ = partial(
            self.open_file,
            file,
            data_start=data_start,
            data_nbytes=data_nbytes,
            verify=verify,
            open_reader=open_reader,
        )
        return ReadJob(data_nbytes, open_, [], _wants_nothing, verify)

    def open_file(
        self,
        index: int,
        *,
        data_start: int,
        data_nbytes: int,
        verify: bool = True,
        open_reader: OpenReader | None = None,
    ) -> DataFile:
        """Open a data file, and check its size, and with `verify` its digest table, against the seal."""
        name, sealed = fmt.file_name(index), self.seal.files[index]
        with self._sealed_file(name):
            reader = (open_reader or self.storage.reader)(self.sealed.key(name))
        try:
            if not reader.nbytes == sealed.nbytes == data_start + data_nbytes:
                raise self._corrupt(name, f"it has {reader.nbytes} bytes instead of {data_start + data_nbytes}")
            table = self._table(reader, index, data_nbytes) if verify else None
        except BaseException:
            reader.close()
            raise
        return DataFile(reader, self.path(name), data_start, data_nbytes, table)

    def _table(self, reader: FileReader, index: int, data_nbytes: int) -> bytes:
        table = self._tables.get(index)
        if table is None:
            table = self._read_table(reader, index, data_nbytes)
            with self._lock:
                self._tables[index] = table
                while sum(map(len, self._tables.values())) > _TABLES_NBYTES:
                    del self._tables[next(iter(self._tables))]
        return table

    def _read_table(self, reader: FileReader, index: int, data_nbytes: int) -> bytes:
        text = np.empty(32 * num_blocks(data_nbytes), np.uint8)
        reader.read_at(TABLE_OFFSET, text)
        table = parse_table(text.tobytes())
        if xxhash.xxh3_128_hexdigest(table) != self.seal.files[index].digest:
            raise self._corrupt(fmt.file_name(index), "its digest table is not the one that was sealed")
        return table

    def _job(
        self,
        reads: FileReads,
        wants: Sequence[ReadRequest],
        targets: Targets,
        verify: bool,
        open_reader: OpenReader | None,
    ) -> ReadJob:
        open_ = partial(
            self.open_file,
            reads.file,
            data_start=reads.data_start,
            data_nbytes=reads.data_nbytes,
            verify=verify,
            open_reader=open_reader,
        )
        extents = np.stack([reads.starts, reads.stops], axis=1)
        return ReadJob(reads.data_nbytes, open_, extents, _Delivery(self.files, reads, wants, targets).take, verify)

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
            read_files([ReadJob(data_nbytes, open_, [extent], deliver)], pool=pool, on_corrupt=self.corrupt_block)
        name = fmt.file_name(block.file)
        nodes = unpack_values(out.tobytes(), path=self.path(name))
        if list(nodes) != sorted(block.paths):  # decoding has found the nodes sorted
            raise self._corrupt(name, "its values are not those that the manifest lists")
        unheld = next((part for part in value_codec.parts(nodes) if part not in self._paths), None)
        if unheld is not None:
            raise self._corrupt(name, f"its values say that there is {unheld!r}, which no data file holds")
        known, aliases = self.numbers, self.manifest.body.aliases
        lost = [name for name in value_codec.tensors(nodes) if name not in known and name not in aliases]
        if lost:
            raise self._corrupt(name, f"its values refer to tensor {min(lost)!r}, which the manifest does not list")
        return nodes

    def corrupt_block(self, file: DataFile, block: int) -> CorruptError:
        """The error for a block that does not match its digest; names the tensors that lie in it."""
        name = file.path.rsplit("/", 1)[-1]
        index = next(i for i in range(len(self.seal.files)) if fmt.file_name(i) == name)
        low, high = block * BLOCK_NBYTES, (block + 1) * BLOCK_NBYTES
        hit = list(self._names_between(index, low, high))
        held = ", ".join(map(shown, hit[:5])) + (f" and {len(hit) - 5} more" if len(hit) > 5 else "")
        what = f"block {block} of its data does not match its digest; it holds {held}"
        return self._corrupt(name, what, *hit[:1])

    def _names_between(self, index: int, low: int, high: int) -> Iterator[str]:
        layout = self.files.layout(index)
        for entry in layout.entries:
            if entry.offset < high and entry.offset + entry.nbytes > low:
                yield self.manifest.body.names[entry.tensor]
        if layout.values is not None and layout.values_offset < high:
            yield "the values"

    @contextmanager
    def _sealed_file(self, name: str) -> Iterator[None]:
        """Turn a missing file, in a ``with`` block that opens one of the checkpoint's, into a `CorruptError`.

        The seal proves that the file existed, so its absence is damage. The checkpoint must not seem never to have
        existed.
        """
        try:
            yield
        except NotFoundError as error:
            raise CorruptError(
                f"the checkpoint of step {self.seal.step} is incomplete: {error.message}",
                code="corrupt.incomplete",
                action="Restore the file from another copy of the run, or load an older checkpoint. If somebody "
                "has just removed the checkpoint, load again.",
                path=self.path(name),
                step=self.seal.step,
            ) from error

    def _corrupt(self, name: str, what: str, tensor: str | None = None) -> CorruptError:
        return CorruptError(
            f"{self.path(name)} is damaged: {what}.",
            code="corrupt.file",
            action="Load another checkpoint of the run, or restore this file from another copy.",
            path=self.path(name),
            tensor=tensor,
            step=self.seal.step,
        )


def _wants_nothing(*_: object) -> None:
    raise AssertionError("nothing is delivered where nothing is wanted")


class _LazyValues(Mapping[str, Node]):
    """The values of all files, read file by file on demand: of thousands, a rank needs its own and rank 0's."""

    def __init__(self, blocks: Sequence[ValueBlock], read: Callable[[ValueBlock], dict[str, Node]]) -> None:
        self._home = {path: block for block in blocks for path in block.paths}
        self._read = read
        self._tables: dict[int, dict[str, Node]] = {}
        self._lock = Lock()

    def __getitem__(self, path: str) -> Node:
        block = self._home[path]
        table = self._tables.get(block.file)
        return (self._table(block) if table is None else table)[path]

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


class _Delivery:
    """The delivery of one file's bytes to the wants whose elements they are."""

    def __init__(self, files: Files, reads: FileReads, wants: Sequence[ReadRequest], targets: Targets) -> None:
        self._files = files
        self._reads = reads
        self._wants = wants
        self._targets = targets
        sizes = reads.stops - reads.starts
        #: The offset of each read when all are laid end to end, and the end of the last one.
        self._line = np.r_[0, np.cumsum(sizes)].tolist()
        self._filled = reads.straight & (sizes <= _FILLED_NBYTES)

    def take(self, first: int, offset: int, data: Bytes) -> None:
        """Deliver bytes of read `first`, from `offset` on, and of the reads that follow it without a gap."""
        line, begin = self._line, self._line[first] + offset
        end = begin + len(data)
        if end <= line[first + 1] and not self._filled[first]:
            self._part(first, offset, data)
            return
        # `data` has all bytes of reads [low, high).
        low, high = first + (offset > 0), bisect_right(line, end) - 1
        if offset:
            self._part(first, offset, data[: line[low] - begin])
        for start, stop in self._groups(low, high):
            held = data[line[start] - begin : line[stop] - begin]
            if self._filled[start]:
                self._targets.fill(self._reads.wants[start:stop].tolist(), held)
            else:
                self._part(start, 0, held)
        if low <= high and line[high] < end:
            self._part(high, 0, data[line[high] - begin :])

    def _groups(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Ranges of reads that make up ``[low, high)``: reads that are filled together, and each other read alone."""
        filled = self._filled[low:high]
        cuts = low + 1 + np.flatnonzero(~(filled[1:] & filled[:-1]))
        return pairwise((low, *cuts.tolist(), high)) if low < high else iter(())

    def _part(self, index: int, offset: int, data: Bytes) -> None:
        """Deliver bytes of one read, from `offset` on."""
        number = int(self._reads.wants[index])
        want = self._wants[number]
        itemsize = int(self._files.itemsizes[want.tensor])
        run, skipped, numel = self._reads.strided_run(index), offset // itemsize, len(data) // itemsize
        memory = None if run is None else self._targets.memory(number)
        if run is not None and memory is not None:
            for span in copy_spans(run, skipped, numel):
                _copy(span, run, data, memory)
            return
        elements = data.view(CARRIERS[itemsize])
        for at, stored, source, target in pieces(self._reads.read(index), want.box, skipped, numel):
            held = elements[at : at + stored.numel].reshape(stored.size)
            self._targets.put(number, target, held[source.slices()])


def _copy(span: CopySpan, run: StridedRun, data: Bytes, memory: npt.NDArray[Any]) -> None:
    """Copy elements of `data` to `memory`. (``np.ndarray`` makes strided arrays faster than ``as_strided``.)"""
    shape, dtype, itemsize = (span.rows, span.size), memory.dtype, memory.itemsize
    source = np.ndarray(shape, dtype, data, span.at * itemsize, (run.step * itemsize, itemsize))
    target = np.ndarray(shape, dtype, memory, span.place * itemsize, (run.pitch * itemsize, itemsize))
    target[...] = source


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
            f"{path} is damaged: its values claim {nbytes} bytes of {len(data)}.",
            code="corrupt.values",
            action="Load another checkpoint of the run, or another copy of this one.",
            path=path,
        )
    try:
        return value_codec.decode(data[8 : 8 + nbytes])
    except CorruptError as error:
        error.message, error.path = f"{path} is damaged: {error.message}", path
        raise
