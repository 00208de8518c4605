"""Data files: one writer's pieces and values in a safetensors file whose layout is a function of the manifest.

Order, names, header length and offsets follow from the manifest alone, so a reader plans without reading any
header and a verifier compares the header byte for byte. The header is as long as an upper bound that can be computed
without making the header's text (SPEC, "Data files"), so a few array operations find every offset in thousands of
files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring_ascii as quoted
from math import prod
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from holdfast.errors import CorruptError
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import SMALL_LAST, DecodedManifest, DecodedTable, ValueBlock
from holdfast.format.partition import Cells, FlatCells, cells_of
from holdfast.geometry import Box, FlatRange, Int64s, Shape, whole

ALIGNMENT = 4096
#: Data bytes per digest.
BLOCK_NBYTES = 1 << 20
#: Offset of the digest table in every data file.
TABLE_OFFSET = 8 + len('{"__metadata__":{"blocks":"')
VALUES_NAME = "@values"
#: Tensors of at most this many bytes in all are small: many ranks read them, and find them together in a few blocks.
SMALL_NBYTES = 64 << 10
#: A tensor may not have this name in a safetensors file.
_RESERVED_NAME = "__metadata__"
#: As long as every checkpoint's id.
_ANY_ID = "0" * 16
#: Upper bound of the rest of an entry's header text: all but the name, the dtype code and the tensor's own numbers.
_ENTRY_NBYTES = 96


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One piece in a data file: ``nbytes`` bytes at ``offset`` of the data section."""

    tensor: int
    part: Box | FlatRange
    offset: int
    nbytes: int


class _FileCell(NamedTuple):
    """A cell that a file holds of each tensor with one partition, shape and dtype.

    `offset` counts from the tensor's first byte in the file. `text` is the part of the header between the tensor's
    quoted name and the cell's offsets.
    """

    part: Box | FlatRange
    offset: int
    nbytes: int
    text: str


@dataclass(frozen=True)
class FileLayout:
    """The content of a data file and its offsets.

    ``data_start`` is the length of the header, ``text`` the header's text about the entries.
    """

    index: int
    entries: Sequence[Entry]
    text: str
    values: ValueBlock | None
    values_offset: int
    data_start: int
    data_nbytes: int

    @property
    def nbytes(self) -> int:
        """The size of the whole file."""
        return self.data_start + self.data_nbytes


@dataclass(frozen=True)
class FileColumns:
    """Layouts of several files as arrays.

    ``offsets[k, i]`` is the offset in file ``files[k]`` of the tensor at the `i`-th requested position of the order of
    entries. Where all positions were requested, a last column has the offsets at which the last tensor ends.
    """

    files: Int64s
    offsets: Int64s
    data_starts: Int64s
    data_nbytes: Int64s


class StoredCells(NamedTuple):
    """Cells of tensors that one file holds, as columns: for each cell its tensor, its number in the tensor's partition,
    and the elements of the tensor that the file holds before it."""

    tensors: Int64s
    cells: Int64s
    before: Int64s


class CellOffsets(NamedTuple):
    """The data section of a file: its start and its size, and the offsets in it of the cells that were asked for."""

    data_start: int
    data_nbytes: int
    offsets: Int64s


class FilePlaces(Protocol):
    """The places of the parts of a state's tensors in its data files. Safe for several threads."""

    @property
    def manifest(self) -> DecodedTable:
        """The table of the state."""

    @property
    def itemsizes(self) -> Int64s:
        """Bytes per element of each tensor."""

    def cells(self, tensor: int) -> Cells:
        """The cells of tensor number `tensor`, checked against its shape."""

    def place(self, files: Int64s, held: Sequence[StoredCells]) -> Iterator[CellOffsets]:
        """Find, for each of `files`, the offsets of the cells in `held` that it holds."""

    def layout(self, index: int) -> FileLayout:
        """The whole layout of data file number `index`."""


