"""One rank's part of what several ranks read together, by a plan that says who reads what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from holdfast.plan.exchange import Chunks
from holdfast.storage.base import Bytes
from holdfast.transfer.buffers import NUM_THREADS
from holdfast.transfer.exchange import Exchange, Expected
from holdfast.transfer.neighbours import Neighbour
from holdfast.transfer.reader import Chunk, OnCorrupt, Reading, ReadJob, Target


class SharedReading:
    """Fills what `jobs` (by file) want, from what `rank` and its neighbours `others` read as `chunks` say.

    `buffers` are the memory that the neighbours see, in parts of the size of the largest chunk.
    """

    def __init__(
        self,
        jobs: Mapping[int, ReadJob],
        chunks: Chunks,
        rank: int,
        others: Mapping[int, Neighbour],
        buffers: Sequence[Bytes],
        on_corrupt: OnCorrupt,
    ) -> None:
        me = chunks.ranks.index(rank)
        own = np.flatnonzero(chunks.readers == me)
        received = np.flatnonzero(chunks.wanted[:, me] & (chunks.readers != me))
        counts = Counter(chunks.files[own].tolist())
        targets = {file: Target(job, num_chunks=counts[file]) for file, job in jobs.items()}

        def chunk(number: int, wanted_by: Sequence[int]) -> Chunk:
            file, start, stop = (int(column[number]) for column in (chunks.files, chunks.starts, chunks.stops))
            return Chunk(number, targets[file], start, stop, wanted_by)

        expected = [Expected(chunks.ranks[chunks.readers[n]], chunk(n, ())) for n in received.tolist()]
        self._exchange = Exchange(others, expected, len(buffers[0]))
        self._reading = Reading(
            (chunk(number, chunks.consumers(number)) for number in own.tolist()),
            buffers,
            on_corrupt,
            partners=self._exchange,
            num_offers=len(expected),
        )

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank read from storage so far."""
        return self._reading.bytes_read

    def awaited(self) -> tuple[int, ...]:
        """The neighbours that are waited for; none while this rank waits for storage itself."""
        return () if self._reading.is_reading else tuple(self._exchange.awaited())

    def run(self) -> None:
        """Do it; returns when this rank has all it wants, and the others have all that it read for them.

        Raises what reading raises, and `NeighbourGone` when a neighbour failed or died that is still waited for.
        """
        with self._exchange.serving(self._reading):
            self._reading.run(NUM_THREADS)

    def stop(self) -> None:
        """As `Reading.stop`."""
        self._reading.stop()
