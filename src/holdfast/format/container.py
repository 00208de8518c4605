"""Data files: one writer's pieces and values in a safetensors file whose layout is a function of the manifest.

Order, names, header length and offsets follow from the manifest alone, so a reader plans without reading any
header and a verifier compares the header byte for byte. The header is as long as an upper bound that needs no
text to compute (SPEC, "Data files"): finding every offset in thousands of files stays a few array operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from json.encoder import encode_basestring_ascii as quoted
from math import prod
from typing import NamedTuple

import msgspec
import numpy as np

from holdfast.errors import CorruptError
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import DecodedManifest, ValueBlock
from holdfast.format.partition import Cells, FlatCells, cells_of
from holdfast.geometry import Box, FlatRange, Int64s, Shape, whole

ALIGNMENT = 4096
#: Data bytes per digest.
BLOCK_NBYTES = 1 << 20
#: Where the digest table begins in every data file: ``8 + len('{"__metadata__":{"blocks":"')``.
TABLE_OFFSET = 8 + len('{"__metadata__":{"blocks":"')
VALUES_NAME = "@values"
#: What safetensors files may not call a tensor.
_RESERVED_NAME = "__metadata__"
#: Of an entry's header text, what is neither name, dtype code nor the tensor's own numbers (an upper bound).
_ENTRY_NBYTES = 96


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One piece in a data file: ``nbytes`` bytes at ``offset`` of the data section."""

    tensor: int
    part: Box | FlatRange
    offset: int
    nbytes: int


class _Cell(NamedTuple):
    """A cell that a file holds of all tensors with one partition, shape and dtype: where it begins after the tensor's
    first byte in the file, and the header's text after the tensor's quoted name and before the cell's offsets."""

    part: Box | FlatRange
    offset: int
    nbytes: int
    text: str


@dataclass(frozen=True)
class FileLayout:
    """All that a data file holds and where; ``data_start`` is the header's length, ``text`` what it says of entries."""

    index: int
    entries: Sequence[Entry]
    text: str
    values: ValueBlock | None
    values_offset: int
    data_start: int
    data_nbytes: int


@dataclass(frozen=True)
class FileColumns:
    """Layouts of several files as arrays: ``offsets[k, p]`` is where the tensor at position `p` of the order of entries
    begins in file ``files[k]``."""

    files: Int64s
    offsets: Int64s
    data_starts: Int64s
    data_nbytes: Int64s


