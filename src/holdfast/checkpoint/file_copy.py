"""The copy of one data file of a checkpoint, which is verified before it appears.

A data file's header is a function of its manifest and its digest table, and the seal has the digest of that table. So
the header is made anew, with the checkpoint's own id, wherever the bytes come from: the copy of a file that an earlier
checkpoint holds is the checkpoint's own file, and damage of a header does not spread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.format import container
from holdfast.format.container import FileLayout
from holdfast.io.buffers import NUM_THREADS, BufferPool
from holdfast.io.jobs import DataFile
from holdfast.io.writer import write_file
from holdfast.store.base import Bytes, FileWriter


def write_copy(
    checkpoint: Checkpoint,
    layout: FileLayout,
    writer: FileWriter,
    *,
    pool: BufferPool,
    num_threads: int = NUM_THREADS,
    advance: Callable[[int], None] = lambda _: None,
) -> None:
    """Write the data file of `layout` once more, from the nearest of its copies; durable on return.

    All bytes are compared with the digests of the seal before `writer` publishes them. `advance` hears of the bytes of
    each read, and may raise to end the copy. Takes one buffer per thread from `pool`.

    Raises `CorruptError` where the file is damaged or missing. On any error the writer is aborted.
    """
    try:
        source = checkpoint.open_file(layout.index, data_start=layout.data_start, data_nbytes=layout.data_nbytes)
    except BaseException:
        writer.abort()
        raise
    expected = source.table
    assert expected is not None
    try:
        write_file(
            writer,
            [_StoredData(source, advance)],
            data_start=layout.data_start,
            header=container.header(checkpoint.manifest, layout, expected),
            pool=pool,
            num_threads=num_threads,
            check=lambda table: _check(checkpoint, source, table, expected),
            kind=source.digests,
        )
    finally:
        source.reader.close()


def _check(checkpoint: Checkpoint, source: DataFile, table: bytes, expected: bytes) -> None:
    """Raise `CorruptError` where the digests of the bytes that were read are not those of the file."""
    if table == expected:
        return
    nbytes = source.digests.nbytes
    starts = range(0, len(table), nbytes)
    at = next(at for at in starts if table[at : at + nbytes] != expected[at : at + nbytes])
    raise checkpoint.corrupt_block(source, at // nbytes)


class _StoredData(NamedTuple):
    """The data section of a stored file, as a `Source`."""

    file: DataFile
    advance: Callable[[int], None]

    @property
    def nbytes(self) -> int:
        """As `Source.nbytes`."""
        return self.file.data_nbytes

    def read_into(self, start: int, out: Bytes) -> None:
        """As `Source.read_into`."""
        self.file.reader.read_at(self.file.data_start + start, out)
        self.advance(len(out))
