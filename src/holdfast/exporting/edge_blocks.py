"""The blocks at the edges of windows: several windows need elements of each, and it is read once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Condition
from typing import Final

from holdfast.format.container import BLOCK_NBYTES
from holdfast.io.buffers import NUM_THREADS
from holdfast.io.jobs import DataFile, ReadJob
from holdfast.store.base import Bytes, FileReader

#: Blocks of each file that are kept for each thread: two of its window, and those that the threads beside it read until
#: it comes to the window that ends where another thread's first one began.
_BLOCKS_OF_FILE: Final = 8
#: Most blocks that are kept.
_MAX_BLOCKS: Final = 192


class EdgeBlocks:
    """The first and the last block of each of `num_files` files' reads for a window, kept for the windows beside it.

    Windows follow the order of the stored elements, so the last block of one is mostly the first of the next. The
    reader verifies a kept block like any other. Safe for several threads, which read different windows.
    """

    def __init__(self, num_files: int) -> None:
        self._max_blocks = min(_BLOCKS_OF_FILE * NUM_THREADS * num_files, _MAX_BLOCKS)
        self._blocks: OrderedDict[tuple[str, int], Bytes] = OrderedDict()
        #: The blocks that threads are reading. Other threads wait for these instead of reading them again.
        self._coming: set[tuple[str, int]] = set()
        self._changed = Condition()

    def shared(self, job: ReadJob, count: Callable[[int], None]) -> ReadJob:
        """`job`, with its file read through these blocks. `count` gets the numbers of bytes that are read."""
        ranges = job.ranges()
        edges = () if not len(ranges) else (int(ranges[0, 0]), (int(ranges[-1, 1]) - 1) // BLOCK_NBYTES * BLOCK_NBYTES)
        return job._replace(open=partial(self._open, job, edges if job.verify else (), count))

    def _open(self, job: ReadJob, edges: tuple[int, ...], count: Callable[[int], None]) -> DataFile:
        file = job.open()
        offsets = sorted({file.data_start + edge for edge in edges})
        return replace(file, reader=_EdgeReader(file.reader, file.path, offsets, self, count))

    def fetch(self, path: str, offset: int, out: Bytes, read: Callable[[int, Bytes], None]) -> None:
        """Fill `out` with a block of the file `path`: the kept one, or what `read` reads, which is kept."""
        key = path, offset
        with self._changed:
            self._changed.wait_for(lambda: key not in self._coming)
            block = self._blocks.get(key)
            if block is not None and len(block) == len(out):
                self._blocks.move_to_end(key)
                out[:] = block
                return
            self._coming.add(key)
        try:
            read(offset, out)
            with self._changed:
                self._blocks[key] = out.copy()
                if len(self._blocks) > self._max_blocks:
                    self._blocks.popitem(last=False)
        finally:
            with self._changed:
                self._coming.discard(key)
                self._changed.notify_all()


class _EdgeReader:
    """A file whose blocks at `edges`, ascending offsets in the file, are kept."""

    def __init__(
        self, reader: FileReader, path: str, edges: list[int], blocks: EdgeBlocks, count: Callable[[int], None]
    ) -> None:
        self._reader = reader
        self._path = path
        self._edges = edges
        self._blocks = blocks
        self._count = count
        self.nbytes = reader.nbytes
        self.memory = reader.memory

    @property
    def alignment(self) -> int:
        """As `FileReader.alignment`."""
        return self._reader.alignment

    def read_at(self, offset: int, out: Bytes) -> None:
        """As `FileReader.read_at`."""
        while len(out):
            edge = next((edge for edge in self._edges if edge >= offset), None)
            if edge == offset:
                nbytes = min(BLOCK_NBYTES, len(out))
                self._blocks.fetch(self._path, offset, out[:nbytes], self._read)
            else:
                nbytes = len(out) if edge is None else min(edge - offset, len(out))
                self._read(offset, out[:nbytes])
            offset, out = offset + nbytes, out[nbytes:]

    def _read(self, offset: int, out: Bytes) -> None:
        self._reader.read_at(offset, out)
        self._count(len(out))

    def close(self) -> None:
        """As `FileReader.close`."""
        self._reader.close()