class Files:
    """The data files of one checkpoint, derived from its manifest."""

    def __init__(self, manifest: DecodedManifest) -> None:
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
        """Tensor numbers in the order of entries: largest elements first (so nothing is misaligned), then by name."""
        return np.argsort(-self.itemsizes, kind="stable")

    @cached_property
    def position(self) -> Int64s:
        """Where each tensor stands in `order`."""
        return np.argsort(self.order, kind="stable")

    @cached_property
    def _entry_bounds(self) -> Int64s:
        """Upper bound of the header text of one piece, per tensor."""
        body = self.manifest.body
        codes = np.asarray([len(DTYPES[name].code) for name in body.dtype_table], np.int64)
        numbers = [max(len(shape), 1) * (3 * len(str(prod(shape))) + 3) for shape in body.shape_table]
        names = np.asarray([len(quoted(name)) for name in body.names], np.int64)
        dtypes, shapes = np.asarray(body.dtypes, np.int64), np.asarray(body.shapes, np.int64)
        return names + codes[dtypes] + np.asarray(numbers, np.int64)[shapes] + _ENTRY_NBYTES

    @cached_property
    def _totals(self) -> tuple[Int64s, Int64s]:
        """Elements and pieces per (partition, file), as matrices."""
        num_files = self.manifest.body.num_files
        numels = np.zeros((len(self.manifest.body.partition_table), num_files), np.int64)
        counts = np.zeros_like(numels)
        seen: set[int] = set()
        for tensor, index in enumerate(self.manifest.body.partitions):
            if index not in seen:
                seen.add(index)
                cells = self.cells(tensor)
                np.add.at(numels[index], cells.owners, cells.numels)
                np.add.at(counts[index], cells.owners, 1)
        return numels, counts

    def columns(self, files: Int64s) -> FileColumns:
        """Offsets of all tensors in `files`, and the sizes of those files. O(tensors x files) array work."""
        numels, counts = self._totals
        partitions = np.asarray(self.manifest.body.partitions, np.int64)
        sizes = numels[:, files].T[:, partitions[self.order]] * self.itemsizes[self.order]
        offsets = np.zeros((len(files), len(self.order) + 1), np.int64)
        np.cumsum(sizes, axis=1, out=offsets[:, 1:])
        data_nbytes = offsets[:, -1].copy()
        bounds = np.zeros(len(counts), np.int64)
        np.add.at(bounds, partitions, self._entry_bounds)
        header = bounds @ counts[:, files]
        for block in self.manifest.body.values:
            here = files == block.file
            data_nbytes[here] += block.capacity
            header[here] += len(quoted(VALUES_NAME)) + 2 + len(str(block.capacity)) + _ENTRY_NBYTES
        header += 8 + 1 + np.asarray([len(_metadata(self.manifest, int(file), "")) for file in files], np.int64)
        header += 32 * -(-data_nbytes // BLOCK_NBYTES)
        return FileColumns(files, offsets, -(-header // ALIGNMENT) * ALIGNMENT, data_nbytes)

    def layout(self, index: int) -> FileLayout:
        """Everything about data file number `index`."""
        columns = self.columns(np.asarray([index], np.int64))
        body = self.manifest.body
        entries: list[Entry] = []
        texts: list[str] = []
        known: dict[tuple[int, int, int, bool], list[_Cell]] = {}
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

    def _cells_in(self, index: int, tensor: int) -> list[_Cell]:
        """The cells of a tensor that data file number `index` holds."""
        cells, shape, itemsize = self.cells(tensor), self.manifest.shape(tensor), int(self.itemsizes[tensor])
        dtype = DTYPES[self.manifest.dtype(tensor)]
        found = []
        for cell in np.flatnonzero(cells.owners == index).tolist():
            part, nbytes = cells.part(cell), int(cells.numels[cell]) * itemsize
            size = part.size if isinstance(part, Box) else (part.numel,)
            suffix = _suffix(self.manifest.body.names[tensor], shape, part)
            text = _text(dtype.code, suffix, size if dtype.native else (nbytes,))
            found.append(_Cell(part, int(cells.within[cell]) * itemsize, nbytes, text))
        return found


def num_blocks(data_nbytes: int) -> int:
    """Digests that a data section of `data_nbytes` has."""
    return -(-data_nbytes // BLOCK_NBYTES)


def parse_table(text: bytes) -> bytes:
    """The digest table that stands as `text` in a header; empty where it is none."""
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""


def header(manifest: DecodedManifest, layout: FileLayout, table: bytes) -> bytes:
    """The first ``layout.data_start`` bytes of a data file whose block digests are `table`."""
    assert len(table) == 16 * num_blocks(layout.data_nbytes)
    metadata = _metadata(manifest, layout.index, table.hex())
    text = (f"{metadata},{layout.text}}}" if layout.text else f"{metadata}}}").encode("ascii")
    room = layout.data_start - 8
    assert len(text) <= room, f"header bound too small: {len(text)} > {room}"
    return room.to_bytes(8, "little") + text.ljust(room)


def _metadata(manifest: DecodedManifest, index: int, table: str) -> str:
    checkpoint_id = manifest.body.checkpoint_id
    return f'{{"__metadata__":{{"blocks":"{table}","checkpoint":"{checkpoint_id}","file":"{index}","holdfast":"1"}}'


def _suffix(name: str, shape: Shape, part: Box | FlatRange) -> str:
    """What a piece's name says after the tensor's: which part it is; only a whole tensor keeps its bare name."""
    is_whole = part == whole(shape) or (len(shape) == 1 and part == FlatRange(0, *shape))
    if is_whole and name != _RESERVED_NAME:
        return ""
    axes = [part] if isinstance(part, FlatRange) else zip(part.start, part.stop, strict=True)
    return "@" + ",".join(f"{a}:{b}" for a, b in axes)


def _text(code: str, suffix: str, shape: Shape) -> str:
    """A header's text of an entry, from the end of the tensor's name up to the offsets."""
    dims = ",".join(map(str, shape))
    return f'{suffix}":{{"dtype":"{code}","shape":[{dims}],"data_offsets":['
