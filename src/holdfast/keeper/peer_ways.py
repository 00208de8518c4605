"""The ways of a keeper to its peers: connections, requests that may fail, and replies that are errors."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final, NamedTuple

import numpy as np

from holdfast.errors import HoldfastError, StorageError
from holdfast.peers.peer_messages import (
    CopyKept,
    Damaged,
    Declined,
    Noted,
    PeerReply,
    PeerRequest,
    PutGeneration,
    RequestRefused,
    Unprotected,
)
from holdfast.peers.transport import PeerConnection, PeerTransport, PutPace

#: Limit for a peer to answer, where nothing says otherwise.
ANSWER_S: Final = 30.0
#: Limit for a connection to a peer.
CONNECT_S: Final = 10.0
#: Time after which a connection that nobody uses is closed. (The peer closes it after a minute.)
_IDLE_S: Final = 20.0

_log = logging.getLogger(__name__)


class Way(NamedTuple):
    """The way to the peer at `address`, and the pace at which slots go there."""

    transport: PeerTransport
    address: str
    secret: bytes
    pace: PutPace | None = None

    def connect(self, timeout_s: float = CONNECT_S) -> PeerConnection:
        """Connect to the peer."""
        return self.transport.connect(self.address, secret=self.secret, timeout_s=timeout_s)


class PeerConnections:
    """Connections that are used again, for many small requests. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._idle: list[tuple[Way, PeerConnection, float]] = []

    @contextmanager
    def to(self, way: Way, *, timeout_s: float) -> Iterator[PeerConnection]:
        """A connection by `way`, for the ``with`` block. After an error in it, it is closed, and so are the others by
        that way: the peer may have been started again."""
        connection = self._taken(way) or way.connect(timeout_s)
        try:
            yield connection
        except BaseException:
            connection.close()
            while (other := self._taken(way)) is not None:
                other.close()
            raise
        with self._lock:
            self._idle.append((way, connection, time.monotonic()))

    def close(self) -> None:
        """Close those that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection, _ in idle:
            connection.close()

    def _taken(self, way: Way) -> PeerConnection | None:
        with self._lock:
            old = [each for each in self._idle if time.monotonic() - each[2] > _IDLE_S]
            found = next((each for each in self._idle if each[0] == way and each not in old), None)
            self._idle = [each for each in self._idle if each is not found and each not in old]
        for _, connection, _ in old:
            connection.close()
        return None if found is None else found[1]


def ask(way: Way, request: PeerRequest, *, timeout_s: float = ANSWER_S) -> PeerReply | None:
    """Make a request whose failure does no harm, since it is made again. Returns the answer, `Noted`, `CopyKept` or
    `Unprotected`; None after a failure."""
    try:
        with way.connect() as connection:
            reply = connection.ask(request, timeout_s=timeout_s)
            if not isinstance(reply, CopyKept | Unprotected):
                require(reply, Noted, way)
            return reply
    except HoldfastError as error:
        _log.info("%s", error)
        return None


def put_generation(
    way: Way, connection: PeerConnection, checkpoint_id: str, generation: bytes, *, timeout_s: float
) -> None:
    """Send the encoded `generation` of a checkpoint. Raises `StorageError` where the peer does not take it."""
    put = PutGeneration(checkpoint_id, len(generation))
    require(connection.put(put, np.frombuffer(generation, np.uint8), timeout_s=timeout_s), Noted, way)


def require(reply: PeerReply, kind: type[PeerReply], way: Way) -> None:
    """Raise `StorageError` unless the peer's reply is of this `kind`."""
    if isinstance(reply, kind):
        return
    reason = reply.reason if isinstance(reply, Declined | Damaged | RequestRefused) else repr(reply)
    raise StorageError(
        f"the keeper at {way.address} does not do what was asked: {reason}",
        code="storage.peer",
        action="No action needed: holdfast tries again. If this goes on, look at that node.",
        retryable=True,
    )
