"""The messages between neighbours that read for each other: a buffer holds a chunk, and a receiver is done with it.

Two kinds of messages go through the sockets. An offer says that a chunk is in a buffer of the sender. The receiver
sends the same message back when it needs that buffer no longer. A connection that ends while either message is still
due means that the neighbour failed or died.
"""

from __future__ import annotations

import os
import selectors
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock, Thread
from typing import NamedTuple

from holdfast.cooperative.neighbours import Neighbour, NeighbourGone
from holdfast.io.reader import Chunk, ChunkReading, Offer

#: Kind of message, number of the chunk, and number of the buffer: always a buffer of the rank that offered it.
_MESSAGE = struct.Struct("<BQI")
_OFFER, _BACK = 0, 1


class ExpectedChunk(NamedTuple):
    """A chunk that a neighbour reads and of which this rank needs some bytes."""

    rank: int
    chunk: Chunk


class Exchange:
    """The exchange of messages with neighbours during one reading, as its `Partners`."""

    def __init__(self, others: Mapping[int, Neighbour], expected: Iterable[ExpectedChunk], buffer_nbytes: int) -> None:
        self._others = others
        self._expected = {each.chunk.number: each for each in expected}
        self._buffer_nbytes = buffer_nbytes
        #: Messages that each neighbour still has to send.
        self._due = Counter(each.rank for each in self._expected.values())
        self._lock = Lock()

    def awaited(self) -> list[int]:
        """The neighbours that still have messages to send."""
        with self._lock:
            return sorted(rank for rank, due in self._due.items() if due)

    def offer(self, chunk: Chunk, buffer: int) -> None:
        """Tell the neighbours that want `chunk` that it is in buffer number `buffer`."""
        with self._lock:
            self._due.update(chunk.wanted_by)
        for rank in chunk.wanted_by:
            self._send(rank, _OFFER, chunk.number, buffer)

    def give_back(self, offer: Offer) -> None:
        """Tell the neighbour that it may reuse the buffer that it offered."""
        self._send(offer.rank, _BACK, offer.chunk.number, offer.buffer)

    @contextmanager
    def serving(self, reading: ChunkReading) -> Iterator[None]:
        """Pass the messages of neighbours on to `reading` while the ``with`` block runs, from a thread of its own."""
        end = os.eventfd(0, os.EFD_CLOEXEC)
        listener = Thread(target=self._listen, args=(reading, end), name="holdfast-exchange", daemon=True)
        listener.start()
        try:
            yield
        finally:
            os.eventfd_write(end, 1)
            listener.join()
            os.close(end)

    def _send(self, rank: int, kind: int, number: int, buffer: int) -> None:
        # Never blocks for long: there are at most as many messages under way as buffers.
        try:
            self._others[rank].connection.send(_MESSAGE.pack(kind, number, buffer))
        except OSError as error:
            raise NeighbourGone([rank]) from error

    def _listen(self, reading: ChunkReading, end: int) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(end, selectors.EVENT_READ)
                for rank, neighbour in self._others.items():
                    selector.register(neighbour.connection, selectors.EVENT_READ, rank)
                self._pass_on(reading, selector, end)
        except BaseException as error:  # noqa: BLE001 - after any error, the reading must stop waiting
            reading.fail(error)

    def _pass_on(self, reading: ChunkReading, selector: selectors.BaseSelector, end: int) -> None:
        while True:
            for key, _ in selector.select():
                if key.fd == end:
                    return
                if not self._receive(key.data, reading):
                    selector.unregister(key.fileobj)

    def _receive(self, rank: int, reading: ChunkReading) -> bool:
        """Handle one message of a neighbour; False when its connection has ended."""
        try:
            message = self._others[rank].connection.recv(_MESSAGE.size)
        except OSError:
            message = b""
        if len(message) != _MESSAGE.size:
            if rank in self.awaited():
                reading.fail(NeighbourGone([rank]))
            return False
        kind, number, buffer = _MESSAGE.unpack(message)
        with self._lock:
            self._due[rank] -= 1
        if kind == _BACK:
            reading.given_back(buffer)
            return True
        chunk = self._expected[number].chunk
        start = buffer * self._buffer_nbytes
        data = self._others[rank].data[start : start + chunk.stop - chunk.start]
        reading.offered(Offer(rank, buffer, chunk, data))
        return True
