"""The `Transport` between nodes: TCP connections through which ranks send each other copies of chunks.

Both ends know the order in which chunks go from one to the other, so there are no requests: the sender writes the next
chunk when it has it, and the receiver reads it into its own memory. Every chunk carries a digest, because the checksums
of networks miss errors that must not reach a tensor. A connection that breaks means that the other rank failed or died.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Condition
from types import TracebackType
from typing import NoReturn, Self

import xxhash

from holdfast.cooperative.neighbours import NeighbourGone
from holdfast.errors import StorageError
from holdfast.io.chunks import ChunkReading, Offer
from holdfast.store.base import Bytes

_HELLO = struct.Struct("<16sI")
#: Header of a chunk: its number, its size in bytes and its digest.
_CHUNK = struct.Struct("<QQ8s")
_RETRY_S = 0.01
_LOOPBACK = "127.0.0.1"
#: Addresses that no host has (RFC 5737, RFC 3849), which therefore lie behind the default route.
_OUTSIDE = ("192.0.2.1", "2001:db8::1")


class TcpTransport:
    """The `Transport` of `rank` to ranks of other nodes. Use it as a context manager, which closes its connections.

    The constructor listens at `address`, ``host:port``; `connect` finds the others.
    """

    lends = False

    def __init__(self, rank: int) -> None:
        self._rank = rank
        host = own_host()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._links: dict[int, _Link] = {}
        self._connections: list[socket.socket] = []
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"

    def connect(
        self,
        token: bytes,
        addresses: Mapping[int, str],
        *,
        to_send: Mapping[int, Sequence[int]],
        to_receive: Mapping[int, Sequence[int]],
        end_s: float,
    ) -> None:
        """Connect to all ranks with chunks `to_send` or `to_receive`, which give the numbers of the chunks in their
        order.

        Only the ranks of one operation know its `token`. `end_s` of the monotonic clock ends the waiting for others, in
        sending and receiving too.

        Raises `NeighbourGone` for ranks that it could not connect to.
        """
        ranks = {rank for plan in (to_send, to_receive) for rank, numbers in plan.items() if numbers}
        waiting = {rank for rank in ranks if rank > self._rank}
        met = {rank: self._reach(token, rank, addresses[rank], end_s) for rank in sorted(ranks - waiting)}
        while waiting:
            rank, connection = self._admit(token, waiting, end_s)
            met[rank] = connection
            waiting.remove(rank)
        for rank, connection in met.items():
            self._links[rank] = _Link(rank, connection, to_send.get(rank, ()), to_receive.get(rank, ()), end_s)

    def serving(self, reading: ChunkReading) -> AbstractContextManager[None]:
        """Do nothing: peers send chunks and no other messages."""
        return nullcontext()

    def pass_on(self, ranks: Sequence[int], number: int, buffer: int, data: Bytes) -> None:
        """Send chunk `number` to `ranks` in its turn; returns when the system has accepted all its bytes."""
        for rank in ranks:
            self._links[rank].send(number, data)

    def bring(self, rank: int, number: int, out: Bytes) -> None:
        """Fill `out` with chunk `number` in its turn; blocks until it has arrived.

        Raises:
            StorageError: the network altered the bytes, code ``storage.network``.
            NeighbourGone: the other rank is gone, or too late.
        """
        self._links[rank].receive(number, out)

    def give_back(self, offer: Offer) -> NoReturn:
        """Never called: peers lend nothing."""
        raise AssertionError(f"rank {offer.rank} lends nothing over the network")

    def awaited(self) -> Sequence[int]:
        """None: a rank that waits for a chunk waits in `bring`, which names the other rank."""
        return ()

    def interrupt(self) -> None:
        """Close all connections."""
        self.close()

    def close(self) -> None:
        """End all sending and receiving. Never raises."""
        for connection in (self._listener, *self._connections):
            with suppress(OSError):  # it was never connected, or its other end is gone
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for link in self._links.values():
            link.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reach(self, token: bytes, rank: int, address: str, end_s: float) -> socket.socket:
        host, _, port = address.rpartition(":")
        while True:
            try:
                connection = socket.create_connection((host, int(port)), timeout=_remaining_s(end_s))
            except OSError as error:
                if time.monotonic() > end_s:
                    raise NeighbourGone([rank]) from error
                time.sleep(_RETRY_S)
                continue
            self._connections.append(connection)
            connection.sendall(_HELLO.pack(token, self._rank))
            return connection

    def _admit(self, token: bytes, waiting: set[int], end_s: float) -> tuple[int, socket.socket]:
        while True:
            self._listener.settimeout(_remaining_s(end_s))
            try:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                connection.settimeout(_remaining_s(end_s))
                hello = bytearray(_HELLO.size)
                _fill(connection, memoryview(hello))
            except TimeoutError as error:
                raise NeighbourGone(waiting) from error
            except OSError:  # the client closed the connection before its greeting
                continue
            secret, rank = _HELLO.unpack(hello)
            if secret == token and rank in waiting:
                return rank, connection


class _Link:
    """The connection to one rank, with the order of the chunks in both directions."""

    def __init__(
        self, rank: int, connection: socket.socket, to_send: Sequence[int], to_receive: Sequence[int], end_s: float
    ) -> None:
        self._rank = rank
        self._connection = connection
        self._sending, self._receiving = _Turns(to_send), _Turns(to_receive)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_remaining_s(end_s))

    def send(self, number: int, data: Bytes) -> None:
        header = _CHUNK.pack(number, len(data), xxhash.xxh3_64_digest(data.data))
        with self._sending.turn(number), self._gone():
            self._connection.sendall(header)
            self._connection.sendall(data.data)

    def receive(self, number: int, out: Bytes) -> None:
        header = bytearray(_CHUNK.size)
        with self._receiving.turn(number), self._gone():
            _fill(self._connection, memoryview(header))
            _fill(self._connection, out.data)
        if _CHUNK.unpack(header) != (number, len(out), xxhash.xxh3_64_digest(out.data)):
            raise StorageError(
                f"the network altered bytes that rank {self._rank} sent: they do not match their digest.",
                code="storage.network",
                action="Try again; if it happens again, check the network between the nodes.",
                rank=self._rank,
                retryable=True,
            )

    @contextmanager
    def _gone(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.end()
            raise NeighbourGone([self._rank]) from error

    def end(self) -> None:
        """Release the threads that wait for their turn."""
        self._sending.end()
        self._receiving.end()


class _Turns:
    """The turns of threads that come in any order: each gets its turn in the order of `numbers`, one at a time."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._numbers = deque(numbers)
        self._changed = Condition()

    @contextmanager
    def turn(self, number: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: not self._numbers or self._numbers[0] == number)
        yield
        with self._changed:
            if self._numbers:
                self._numbers.popleft()
            self._changed.notify_all()

    def end(self) -> None:
        """Release all waiting threads. The connection is broken, so each fails at its next use of it."""
        with self._changed:
            self._numbers.clear()
            self._changed.notify_all()


def own_host() -> str:
    """The address of this host in the network through which it reaches the job's ``MASTER_ADDR``.

    On the host that has this address, its name often leads to the loopback (as in the /etc/hosts of Debian), where
    other hosts reach nothing. There it is the address of the default route, if the host has one.
    """
    master = os.environ.get("MASTER_ADDR", "")
    found = _address_towards(master or socket.gethostname())
    if _is_loopback(found) and master and master != "localhost" and not _is_loopback(master):
        outside = map(_address_towards, _OUTSIDE)
        found = next((address for address in outside if not _is_loopback(address)), found)
    return found


def _address_towards(host: str) -> str:
    """The address from which this host reaches `host`, an IPv4 one if it has one; that of the loopback if it cannot."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # sends nothing: only makes the system choose a route
            return str(probe.getsockname()[0])
    return _LOOPBACK


def _is_loopback(host: str) -> bool:
    return host.startswith("127.") or host == "::1"


def _fill(connection: socket.socket, out: memoryview) -> None:
    while len(out):
        count = connection.recv_into(out)
        if not count:
            raise ConnectionResetError("the connection was closed")
        out = out[count:]


def _remaining_s(end_s: float) -> float:
    return max(end_s - time.monotonic(), 0.001)
