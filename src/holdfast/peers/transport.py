"""The seam between a keeper and what carries its messages and bytes to other keepers.

`tcp` is the reference. Another one (RDMA, say) fulfils `PeerTransport`, and no keeper changes. Both ends of a
connection have proved that they know the secret of the job before the first message passes.

A keeper that sends uses `PeerConnection`; one that receives is a `PeerService`, which threads of a `PeerListener` call.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from holdfast.peers.peer_messages import Get, PeerReply, PeerRequest, Put
from holdfast.store.base import Bytes


@dataclass(frozen=True, slots=True)
class Region:
    """`nbytes` of an open file, from `offset` on: the system sends them without a copy in this process."""

    fd: int
    offset: int
    nbytes: int


class PutPiece(NamedTuple):
    """The next `nbytes` to send. With `left`, they must have arrived at the peer's system when the turn ends, except
    for `tail_nbytes` of them. It is called with the bytes that have not, and returns the time after which to look again
    in seconds."""

    nbytes: int
    left: Callable[[int], float] | None = None


def tail_nbytes(nbytes: int) -> int:
    """The rest of a piece that may be on the way at the end of its turn, so that the link does not run dry."""
    return max(nbytes // 2, 16 << 10)


class PutPace(Protocol):
    """Says when bytes of snapshots are sent, piece by piece: those of puts, and those that a `PeerService` gives at a
    pace. Several connections share it, each with its thread."""

    def turn(self, nbytes: int, end_s: float) -> AbstractContextManager[PutPiece]:
        """Wait for the turn to send some of the `nbytes` that are left. They are sent inside the ``with`` block.

        Raises:
            TimeoutError: the turn has not come at the time `end_s` of the monotonic clock.
        """


class PutSink(Protocol):
    """The place for the bytes of one `PutRange` or `PutGeneration`. One thread calls it: `received` any number of
    times, then either `finish` or `abort` once."""

    @property
    def memory(self) -> Bytes:
        """The memory that the bytes are received into: exactly as many as the request names."""

    def received(self, nbytes: int) -> None:
        """The first `nbytes` of `memory` have arrived. Called after each MiB and at the end, while the new bytes are in
        the cache of this core, so that they can be hashed at little cost. Must not raise."""

    def finish(self) -> PeerReply:
        """All bytes have arrived. Returns the reply for the sender."""

    def abort(self) -> None:
        """The connection broke, or was too slow: no further bytes come. Must not raise."""


class PeerService(Protocol):
    """The requests that a keeper answers for its peers. Threads of the listener call it, one for each connection.

    An error that a method raises becomes a `RequestRefused` with its message, and the connection goes on.
    """

    def answer(self, request: PeerRequest) -> PeerReply:
        """Carry out a request without bytes: all but `Put` and `Get`."""

    def sink(self, put: Put) -> PutSink:
        """The place for the bytes of `put`. The peer sends them only after this has returned."""

    def source(self, get: Get) -> AbstractContextManager[Region | Bytes]:
        """The bytes that `get` asks for. They must not change, and their descriptor must stay open, inside the ``with``
        block. The listener leaves it when all bytes are sent, or the connection broke."""

    def pace(self, get: Get, address: str) -> PutPace | None:
        """The pace at which the bytes of `get` go to the peer at `address`; None: at once."""


class PeerListener(Protocol):
    """Serves peers until it is closed."""

    @property
    def address(self) -> str:
        """The address that peers connect to, ``host:port``."""

    def close(self) -> None:
        """End all connections and threads. Never raises."""


class PeerConnection(Protocol):
    """A connection to the keeper of another node: one request at a time; several streams are several connections.

    Every method raises `StorageError`, code ``storage.peer``, retryable, when the connection breaks or `timeout_s` is
    over. The connection is closed then: make a new one. Peers close connections that are idle for a minute.
    """

    def ask(self, request: PeerRequest, *, timeout_s: float) -> PeerReply:
        """Send a request without bytes, and wait for its reply."""

    def put(self, request: Put, data: Region | Bytes, *, timeout_s: float, pace: PutPace | None = None) -> PeerReply:
        """Send a request and its bytes, exactly as many as it names, and wait for the reply. No byte is sent where the
        peer refuses the request. `pace` says when they are sent; None: at once."""

    def get(self, request: Get, out: Bytes, *, timeout_s: float) -> PeerReply:
        """Fill `out`, which has exactly as many bytes as `request` asks for. Returns `Sent` when it is full. Nothing is
        verified: compare the bytes with the digests of their file."""

    def close(self) -> None:
        """Close the connection. May be called by another thread, whose request then fails. Never raises."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PeerTransport(Protocol):
    """A way to reach the keepers of other nodes."""

    def listen(self, service: PeerService, *, secret: bytes, port: int = 0) -> PeerListener:
        """Serve peers that know `secret` on `port`, or on a free port.

        Raises:
            ConfigurationError: this node cannot listen there, code ``config.peer``.
        """

    def connect(self, address: str, *, secret: bytes, timeout_s: float) -> PeerConnection:
        """Connect to the listener at `address`, and prove on both sides that the other knows `secret`.

        Raises:
            StorageError: the peer cannot be reached, or does not answer in time, code ``storage.peer``; retryable.
            ConfigurationError: what answers there is no keeper of this job and version, code ``config.peer``.
        """
