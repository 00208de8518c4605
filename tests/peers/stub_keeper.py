"""A keeper that holds what its peers send in plain arrays, for tests of what lies between keepers."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

import numpy as np

from holdfast.errors import StorageError
from holdfast.peers.peer_messages import (
    CopyKept,
    Damaged,
    Declined,
    Finish,
    Get,
    GetRange,
    Noted,
    OfferCopy,
    PeerReply,
    PeerRequest,
    Put,
    PutRange,
)
from holdfast.peers.tcp import TcpConnection, TcpPeers
from holdfast.peers.tcp_listener import PeerLimits, TcpListener
from holdfast.peers.transport import PutPace, Region
from holdfast.store.base import Bytes

HOST = "127.0.0.1"
SECRET = bytes(range(32))
CHECKPOINT = "0123456789abcdef"
MIB = 1 << 20
#: Limits that a test can wait for.
SHORT = PeerLimits(handshake_s=0.4, idle_s=0.4, message_s=0.4, block_s=0.4, grace_s=0.1)


class StubKeeper:
    """A `PeerService`. `copies` are arrays by token; `source` sends bytes of `path`, at the pace `paced`."""

    def __init__(self, nbytes: int = 0, *, path: Path | None = None, paced: PutPace | None = None) -> None:
        self.copies = {1: np.zeros(nbytes, np.uint8)}
        self.generations: dict[str, Bytes] = {}
        self.sinks: list[StubSink] = []
        self.requests: list[PeerRequest] = []
        self.reply: PeerReply = Noted()
        self.answers = Event()
        self.answers.set()
        self.aborted = Event()
        self.num_sources = 0
        self._path = path
        self._paced = paced

    def answer(self, request: PeerRequest) -> PeerReply:
        self.requests.append(request)
        assert self.answers.wait(20)
        match request:
            case OfferCopy():
                return Declined(f"no room for rank {request.rank}")
            case Finish(token=0):
                raise StorageError("the copy is gone.", code="storage.memory", action="Try again.")
            case Finish(token=2):
                raise ZeroDivisionError
            case Finish():
                return CopyKept()
        return self.reply

    def sink(self, put: Put) -> StubSink:
        if isinstance(put, PutRange):
            if put.token not in self.copies or put.start + put.nbytes > self.copies[put.token].size:
                raise StorageError(f"there is no copy {put.token}.", code="storage.memory", action="Offer it again.")
            memory = self.copies[put.token][put.start : put.start + put.nbytes]
        else:
            if put.nbytes > MIB:
                raise StorageError("this generation is too large.", code="storage.memory", action="None.")
            memory = self.generations[put.checkpoint_id] = np.zeros(put.nbytes, np.uint8)
        self.sinks.append(StubSink(self, memory))
        return self.sinks[-1]

    @contextmanager
    def source(self, get: Get) -> Iterator[Region | Bytes]:
        assert isinstance(get, GetRange)
        if self._path is None:
            raise StorageError("there is no such file.", code="storage.memory", action="Ask another node.")
        fd = os.open(self._path, os.O_RDONLY)
        self.num_sources += 1
        try:
            yield Region(fd, get.start, get.nbytes)
        finally:
            os.close(fd)
            self.num_sources -= 1

    def pace(self, get: Get, address: str) -> PutPace | None:
        return self._paced


class StubSink:
    """A `PutSink` that notes what is called."""

    def __init__(self, keeper: StubKeeper, memory: Bytes) -> None:
        self.memory = memory
        self.marks: list[int] = []
        self.ends: list[str] = []
        self._keeper = keeper

    def received(self, nbytes: int) -> None:
        self.marks.append(nbytes)

    def finish(self) -> PeerReply:
        self.ends.append("finish")
        return Damaged("a bit differs") if self.memory.size == 13 else Noted()

    def abort(self) -> None:
        self.ends.append("abort")
        self._keeper.aborted.set()


@contextmanager
def listening(keeper: StubKeeper, *, limits: PeerLimits | None = None) -> Iterator[TcpListener]:
    peers = TcpPeers(HOST) if limits is None else TcpPeers(HOST, limits=limits)
    listener = peers.listen(keeper, secret=SECRET)
    try:
        yield listener
    finally:
        listener.close()


def connect(address: str, *, secret: bytes = SECRET, timeout_s: float = 10.0) -> TcpConnection:
    return TcpPeers(HOST).connect(address, secret=secret, timeout_s=timeout_s)


def raw_socket(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def rest(connection: socket.socket) -> bytes:
    """All that the other end sends until it closes the connection."""
    data = bytearray()
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            data += part
    return bytes(data)


def peer_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("holdfast-peer")]


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it does not come true"
        time.sleep(0.005)
