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

#: The most bytes that one call receives. With less than 2 MiB, both ends take a tenth more processor time, for updates
#: of the window; many MiB would have left the cache before they are hashed.
_RECEIVED_NBYTES: Final = 4 * BLOCK_NBYTES
#: The most bytes that one call of `sendfile` sends: with 4 MiB it takes more processor time. The call blocks, which
#: costs less than to wait in `poll`, and the system ends it when the other end takes nothing for `_STALL_S`. So a peer
#: that is never quite so slow ends half a minute after its deadline at the latest.
_SENT_NBYTES: Final = 16 * BLOCK_NBYTES
_STALL_S: Final = 0.1
_TIMEVAL: Final = struct.Struct("@ll")
#: Time after which a connection breaks whose other end acknowledges nothing, not even a probe: a node that is lost, or
#: cut off, closes no connection. Probes begin after some seconds of silence.
LOST_S: Final = 15
_SILENT_S: Final = 5
_PROBE_S: Final = 2

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
        connection.setblocking(True)  # for `sendfile` alone
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(_SILENT_S, LOST_S))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)
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
        view, done, reported, end_s = out.data, 0, 0, deadline()
        while done < len(view):
            done += self._received(view[done : done + _RECEIVED_NBYTES], end_s)
            while reported < done and (done - reported >= BLOCK_NBYTES or done == len(view)):
                reported = min(reported + BLOCK_NBYTES, done)
                received(reported)
                end_s = deadline()

    def cut(self) -> None:
        """End the connection: the thread that uses it gets an error. Never raises."""
        with self._ending, suppress(OSError):  # it is closed, or the other end has closed it
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Release the socket. Only for the thread that uses it. Never raises."""
        self.cut()
        with self._ending:
            self._socket.close()

    def _limit_sendfile(self, end_s: float) -> None:
        """Have the system end `sendfile` when the other end takes nothing until `end_s`, or for a while."""
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline is over")
        microseconds = max(int(1e6 * min(left_s, _STALL_S)), 1)  # zero would be no limit
        limit = _TIMEVAL.pack(*divmod(microseconds, 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

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
        fd, end_s, next_block = self._socket.fileno(), deadline(), start + BLOCK_NBYTES
        while start < stop:
            self._limit_sendfile(end_s)
            try:
                sent = os.sendfile(fd, region.fd, start, min(stop - start, _SENT_NBYTES))
            except BlockingIOError:  # the other end took nothing for a while
                continue
            if not sent:
                raise _too_short(region)
            start += sent
            if start >= next_block:
                end_s, next_block = deadline(), start + BLOCK_NBYTES

    def _await_arrival(self, piece: PutPiece, end_s: float) -> None:
        """Wait until the other end's system has acknowledged `piece`, except for its tail; or has sent something or
        closed the connection, which the caller will find."""
        if piece.left is None:
            return
        # The other end may acknowledge the last two packets late.
        packet = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        tail = max(tail_nbytes(piece.nbytes), 2 * packet)
        while (left := self._unacknowledged_nbytes()) and not self._readable.poll(0):
            again_s = piece.left(left)
            if left <= tail:
                return
            if time.monotonic() > end_s:
                raise TimeoutError("the deadline is over")
            time.sleep(again_s)

    def _unacknowledged_nbytes(self) -> int:
        count: int
        (count,) = struct.unpack("@i", fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)))
        return count

    def _push(self, data: memoryview, end_s: float) -> None:
        while data:
            try:
                data = data[self._socket.send(data, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                _poll(self._writable, end_s)

    def _fill(self, out: memoryview, end_s: float) -> None:
        while out:
            out = out[self._received(out, end_s) :]

    def _received(self, out: memoryview, end_s: float) -> int:
        """Wait for bytes, and take as many as there are and `out` has room for. Returns their number."""
        while True:
            try:
                nbytes = self._socket.recv_into(out, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                _poll(self._readable, end_s)
                continue
            if not nbytes:
                raise ConnectionResetError("the other end closed the connection")
            return nbytes


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
