"""A checkpoint's pieces in the order of its files: each file is read once, front to back, in bounded memory."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holdfast.checkpoint.stored_state import StoredState
from holdfast.format.container import BLOCK_NBYTES, Entry, FileLayout
from holdfast.geometry import Box, FlatRange, flat_boxes
from holdfast.io.buffers import BufferPool
from holdfast.io.digest import bad_blocks
from holdfast.io.jobs import DataFile
from holdfast.store.base import Bytes
from holdfast.view.source import ViewSource
from holdfast.view.tensor import as_numpy, numpy_dtype

#: Limit of a piece; larger ones are given in several parts.
MAX_PIECE_NBYTES = 64 << 20
#: Bytes that are read ahead at a time.
_WINDOW_NBYTES = 8 * BLOCK_NBYTES


class Piece(NamedTuple):
    """A stored part of a tensor. `array` has the elements of `part`: in the shape of a box, or flat for a range."""

    name: str
    part: Box | FlatRange
    array: npt.NDArray[Any]


def in_file_order(source: ViewSource, tensors: Collection[int]) -> Iterator[Piece]:
    """All stored pieces of `tensors`, file by file."""
    for index in range(source.checkpoint.manifest.body.num_files):
        layout = source.checkpoint.files.layout(index)
        entries = [entry for entry in layout.entries if entry.tensor in tensors]
        if not entries:
            continue
        section = source.section(index, layout.data_start, layout.data_nbytes)
        if section is None:
            yield from _read(source, layout, entries)
            continue
        for entry in entries:
            held = section[entry.offset : entry.offset + entry.nbytes]
            is_odd = entry.offset % source.carrier(entry.tensor).itemsize  # only in files of other systems
            yield from _pieces(source, entry, 0, held.copy() if is_odd else held)


def _read(source: ViewSource, layout: FileLayout, entries: Sequence[Entry]) -> Iterator[Piece]:
    checkpoint = source.checkpoint
    file = checkpoint.open_file(
        layout.index, data_start=layout.data_start, data_nbytes=layout.data_nbytes, verify=source.verify
    )
    with (
        closing(file.reader),
        BufferPool(2 * _WINDOW_NBYTES, buffer_nbytes=_WINDOW_NBYTES) as pool,
        pool.buffer() as one,
        pool.buffer() as other,
        ThreadPoolExecutor(1) as helper,  # entered last, so closed first: it may still read ahead into a buffer
    ):
        front = _Front(checkpoint, file, _windows(entries), (one, other), helper)
        for entry in entries:
            for start in range(0, entry.nbytes, MAX_PIECE_NBYTES):
                data = np.empty(min(entry.nbytes - start, MAX_PIECE_NBYTES), np.uint8)
                front.read_into(entry.offset + start, data)
                yield from _pieces(source, entry, start, data)


def _pieces(source: ViewSource, entry: Entry, start: int, data: Bytes) -> Iterator[Piece]:
    """The bytes of an entry from `start` on: as one piece, or as several boxes if they are only a part of a box."""
    manifest, carrier = source.checkpoint.manifest, source.carrier(entry.tensor)
    try:
        dtype = numpy_dtype(manifest.dtype(entry.tensor))
    except TypeError:
        dtype = carrier
    elements = as_numpy(data, dtype, writeable=source.verify)
    name, part, first = manifest.body.names[entry.tensor], entry.part, start // carrier.itemsize
    if isinstance(part, FlatRange):
        yield Piece(name, FlatRange(part.start + first, part.start + first + len(elements)), elements)
    elif len(data) == entry.nbytes:
        yield Piece(name, part, elements.reshape(part.size))
    else:
        for offset, box in flat_boxes(part.size, first, first + len(elements)):
            at = tuple(a + o for a, o in zip(part.start, box.start, strict=True))
            yield Piece(name, Box(at, box.size), elements[offset : offset + box.numel].reshape(box.size))


def _windows(entries: Sequence[Entry]) -> list[int]:
    """The numbers of the windows of a data section that hold bytes of `entries`."""
    starts = np.asarray([entry.offset for entry in entries], np.int64) // _WINDOW_NBYTES
    stops = -(-np.asarray([entry.offset + entry.nbytes for entry in entries], np.int64) // _WINDOW_NBYTES)
    fresh = np.maximum(starts, np.r_[0, stops[:-1]])  # earlier windows already hold bytes of the previous entry
    return [number for low, high in zip(fresh.tolist(), stops.tolist(), strict=True) for number in range(low, high)]


class _Front:
    """Reads a data section in windows of one buffer each, once, and verifies them; it is always one window ahead."""

    def __init__(
        self,
        checkpoint: StoredState,
        file: DataFile,
        windows: Sequence[int],
        buffers: tuple[Bytes, Bytes],
        helper: ThreadPoolExecutor,
    ) -> None:
        self._checkpoint = checkpoint
        self._file = file
        self._windows = windows
        self._buffers = buffers
        self._helper = helper
        #: The number of windows taken so far; `_data` is the last of them.
        self._num_taken = 0
        self._data = buffers[0][:0]
        self._coming = self._begin(0)

    def read_into(self, start: int, out: Bytes) -> None:
        """Fill `out` from byte `start` of the section on; `start` never falls from one call to the next."""
        while len(out):
            number, skipped = divmod(start, _WINDOW_NBYTES)
            while not self._num_taken or self._windows[self._num_taken - 1] < number:
                self._take()
            held = self._data[skipped : skipped + len(out)]
            out[: len(held)] = held
            start, out = start + len(held), out[len(held) :]

    def _take(self) -> None:
        self._data = self._coming.result()
        self._num_taken += 1
        # The buffer of the previous window is free now.
        if self._num_taken < len(self._windows):
            self._coming = self._begin(self._num_taken)

    def _begin(self, index: int) -> Future[Bytes]:
        return self._helper.submit(self._window, self._windows[index], self._buffers[index % 2])

    def _window(self, number: int, buffer: Bytes) -> Bytes:
        file, start = self._file, number * _WINDOW_NBYTES
        data = buffer[: min(file.data_nbytes - start, len(buffer))]
        file.reader.read_at(file.data_start + start, data)
        if file.table is not None:
            bad = bad_blocks(data, file.table, first=start // BLOCK_NBYTES, kind=file.digests)
            if bad:
                raise self._checkpoint.corrupt_block(file, bad[0])
        return data
