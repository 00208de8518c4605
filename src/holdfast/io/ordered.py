"""Files for stores that write in order: their head, which holds the digests of all data, is written first.

So the data is read twice: once for its digests, once to be written. What lies in memory is neither copied for the one
nor for the other. It is hashed again after it was written, and a difference is an error, so no file has bytes that do
not fit its digests. Whoever can change the memory and change it back in between must check for that, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import StateError
from holdfast.format.container import BLOCK_NBYTES
from holdfast.format.digests import DigestKind
from holdfast.io.buffers import BufferedChunks, BufferPool
from holdfast.io.digest import digest_pieces
from holdfast.io.meter import Meter
from holdfast.io.sources import JoinedSources, Source
from holdfast.store.base import Bytes, FileWriter


class OrderedData:
    """The data section of a file for a writer that writes in order."""

    def __init__(self, sources: Sequence[Source], pool: BufferPool, num_threads: int, kind: DigestKind) -> None:
        """`num_threads` threads work on chunks of one buffer of `pool` each. The digests are of this `kind`."""
        self._sources = JoinedSources(sources)
        self._pool, self._num_threads, self._kind = pool, num_threads, kind
        self.nbytes = self._sources.nbytes

    def digests(self) -> bytes:
        """The digest table of the data, as it is now."""
        chunks = self._chunks()
        found = [b""] * chunks.number

        def digest(chunk: int, start: int, nbytes: int, buffer: Bytes) -> None:
            found[chunk] = digest_pieces(self._sources.pieces(start, start + nbytes, buffer), self._kind)

        chunks.run(digest)
        return b"".join(found)

    def write(self, writer: FileWriter, data_start: int, expected: bytes | None, meter: Meter | None) -> bytes:
        """Write the data to `writer`, from `data_start` on, and return its digest table.

        Raises `StateError`, code ``state.changed``, where it differs from `expected`. Without `expected`, all data is
        copied before it is written and hashed.
        """
        chunks = self._chunks()
        found = [b""] * chunks.number

        def write(chunk: int, start: int, nbytes: int, buffer: Bytes) -> None:
            if expected is None:
                pieces = [buffer[:nbytes]]
                self._sources.read_into(start, pieces[0])
            else:
                pieces = self._sources.pieces(start, start + nbytes, buffer)
            writer.write_at(data_start + start, *pieces)
            found[chunk] = digest_pieces(pieces, self._kind)
            at = start // BLOCK_NBYTES * self._kind.nbytes
            if expected is not None and found[chunk] != expected[at : at + len(found[chunk])]:
                raise changed()

        if meter is not None:
            meter.follow(self.nbytes, lambda: chunks.nbytes_begun)
        chunks.run(write, stop=writer.abort)
        return b"".join(found)

    def _chunks(self) -> BufferedChunks:
        return BufferedChunks(self.nbytes, self._pool, self._num_threads)


def changed() -> StateError:
    """The error for data that changed between its digests and its end."""
    return StateError(
        "the state changed while it was saved: the bytes that were written are not those of a moment before.",
        code="state.changed",
        action="Do not train, and change nothing in the state, until the save has returned.",
    )
