"""The reference `PeerTransport`: TCP.

A put is a request, a `Noted` of the peer that has a place for the bytes, the bytes, and a reply; a get is a request, a
`Sent`, and the bytes. Any other request is answered by one reply.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from types import TracebackType
from typing import Self

from holdfast.errors import StorageError
from holdfast.peers import handshake
from holdfast.peers.peer_errors import not_understood, peer_failed
from holdfast.peers.peer_messages import (
    Get,
    Noted,
    PeerReply,
    PeerRequest,
    Put,
    Sent,
    decode_reply,
    encode_message,
)
from holdfast.peers.tcp_listener import DEFAULT_LIMITS, PeerLimits, TcpListener
from holdfast.peers.transport import PeerService, PutPace, Region
from holdfast.peers.wire import Deadline, Wire, within
from holdfast.store.base import Bytes


class TcpPeers:
    """TCP between keepers. Its listeners are at `host`, an address of this node that other nodes can reach."""

    def __init__(self, host: str, *, limits: PeerLimits = DEFAULT_LIMITS) -> None:
        self._host, self._limits = host, limits

    def listen(self, service: PeerService, *, secret: bytes, port: int = 0) -> TcpListener:
        """Serve peers that know `secret`; see `PeerTransport.listen`."""
        handshake.check_secret(secret)
        return TcpListener(service, secret=secret, host=self._host, port=port, limits=self._limits)

    def connect(self, address: str, *, secret: bytes, timeout_s: float) -> TcpConnection:
        """Connect to the listener at `address`; see `PeerTransport.connect`."""
        handshake.check_secret(secret)
        host, _, port = address.rpartition(":")
        deadline = within(timeout_s)
        try:
            wire = Wire(socket.create_connection((host, int(port)), timeout=timeout_s))
        except OSError as error:
            raise peer_failed(address, f"cannot be reached: {error}") from error
        try:
            handshake.introduce(wire, address, secret=secret, deadline=deadline)
        except TimeoutError as error:
            wire.close()
            raise peer_failed(address, f"did not answer within {timeout_s:g} s") from error
        except OSError as error:
            wire.close()
            raise peer_failed(address, f"closed the connection before it was established: {error}") from error
        except BaseException:
            wire.close()
            raise
        return TcpConnection(wire, address)


class TcpConnection:
    """A `PeerConnection`, whose two ends have proved who they are."""

    def __init__(self, wire: Wire, address: str) -> None:
        self._wire, self._address = wire, address
        #: Held during a request, and by the thread that closes the socket.
        self._in_use = Lock()
        self._is_closed = False

    def ask(self, request: PeerRequest, *, timeout_s: float) -> PeerReply:
        """Send a request without bytes, and wait for its reply."""
        with self._exchange(request, timeout_s) as deadline:
            return self._reply(deadline)

    def put(self, request: Put, data: Region | Bytes, *, timeout_s: float, pace: PutPace | None = None) -> PeerReply:
        """Send a request and its bytes, and wait for the reply."""
        _require_size(data.nbytes, request.nbytes)
        with self._exchange(request, timeout_s) as deadline:
            reply = self._reply(deadline)
            if not isinstance(reply, Noted):
                return reply
            if isinstance(data, Region):
                self._wire.send_region(data, deadline, pace)
            else:
                self._wire.send_bytes(data, deadline, pace)
            return self._reply(deadline)

    def get(self, request: Get, out: Bytes, *, timeout_s: float) -> PeerReply:
        """Fill `out` with the bytes that `request` asks for."""
        _require_size(out.nbytes, request.nbytes)
        with self._exchange(request, timeout_s) as deadline:
            reply = self._reply(deadline)
            if isinstance(reply, Sent):
                if reply.nbytes != request.nbytes:
                    raise not_understood("another number of bytes than it was asked for", address=self._address)
                self._wire.receive_bytes(out, deadline)
            return reply

    def close(self) -> None:
        """Close the connection; a request that another thread makes fails. Never raises."""
        self._is_closed = True
        self._wire.cut()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _exchange(self, request: PeerRequest, timeout_s: float) -> Iterator[Deadline]:
        """Send `request`. After an error, nobody knows what comes next on the connection, so it is closed."""
        message, deadline = encode_message(request), within(timeout_s)
        try:
            with self._in_use:
                if self._is_closed:
                    raise peer_failed(self._address, "is no longer connected")
                try:
                    self._wire.send_message(message, deadline)
                    yield deadline
                except OSError as error:
                    if isinstance(error, TimeoutError) and error.errno is None:  # else the system got no sign of life
                        raise peer_failed(self._address, f"did not answer within {timeout_s:g} s") from error
                    raise peer_failed(self._address, f"broke the connection: {error}") from error
        except BaseException:
            self._is_closed = True
            raise
        finally:
            if self._is_closed:
                self._release()

    def _release(self) -> None:
        """Close the socket, unless a request is under way: its thread does so at the end."""
        if self._in_use.acquire(blocking=False):
            self._wire.close()
            self._in_use.release()

    def _reply(self, deadline: Deadline) -> PeerReply:
        try:
            return decode_reply(self._wire.receive_message(deadline))
        except StorageError as error:
            raise not_understood("no reply of a keeper", address=self._address) from error


def _require_size(given: int, named: int) -> None:
    if given != named:
        raise ValueError(f"the request names {named:,} bytes, and {given:,} were given")
