"""The table of a foreign state, and the places of its parts: offsets that another system chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from holdfast.format.container import CellOffsets, Entry, FileLayout, StoredCells
from holdfast.format.dtypes import DTYPES
from holdfast.format.manifest import Boxes, DecodedTable, Grid, Partition, SequenceTable, StateTable, ValueBlock
from holdfast.format.partition import Cells, cells_of, is_too_long
from holdfast.geometry import Int64s, Shape, coverage_fault
from holdfast.plan.divide import as_grid
from holdfast.wording import count

#: Finds the offsets in file number `file` of parts, by their numbers in the order in which they were added.
OffsetsOf = Callable[[int, Int64s], Int64s]


class ForeignTensor(NamedTuple):
    """A tensor of a foreign state: its parts are boxes `starts`, `sizes` (arrays ``[parts, axes]``) in `files`."""

    name: str
    dtype: str
    shape: Shape
    starts: Int64s
    sizes: Int64s
    files: Int64s


class GivenPlaces:
    """The `FilePlaces` of a foreign state: `nbytes` are the sizes of its files, and `offsets_of` finds offsets in them.

    `tensors` are sorted by name, and their parts cover each of them exactly once (`uncovered`). `aliases` are other
    names of them.
    """

    def __init__(
        self,
        tensors: Sequence[ForeignTensor],
        nbytes: Sequence[int],
        offsets_of: OffsetsOf,
        *,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self._nbytes = nbytes
        self._offsets_of = offsets_of
        self._cells: dict[int, Cells] = {}
        table = StateTables()
        parts = 0
        #: For each tensor, the numbers of its parts in the order of its cells.
        self._parts: list[Int64s] = []
        for tensor in tensors:
            self._parts.append(parts + table.add(tensor))
            parts += len(tensor.files)
        body, blobs = table.finish(num_files=len(nbytes), aliases=aliases)
        self.manifest = DecodedTable(body, b"".join(blobs))

    @cached_property
    def itemsizes(self) -> Int64s:
        """As `FilePlaces.itemsizes`."""
        body = self.manifest.body
        table = np.asarray([DTYPES[name].itemsize for name in body.dtype_table], np.int64)
        return table[np.asarray(body.dtypes, np.int64)]

    def cells(self, tensor: int) -> Cells:
        """As `FilePlaces.cells`."""
        index = self.manifest.body.partitions[tensor]
        cells = self._cells.get(index)
        if cells is None:
            cells = self._cells[index] = cells_of(self.manifest, self.manifest.body.partition_table[index])
        return cells

    def place(self, files: Int64s, held: Sequence[StoredCells]) -> Iterator[CellOffsets]:
        """As `FilePlaces.place`. A data section is a whole file."""
        for file, cells in zip(files.tolist(), held, strict=True):
            pairs = zip(cells.tensors.tolist(), cells.cells.tolist(), strict=True)
            numbers = np.asarray([self._parts[tensor][cell] for tensor, cell in pairs], np.int64)
            yield CellOffsets(0, self._nbytes[file], self._offsets_of(file, numbers))

    def layout(self, index: int) -> FileLayout:
        """As `FilePlaces.layout`; the entries ascend."""
        entries = [entry for tensor in range(len(self._parts)) for entry in self._entries(index, tensor)]
        entries.sort(key=lambda entry: entry.offset)
        return FileLayout(index, entries, "", None, self._nbytes[index], 0, self._nbytes[index])

    def _entries(self, file: int, tensor: int) -> Iterator[Entry]:
        cells, itemsize = self.cells(tensor), int(self.itemsizes[tensor])
        numbers = np.flatnonzero(cells.owners == file)
        if not len(numbers):
            return
        offsets = self._offsets_of(file, self._parts[tensor][numbers])
        for cell, offset in zip(numbers.tolist(), offsets.tolist(), strict=True):
            yield Entry(tensor, cells.part(cell), offset, int(cells.numels[cell]) * itemsize)


def uncovered(tensor: ForeignTensor) -> str | None:
    """The fault in the parts of a tensor, as text that follows its name; None where they cover it exactly once."""
    room = np.asarray(tensor.shape, np.int64) - tensor.starts
    if ((tensor.starts < 0) | (tensor.sizes < 0) | (tensor.sizes > room)).any():
        return f"has a part outside its shape {list(tensor.shape)}"
    _, rows = _cells(tensor)
    num_axes = len(tensor.shape)
    if not num_axes:
        return None if len(rows) == 1 else f"is stored {count(len(rows), 'time')}"
    if not len(rows) and not prod(tensor.shape):
        return None
    cuts = as_grid(rows, tensor.shape)
    if cuts is not None and not any(axis[0] for axis in cuts):
        return None
    if is_too_long(len(rows), num_axes):
        return f"has {count(len(rows), 'part')} that form no grid: too many to check"
    fault = coverage_fault([tensor.shape], np.zeros(len(rows), np.int64), rows[:, :num_axes], rows[:, num_axes:])
    if fault is None:
        return None
    times = f"is stored {count(fault.times, 'time')}" if fault.times else "is not stored"
    return f"is not whole: its element {list(fault.index)} {times}"


def _cells(tensor: ForeignTensor) -> tuple[Int64s, Int64s]:
    """The numbers of the parts of a tensor that have elements, in the order of cells, and their starts and sizes as
    rows."""
    numbers = np.flatnonzero((tensor.sizes > 0).all(axis=1))
    rows = np.concatenate([tensor.starts, tensor.sizes], axis=1)[numbers]
    if not tensor.shape:
        return numbers, rows
    order = np.lexsort(rows[:, : len(tensor.shape)].T[::-1])
    return numbers[order], rows[order]


class StateTables:
    """The table of a state under construction; tensors are added in the order of their names."""

    def __init__(self) -> None:
        self._sequences = SequenceTable()
        self._names: list[str] = []
        self._dtypes: dict[str, int] = {}
        self._shapes: dict[Shape, int] = {}
        self._partitions: dict[Partition, int] = {}
        self._columns: tuple[list[int], list[int], list[int]] = ([], [], [])

    def add(self, tensor: ForeignTensor) -> Int64s:
        """Add a tensor. Returns the numbers of its parts in the order of its cells; parts without elements are none."""
        numbers, rows = _cells(tensor)
        partition = self._partition(rows, tensor.shape, tensor.files[numbers])
        self._names.append(tensor.name)
        dtypes, shapes, partitions = self._columns
        dtypes.append(self._dtypes.setdefault(tensor.dtype, len(self._dtypes)))
        shapes.append(self._shapes.setdefault(tensor.shape, len(self._shapes)))
        partitions.append(self._partitions.setdefault(partition, len(self._partitions)))
        return numbers

    def _partition(self, rows: Int64s, shape: Shape, files: Int64s) -> Partition:
        owners = self._sequences.add(files)
        cuts = _whole_cuts(shape) if len(rows) < 2 else as_grid(rows, shape)
        if cuts is not None:
            return Grid(tuple(map(self._sequences.add, cuts)), owners)
        columns = [self._sequences.add(np.ascontiguousarray(column)) for column in rows.T]
        return Boxes(tuple(columns[: len(shape)]), tuple(columns[len(shape) :]), owners)

    def finish(
        self,
        *,
        num_files: int,
        aliases: Mapping[str, str] | None = None,
        values: tuple[ValueBlock, ...] = (),
        features: tuple[str, ...] = (),
    ) -> tuple[StateTable, Sequence[bytes]]:
        """The finished table, and the bytes of its sequences."""
        dtypes, shapes, partitions = map(tuple, self._columns)
        writers = self._sequences.add(np.arange(num_files))
        body = StateTable(
            world_size=1,
            reader_features=features,
            names=tuple(self._names),
            dtype_table=tuple(self._dtypes),
            dtypes=dtypes,
            shape_table=tuple(self._shapes),
            shapes=shapes,
            partition_table=tuple(self._partitions),
            partitions=partitions,
            aliases=dict(sorted((aliases or {}).items())),
            num_files=num_files,
            writers=writers,
            values=values,
            sequences=tuple(self._sequences.sequences),
        )
        return body, self._sequences.blobs


def _whole_cuts(shape: Shape) -> tuple[Int64s, ...]:
    """The cuts of a tensor in one cell, or in none where it has no elements."""
    return tuple(np.asarray([0, extent] if extent else [0], np.int64) for extent in shape)