class Files:
    """The data files of one checkpoint, derived from its manifest: the `FilePlaces` of our own format."""

    def __init__(self, manifest: DecodedTable) -> None:
        self.manifest = manifest
        self._cells: dict[int, Cells] = {}
        self._checked: dict[tuple[int, int], Cells] = {}

    def cells(self, tensor: int) -> Cells:
        """The cells of tensor number `tensor`, checked against its shape."""
        key = self.manifest.body.partitions[tensor], self.manifest.body.shapes[tensor]
        cells = self._checked.get(key)
        if cells is None:
            cells = self._checked[key] = self._check(tensor, key[0])
        return cells

    def _check(self, tensor: int, index: int) -> Cells:
        cells = self._cells.get(index)
        if cells is None:
            cells = self._cells[index] = cells_of(self.manifest, self.manifest.body.partition_table[index])
        shape = self.manifest.shape(tensor)
        if cells.extents != ((prod(shape),) if isinstance(cells, FlatCells) else shape):
            name = self.manifest.body.names[tensor]
            raise CorruptError(
                f"The manifest is damaged: the parts of {name!r:.200} do not make up {shape!s:.100}.",
                code="corrupt.manifest",
                action="Load another checkpoint of the run, or another copy of this one.",
                tensor=name,
            )
        return cells

    @cached_property
    def itemsizes(self) -> Int64s:
        """Bytes per element of each tensor."""
        table = np.asarray([DTYPES[name].itemsize for name in self.manifest.body.dtype_table], np.int64)
        return table[np.asarray(self.manifest.body.dtypes, np.int64)]

    @cached_property
    def order(self) -> Int64s:
        """Tensor numbers in the order of entries: largest elements first (so that all are aligned), then by name.

        Where the manifest has the feature `SMALL_LAST`, small tensors come behind the others of their element size.
        """
        return np.lexsort((self._is_small, -self.itemsizes))

    @cached_property
    def _is_small(self) -> npt.NDArray[np.bool_]:
        """Whether each tensor lies behind the others of its element size as a small one; never without `SMALL_LAST`."""
        body = self.manifest.body
        if SMALL_LAST not in body.reader_features:
            return np.zeros(len(body.names), np.bool_)
        numels = np.asarray([min(prod(shape), SMALL_NBYTES + 1) for shape in body.shape_table], np.int64)
        return numels[np.asarray(body.shapes, np.int64)] * self.itemsizes <= SMALL_NBYTES

    @cached_property
    def position(self) -> Int64s:
        """The position of each tensor in `order`."""
        return np.argsort(self.order, kind="stable")

    @cached_property
    def _partitions(self) -> Int64s:
        """The partition of each tensor."""
        return np.asarray(self.manifest.body.partitions, np.int64)

    @cached_property
    def _in_order(self) -> tuple[Int64s, Int64s]:
        """Partitions and element sizes of the tensors in `order`."""
        return self._partitions[self.order], self.itemsizes[self.order]

    @cached_property
    def _per_partition(self) -> tuple[Int64s, Int64s]:
        """Per partition, two sums over its tensors: bytes of an element, and upper bounds of a piece's header text."""
        body = self.manifest.body
        codes = np.asarray([len(DTYPES[name].code) for name in body.dtype_table], np.int64)
        numbers = [max(len(shape), 1) * (3 * len(str(prod(shape))) + 3) for shape in body.shape_table]
        names = np.fromiter(map(len, map(quoted, body.names)), np.int64, len(body.names))
        dtypes, shapes = np.asarray(body.dtypes, np.int64), np.asarray(body.shapes, np.int64)
        texts = names + codes[dtypes] + np.asarray(numbers, np.int64)[shapes] + _ENTRY_NBYTES
        nbytes, bounds = np.zeros((2, len(body.partition_table)), np.int64)
        np.add.at(nbytes, self._partitions, self.itemsizes)
        np.add.at(bounds, self._partitions, texts)
        return nbytes, bounds

    @cached_property
    def _of_values(self) -> tuple[Int64s, Int64s]:
        """Per file: bytes reserved for values, and an upper bound of the header text about them."""
        capacities, bounds = np.zeros((2, self.manifest.body.num_files), np.int64)
        for block in self.manifest.body.values:
            capacities[block.file] = block.capacity
            bounds[block.file] = len(quoted(VALUES_NAME)) + 2 + len(str(block.capacity)) + _ENTRY_NBYTES
        return capacities, bounds

    @cached_property
    def _totals(self) -> tuple[Int64s, Int64s]:
        """Elements and pieces per (partition, file), as matrices."""
        num_files = self.manifest.body.num_files
        numels = np.zeros((len(self.manifest.body.partition_table), num_files), np.int64)
        counts = np.zeros_like(numels)
        for index, tensor in zip(*np.unique(self._partitions, return_index=True), strict=True):
            cells = self.cells(int(tensor))
            if (np.diff(cells.owners) > 0).all():  # at most one cell per file, the usual case: several times as fast
                numels[index, cells.owners] = cells.numels
                counts[index, cells.owners] = 1
            else:
                np.add.at(numels[index], cells.owners, cells.numels)
                np.add.at(counts[index], cells.owners, 1)
        return numels, counts

    def columns(self, files: Int64s, positions: Int64s | None = None) -> FileColumns:
        """Offsets in `files` of the tensors at `positions` of the order of entries, and the sizes of those files.

        `positions` ascend; None asks for all. O(tensors x files) array work, less for few positions.
        """
        (numels, counts), (nbytes, bounds), (capacities, of_values) = self._totals, self._per_partition, self._of_values
        numels = numels[:, files]
        data_nbytes = nbytes @ numels + capacities[files]
        header = bounds @ counts[:, files] + of_values[files]
        header += 8 + 1 + np.asarray([len(_metadata(_ANY_ID, int(file), "")) for file in files], np.int64)
        header += 32 * -(-data_nbytes // BLOCK_NBYTES)
        return FileColumns(files, self._offsets(numels, positions), -(-header // ALIGNMENT) * ALIGNMENT, data_nbytes)

    def _offsets(self, numels: Int64s, positions: Int64s | None) -> Int64s:
        """Offsets of tensors in files that hold `numels` elements per partition (rows) and file (columns)."""
        partitions, itemsizes = self._in_order
        if positions is not None and len(positions) * len(numels) <= len(partitions):
            # For each partition: the bytes of one element of each of its tensors that come before a position, summed.
            # Times the partition's elements in a file, that is the offset.
            behind = np.searchsorted(positions, np.arange(len(partitions)), side="right")
            cells = behind * len(numels) + partitions
            before = np.bincount(cells, itemsizes, minlength=(len(positions) + 1) * len(numels)).astype(np.int64)
            return (before.reshape(len(positions) + 1, len(numels))[: len(positions)].cumsum(axis=0) @ numels).T
        offsets = np.zeros((numels.shape[1], len(partitions) + 1), np.int64)
        np.cumsum(numels.T[:, partitions] * itemsizes, axis=1, out=offsets[:, 1:])
        return offsets if positions is None else offsets[:, positions]

    def place(self, files: Int64s, held: Sequence[StoredCells]) -> Iterator[CellOffsets]:
        """As `FilePlaces.place`."""
        # By marks, because a sort of thousands of positions takes several times as long.
        is_wanted = np.zeros(len(self.position), np.bool_)
        for cells in held:
            is_wanted[self.position[cells.tensors]] = True
        columns, column_of = self.columns(files, np.flatnonzero(is_wanted)), np.cumsum(is_wanted) - 1
        for row, cells in enumerate(held):
            begins = columns.offsets[row, column_of[self.position[cells.tensors]]]
            offsets = begins + cells.before * self.itemsizes[cells.tensors]
            yield CellOffsets(int(columns.data_starts[row]), int(columns.data_nbytes[row]), offsets)

    def layout(self, index: int) -> FileLayout:
        """The whole layout of data file number `index`."""
        columns = self.columns(np.asarray([index], np.int64))
        body = self.manifest.body
        entries: list[Entry] = []
        texts: list[str] = []
        known: dict[tuple[int, int, int, bool], list[_FileCell]] = {}
        for tensor, base in zip(self.order.tolist(), columns.offsets[0].tolist(), strict=False):
            name = body.names[tensor]
            key = body.partitions[tensor], body.shapes[tensor], body.dtypes[tensor], name == _RESERVED_NAME
            cells = known.get(key)
            if cells is None:
                cells = known[key] = self._cells_in(index, tensor)
            name = quoted(name)[:-1] if cells else ""
            for part, offset, nbytes, text in cells:
                start = base + offset
                entries.append(Entry(tensor, part, start, nbytes))
                texts.append(f"{name}{text}{start},{start + nbytes}]}}")
        values = next((block for block in body.values if block.file == index), None)
        data_nbytes = int(columns.data_nbytes[0])
        values_offset = data_nbytes - (values.capacity if values else 0)
        if values is not None:
            texts.append(
                f"{quoted(VALUES_NAME)[:-1]}{_text('U8', '', (values.capacity,))}{values_offset},{data_nbytes}]}}"
            )
        start = int(columns.data_starts[0])
        return FileLayout(index, entries, ",".join(texts), values, values_offset, start, data_nbytes)

    def _cells_in(self, index: int, tensor: int) -> list[_FileCell]:
        """The cells of a tensor that data file number `index` holds."""
        cells, shape, itemsize = self.cells(tensor), self.manifest.shape(tensor), int(self.itemsizes[tensor])
        dtype = DTYPES[self.manifest.dtype(tensor)]
        found = []
        for cell in np.flatnonzero(cells.owners == index).tolist():
            part, nbytes = cells.part(cell), int(cells.numels[cell]) * itemsize
            size = part.size if isinstance(part, Box) else (part.numel,)
            suffix = _suffix(self.manifest.body.names[tensor], shape, part)
            text = _text(dtype.code, suffix, size if dtype.native else (nbytes,))
            found.append(_FileCell(part, int(cells.within[cell]) * itemsize, nbytes, text))
        return found


def num_blocks(data_nbytes: int) -> int:
    """Number of digests of a data section of `data_nbytes` bytes."""
    return -(-data_nbytes // BLOCK_NBYTES)


def parse_table(text: bytes) -> bytes:
    """The digest table that a header holds as the hexadecimal `text`; empty where `text` is no hexadecimal text."""
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""


def header(manifest: DecodedManifest, layout: FileLayout, table: bytes) -> bytes:
    """The first ``layout.data_start`` bytes of a data file whose block digests are `table`."""
    return header_in(manifest.body.checkpoint_id, layout, table)


def header_in(checkpoint_id: str, layout: FileLayout, table: bytes) -> bytes:
    """As `header`, of the file that the checkpoint `checkpoint_id` would have."""
    assert len(table) == 16 * num_blocks(layout.data_nbytes)
    metadata = _metadata(checkpoint_id, layout.index, table.hex())
    text = (f"{metadata},{layout.text}}}" if layout.text else f"{metadata}}}").encode("ascii")
    room = layout.data_start - 8
    assert len(text) <= room, f"header bound too small: {len(text)} > {room}"
    return room.to_bytes(8, "little") + text.ljust(room)


def content_digest(layout: FileLayout, table: bytes) -> str:
    """The digest of all that a data file holds, whichever checkpoint it belongs to: of its header, which has the
    digests of its data, with zeros in place of the checkpoint's id."""
    return xxhash.xxh3_128_hexdigest(header_in(_ANY_ID, layout, table))


def _metadata(checkpoint_id: str, index: int, table: str) -> str:
    return f'{{"__metadata__":{{"blocks":"{table}","checkpoint":"{checkpoint_id}","file":"{index}","holdfast":"1"}}'


def _suffix(name: str, shape: Shape, part: Box | FlatRange) -> str:
    """The suffix of a piece's name that says which part of the tensor it is; empty for a whole tensor.

    A tensor with the reserved name always gets a suffix.
    """
    is_whole = part == whole(shape) or (len(shape) == 1 and part == FlatRange(0, *shape))
    if is_whole and name != _RESERVED_NAME:
        return ""
    axes = [part] if isinstance(part, FlatRange) else zip(part.start, part.stop, strict=True)
    return "@" + ",".join(f"{a}:{b}" for a, b in axes)


def _text(code: str, suffix: str, shape: Shape) -> str:
    """The header's text about an entry, from the end of the tensor's name up to the offsets."""
    dims = ",".join(map(str, shape))
    return f'{suffix}":{{"dtype":"{code}","shape":[{dims}],"data_offsets":['
