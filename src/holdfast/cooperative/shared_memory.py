"""The `Transport` between neighbours: they lend each other chunks in shared memory, and send messages about them.

Two kinds of messages go through the sockets. An offer says that a chunk is in a buffer of the sender. The receiver
sends the same message back when it needs that buffer no longer. A connection that ends while either message is still
due means that the neighbour failed or died.
"""

from __future__ import annotations

import os
import selectors
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Lock, Thread
from typing import NoReturn

from holdfast.cooperative.neighbours import Neighbour, NeighbourGone
from holdfast.io.chunks import ChunkReading, Offer
from holdfast.store.base import Bytes

#: Kind of message, number of the chunk, and number of the buffer: always a buffer of the rank that offered it.
_MESSAGE = struct.Struct("<BQI")
_OFFER, _BACK = 0, 1


class SharedMemoryTransport:
    """The `Transport` to the neighbours `others`: it lends them buffers of `buffer_nbytes` in memory that they see."""

    lends = True

    def __init__(self, others: Mapping[int, Neighbour], *, buffer_nbytes: int) -> None:
        self._others = others
        self._buffer_nbytes = buffer_nbytes
        #: Messages that each neighbour still has to send.
        self._due: Counter[int] = Counter()
        self._lock = Lock()

    def awaited(self) -> Sequence[int]:
        """The neighbours that still have messages to send."""
        with self._lock:
            return sorted(rank for rank, due in self._due.items() if due)

    def pass_on(self, ranks: Sequence[int], number: int, buffer: int, data: Bytes) -> None:
        """Tell `ranks` that chunk `number` is in buffer number `buffer`."""
        with self._lock:
            self._due.update(ranks)
        for rank in ranks:
            self._send(rank, _OFFER, number, buffer)

    def bring(self, rank: int, number: int, out: Bytes) -> NoReturn:
        """Never called: neighbours lend."""
        raise AssertionError(f"neighbour {rank} lends chunk {number} and does not send it")

    def interrupt(self) -> None:
        """Do nothing: no call blocks for long."""

    def give_back(self, offer: Offer) -> None:
        """Tell the neighbour that it may reuse the buffer that it offered."""
        self._send(offer.rank, _BACK, offer.chunk.number, offer.buffer)

    @contextmanager
    def serving(self, reading: ChunkReading) -> Iterator[None]:
        """Pass the messages of neighbours on to `reading` while the ``with`` block runs, from a thread of its own."""
        self._due.update(chunk.origin.rank for chunk in reading.expected.values() if chunk.origin)
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
        chunk = reading.expected[number]
        start = buffer * self._buffer_nbytes
        data = self._others[rank].data[start : start + chunk.stop - chunk.start]
        reading.offered(Offer(self, rank, buffer, chunk, data))
        return True
