"""A TCP socket between two keepers whose every call has a deadline: fixed-size fields, messages, and bytes of files.

A message is its size, the digest of its bytes, and its bytes: the checksums of networks miss errors, and a wrong bit in
a request would send bytes to a wrong place. The bytes of files have no frame: both ends know how many come, and the
digests of the files protect them.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Final

import xxhash

from holdfast.errors import CorruptError
from holdfast.format.container import BLOCK_NBYTES
from holdfast.peers.peer_errors import not_understood
from holdfast.peers.peer_messages import MAX_NBYTES
from holdfast.peers.transport import PutPace, PutPiece, Region, tail_nbytes
from holdfast.store.base import Bytes

#: Size and digest of a message.
_FRAME: Final = struct.Struct("<I8s")

#: Returns the time of the monotonic clock at which the next piece of up to `BLOCK_NBYTES` must have passed.
Deadline = Callable[[], float]


def within(seconds: float) -> Deadline:
    """A deadline for all pieces together, `seconds` from now."""
    end_s = time.monotonic() + seconds
    return lambda: end_s


def each_within(seconds: float) -> Deadline:
    """A deadline for each piece, `seconds` after the one before it."""
    return lambda: time.monotonic() + seconds


class Wire:
    """A connected socket, for one thread. Another one may call `cut`, and nothing else.

    All methods that send or receive raise `OSError`: `TimeoutError` when the deadline is over, `ConnectionError` when
    the other end has closed the connection.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        #: Held while the socket is cut or closed: a closed one's descriptor may soon be that of another file.
        self._ending = Lock()
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)

    def wait(self, deadline: Deadline) -> None:
        """Return when the other end has sent something, or has closed the connection."""
        _poll(self._readable, deadline())

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send a field that has a fixed size."""
        self._push(memoryview(data), deadline())

    def receive(self, nbytes: int, deadline: Deadline) -> bytes:
        """Receive a field of `nbytes`."""
        field = bytearray(nbytes)
        self._fill(memoryview(field), deadline())
        return bytes(field)

    def send_message(self, message: bytes, deadline: Deadline) -> None:
        """Send the bytes of a message."""
        self.send(_FRAME.pack(len(message), xxhash.xxh3_64_digest(message)) + message, deadline)

    def receive_message(self, deadline: Deadline) -> bytes:
        """Receive the bytes of a message. Its size is checked before memory is allocated for it.

        Raises:
            StorageError: what came is no message, code ``storage.peer``. The connection is of no use any more.
        """
        nbytes, digest = _FRAME.unpack(self.receive(_FRAME.size, deadline))
        if nbytes > MAX_NBYTES:
            raise not_understood(f"a message of {nbytes:,} bytes")
        message = self.receive(nbytes, deadline)
        if xxhash.xxh3_64_digest(message) != digest:
            raise not_understood("a message that does not match its digest")
        return message

    def send_bytes(self, data: Bytes, deadline: Deadline, pace: PutPace | None = None) -> None:
        """Send all of `data`."""
        view = data.data

        def send(start: int, stop: int) -> None:
            for begin in range(start, stop, BLOCK_NBYTES):
                self._push(view[begin : min(begin + BLOCK_NBYTES, stop)], deadline())

        self._send_pieces(send, len(view), deadline, pace)

    def send_region(self, region: Region, deadline: Deadline, pace: PutPace | None = None) -> None:
        """Send bytes of a file.

        Raises:
            CorruptError: the file is too short.
        """

        def send(start: int, stop: int) -> None:
            self._send_file(region, region.offset + start, region.offset + stop, deadline)

        self._send_pieces(send, region.nbytes, deadline, pace)

    def receive_bytes(self, out: Bytes, deadline: Deadline, received: Callable[[int], None] = lambda _: None) -> None:
        """Fill `out`. Calls `received` with the number of bytes that have arrived, after each block and at the end."""
        view = out.data
        for start in range(0, len(view), BLOCK_NBYTES):
            block = view[start : start + BLOCK_NBYTES]
            self._fill(block, deadline())
            received(start + len(block))

    def cut(self) -> None:
        """End the connection: the thread that uses it gets an error. Never raises."""
        with self._ending, suppress(OSError):  # it is closed, or the other end has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket. Only for the thread that uses it. Never raises."""
        self.cut()
        with self._ending:
            self._socket.close()

    def _send_pieces(
        self, send: Callable[[int, int], None], nbytes: int, deadline: Deadline, pace: PutPace | None
    ) -> None:
        """Send the bytes from 0 to `nbytes` by calls of `send`, as `pace` allows."""
        if pace is None:
            send(0, nbytes)
            return
        start = 0
        while start < nbytes:
            with pace.turn(nbytes - start, deadline()) as piece:
                send(start, start + piece.nbytes)
                self._await_arrival(piece, deadline())
            start += piece.nbytes

    def _send_file(self, region: Region, start: int, stop: int, deadline: Deadline) -> None:
        fd, end_s, next_piece = self._socket.fileno(), deadline(), start + BLOCK_NBYTES
        while start < stop:
            try:
                sent = os.sendfile(fd, region.fd, start, stop - start)
            except BlockingIOError:
                _poll(self._writable, end_s)
                continue
            if not sent:
                raise _too_short(region)
            start += sent
            if start >= next_piece:
                end_s, next_piece = deadline(), start + BLOCK_NBYTES

    def _await_arrival(self, piece: PutPiece, end_s: float) -> None:
        """Wait until the other end's system has acknowledged `piece`, except for its tail; or has sent something or
        closed the connection, which the caller will find."""
        if piece.left is None:
            return
        # The other end may acknowledge the last two packets late.
        packet = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        tail = max(tail_nbytes(piece.nbytes), 2 * packet)
        while (left := self._unacknowledged_nbytes()) > tail and not self._readable.poll(0):
            if time.monotonic() > end_s:
                raise TimeoutError("the deadline is over")
            time.sleep(piece.left(left))

    def _unacknowledged_nbytes(self) -> int:
        count: int
        (count,) = struct.unpack("@i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
        return count

    def _push(self, data: memoryview, end_s: float) -> None:
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                _poll(self._writable, end_s)

    def _fill(self, out: memoryview, end_s: float) -> None:
        while out:
            try:
                nbytes = self._socket.recv_into(out)
            except BlockingIOError:
                _poll(self._readable, end_s)
                continue
            if not nbytes:
                raise ConnectionResetError("the other end closed the connection")
            out = out[nbytes:]


def _poll(poll: select.poll, end_s: float) -> None:
    """Wait until the socket of `poll` is ready. A peer that is never quite too late ends at the deadline, too."""
    left_s = end_s - time.monotonic()
    if left_s <= 0 or not poll.poll(1000 * left_s):
        raise TimeoutError("the deadline is over")


def _too_short(region: Region) -> CorruptError:
    return CorruptError(
        f"a file ends before the {region.nbytes:,} bytes from {region.offset:,} on that were to be sent.",
        code="corrupt.short",
        action="Look who truncates files in the memory of this node.",
        tier="node memory",
    )
