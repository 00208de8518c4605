"""One rank's share of a cooperative reading, by a plan that assigns each chunk to a rank."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np

from holdfast.cooperative.neighbours import Neighbour
from holdfast.cooperative.shared_memory import SharedMemoryTransport
from holdfast.io.buffers import NUM_THREADS
from holdfast.io.chunks import Chunk, ChunkReading, Origin, Route, Transport
from holdfast.io.jobs import FileDelivery, OnCorrupt, ReadJob
from holdfast.io.pages import in_huge_pages
from holdfast.plan.exchange import Chunks
from holdfast.store.base import Bytes


class SharedReading:
    """The reading of the files in `jobs`, by the plan in `chunks`: `jobs` has every file that this rank needs or reads
    for others.

    `others` are the neighbours of `rank`. `buffers` are parts of the memory that they see, each as large as the largest
    chunk. `network` leads to other nodes, where chunks come from or go to them. `num_readers` threads read,
    by requests of up to `request_nbytes` where no other node takes part.
    """

    def __init__(
        self,
        jobs: Mapping[int, ReadJob],
        chunks: Chunks,
        rank: int,
        others: Mapping[int, Neighbour],
        buffers: Sequence[Bytes],
        on_corrupt: OnCorrupt,
        *,
        network: Transport | None = None,
        num_readers: int = NUM_THREADS,
        request_nbytes: int = 0,
    ) -> None:
        me = chunks.ranks.index(rank)
        led, wanted = chunks.leaders == me, chunks.wanted[:, me]
        counts = Counter(chunks.files[led & (chunks.senders < 0)].tolist())
        #: All the bytes that this rank is to read from storage.
        self.nbytes = int((chunks.stops - chunks.starts)[led & (chunks.senders < 0)].sum())
        self._chunks = chunks
        columns = (chunks.numbers, chunks.files, chunks.starts, chunks.stops, chunks.senders)
        self._rows = list(zip(*(column.tolist() for column in columns), strict=True))
        self._memory = SharedMemoryTransport(others, buffer_nbytes=len(buffers[0]))
        self._network = network
        self._transports = (self._memory,) if network is None else (self._memory, network)
        self._targets = {file: FileDelivery(job, num_chunks=counts[file]) for file, job in jobs.items()}
        expected = map(self._lent_chunk, np.flatnonzero(wanted & ~led).tolist())
        self._reading = ChunkReading(
            map(self._led_chunk, np.flatnonzero(led).tolist()),
            buffers,
            on_corrupt,
            num_readers=num_readers,
            # Chunks between nodes go and come in their order, from which the requests of several threads would depart.
            request_nbytes=request_nbytes if network is None else 0,
            transports=self._transports,
            expected={chunk.number: chunk for chunk in expected},
            prepare=in_huge_pages() if others else lambda _: None,
        )

    @property
    def bytes_read(self) -> int:
        """The bytes that this rank has read from storage so far."""
        return self._reading.bytes_read

    @property
    def verify_s(self) -> float:
        """The seconds that this rank's threads have spent on digests so far."""
        return self._reading.verify_s

    def awaited(self) -> tuple[int, ...]:
        """The ranks that this rank waits for; none while it reads from storage itself."""
        return () if self._reading.is_reading else tuple(rank for each in self._transports for rank in each.awaited())

    def run(self) -> None:
        """Read; blocks until this rank has all bytes that it needs, and the others have all bytes that it reads for
        them.

        Raises what `ChunkReading.run` raises, and `NeighbourGone` when a rank failed or died that this one waits for.
        """
        with ExitStack() as stack:
            for transport in self._transports:
                stack.enter_context(transport.serving(self._reading))
            self._reading.run()

    def stop(self) -> None:
        """As `ChunkReading.stop`."""
        self._reading.stop()

    def _lent_chunk(self, index: int) -> Chunk:
        """A chunk that a neighbour lends to this rank."""
        number, file, start, stop, _ = self._rows[index]
        leader = self._chunks.ranks[self._chunks.leaders[index]]
        return Chunk(number, self._targets[file], start, stop, Origin(self._memory, leader))

    def _led_chunk(self, index: int) -> Chunk:
        """A chunk that this rank reads, or takes from another node, for all ranks of its node that want it."""
        number, file, start, stop, sender = self._rows[index]
        consumers = self._chunks.consumers(index) if len(self._chunks.ranks) > 1 else []
        routes = [Route(self._memory, consumers)] if consumers else []
        origin = None
        if self._network is not None:
            receivers = self._chunks.receivers[index]
            routes += [Route(self._network, receivers)] if receivers else []
            origin = Origin(self._network, sender) if sender >= 0 else None
        return Chunk(number, self._targets[file], start, stop, origin, routes)


def sent_and_received(chunks: Chunks, rank: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """The numbers of the chunks that `rank` sends to each rank of another node, and of those that it receives from
    each, in their order."""
    to_send: defaultdict[int, list[int]] = defaultdict(list)
    to_receive: defaultdict[int, list[int]] = defaultdict(list)
    for index in np.flatnonzero(chunks.leaders == chunks.ranks.index(rank)).tolist():
        number, sender = int(chunks.numbers[index]), int(chunks.senders[index])
        if sender >= 0:
            to_receive[sender].append(number)
        for receiver in chunks.receivers[index]:
            to_send[receiver].append(number)
    return to_send, to_receive
