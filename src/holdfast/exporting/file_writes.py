"""The bytes of new files on their way to a store: large files window by window, small ones together in one window.

To plan the reads of a window and to open the files that it reads takes longer than to read a few MiB. So small files,
whose elements are stored one after another, are put together in one window, and each is written from there as a whole.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from threading import Lock
from typing import Final, Self

import numpy as np
import xxhash
from isal import isal_zlib

from holdfast.checkpoint.stored_state import StoredState
from holdfast.exporting.checksums import joined_checksum
from holdfast.exporting.edge_blocks import EdgeBlocks
from holdfast.exporting.element_source import ElementSource, TensorSegment, read_window, segments_between
from holdfast.exporting.new_folder import NewFile
from holdfast.io.buffers import WindowPools
from holdfast.io.create_only import WriterAround
from holdfast.io.digest import digest_blocks
from holdfast.io.jobs import Extent
from holdfast.io.reread import stored_digests
from holdfast.io.sources import Source
from holdfast.io.writer import write_file
from holdfast.store.base import Bytes, FileWriter, Store

#: Most files of a window that are open at the same time.
_MAX_OPEN: Final = 16


def in_windows(files: Sequence[NewFile], most_nbytes: int) -> Iterator[Sequence[NewFile]]:
    """`files`, as many at a time as fit into a window of `most_nbytes`, or one that does not."""
    held: list[NewFile] = []
    nbytes = 0
    for file in files:
        if held and nbytes + file.aligned_nbytes > most_nbytes:
            yield held
            held, nbytes = [], 0
        held.append(file)
        nbytes += file.aligned_nbytes
    if held:
        yield held


def window_nbytes(files: Sequence[NewFile]) -> int:
    """The size of a window for `files`, each of which begins at a page."""
    return sum(file.aligned_nbytes for file in files)


def write_together(
    files: Sequence[NewFile],
    begin: Callable[[NewFile], FileWriter],
    state: StoredState,
    blocks: EdgeBlocks,
    pools: WindowPools,
    advance: Callable[[int], None],
) -> tuple[dict[str, str], int]:
    """Write and publish files that fit into one window, to the writers that `begin` makes. Blocks until all are
    durable. `advance` gets the number of bytes of each finished file. Returns the digests of the files, and how many
    bytes were read. An error leaves the files that were published before."""
    digests: dict[str, str] = {}
    with _Publications(advance) as written:
        with pools.windows.buffer() as window:
            places = np.cumsum([0, *(file.aligned_nbytes for file in files)]).tolist()
            memory = [window[start:stop] for start, stop in pairwise(places)]
            data = [each[len(file.head) : file.nbytes] for file, each in zip(files, memory, strict=True)]
            parts = [(file.segments, 0, out) for file, out in zip(files, data, strict=True)]
            num_read = read_window(state, parts, blocks, pools.reads)
            for file, held, out in zip(files, memory, data, strict=True):
                digests[file.name] = _completed(file, held, out)
                written.add(file, writer := begin(file))
                writer.write_at(0, held[: file.nbytes + -file.nbytes % writer.alignment])
        # Now another thread may fill the window, while the device makes these files durable.
        written.publish_all()
    return digests, num_read


class _Publications:
    """Files that are written, and are published later, each in its turn. `advance` gets the bytes of each. The end of a
    ``with`` block drops those that are not published."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self._waiting = deque[tuple[NewFile, FileWriter]]()

    def add(self, file: NewFile, writer: FileWriter) -> None:
        """Publish `file` later. Few files stay open."""
        if len(self._waiting) == _MAX_OPEN:
            self._publish_first()
        self._waiting.append((file, writer))

    def publish_all(self) -> None:
        """Publish all files that were added. Blocks until they are durable."""
        while self._waiting:
            self._publish_first()

    def _publish_first(self) -> None:
        file, writer = self._waiting[0]
        writer.publish(file.nbytes)
        self._waiting.popleft()
        self._advance(file.data_nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for _, writer in self._waiting:
            writer.abort()


def _completed(file: NewFile, memory: Bytes, data: Bytes) -> str:
    """Put the head and the trailers of a file around its data, in the pages `memory`. Returns its digest."""
    memory[: len(file.head)] = np.frombuffer(file.head, np.uint8)
    memory[file.nbytes :] = 0
    table, trailed = digest_blocks(data), list[bytes]()
    tensors = [segment for segment in file.segments if isinstance(segment, TensorSegment)]
    checksums = {each.start: isal_zlib.crc32(data[each.start : each.start + each.nbytes].data) for each in tensors}
    for start, made in file.trailed(lambda at: checksums.get(at, 0)):
        data[start : start + len(made)] = np.frombuffer(made, np.uint8)
        trailed.append(made)
    return _digest(file, table, trailed)


def write_by_windows(
    file: NewFile,
    writer: FileWriter,
    state: StoredState,
    blocks: EdgeBlocks,
    pools: WindowPools,
    advance: Callable[[int], None],
) -> tuple[str, int]:
    """Write and publish one file, several windows at the same time. Blocks until it is durable. `advance` gets the
    number of bytes of each finished window. Returns the file's digest, and how many bytes were read."""
    source: Source
    source = elements = ElementSource(state, file.segments, blocks, pools.reads, advance)
    trailed: list[bytes] = []
    if file.trailers:
        source = checksummed = _ChecksummedSource(source, file)
        writer = _TrailedWriter(writer, file, checksummed, trailed)
    table = write_file(writer, [source], data_start=len(file.head), header=file.head, pool=pools.windows)
    return _digest(file, table, trailed), elements.bytes_read


def stored_digest(storage: Store, file: NewFile) -> str:
    """The digest of a file as it is stored now. Blocking: reads it once."""
    start = len(file.head)
    head = storage.read(file.name, start=0, nbytes=start)
    blanks = [Extent(at, at + len(made)) for at, made in file.trailed(lambda _: 0)]
    table, trailers = stored_digests(storage, file.name, data_start=start, data_nbytes=file.data_nbytes, blanks=blanks)
    return xxhash.xxh3_128_hexdigest(head + table + trailers)


def _digest(file: NewFile, table: bytes, trailed: Sequence[bytes]) -> str:
    """The digest of a file: of its head, of the digest table of its data, and of the trailers, zeros in the table."""
    return xxhash.xxh3_128_hexdigest(file.head + table + b"".join(trailed))


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


class _TrailedWriter(WriterAround):
    """A writer that puts the trailers into a file before it publishes it."""

    def __init__(self, writer: FileWriter, file: NewFile, source: _ChecksummedSource, trailed: list[bytes]) -> None:
        """`trailed` gets the bytes of the trailers."""
        super().__init__(writer)
        self._file = file
        self._source = source
        self._trailed = trailed

    def publish(self, nbytes: int) -> None:
        """As `FileWriter.publish`."""
        for start, made in self._file.trailed(self._source.checksum):
            self.write_at(len(self._file.head) + start, np.frombuffer(made, np.uint8))
            self._trailed.append(made)
        super().publish(nbytes)
