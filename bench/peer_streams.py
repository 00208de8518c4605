"""Copies for another node over the loopback: a sender and a receiver, two processes with as many streams each.

The sender's bytes are those of a file in memory, and the receiver fills the mapping of another one: by the transport of
keepers, with the digest of each MiB; or plainly, by `sendfile` and `recv_into`. No torch.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import xxhash

from bench.costs import cpu_s, scratch
from bench.schema import BenchError
from holdfast.format.container import BLOCK_NBYTES
from holdfast.peers.peer_messages import Get, Noted, PeerReply, PeerRequest, Put, PutRange
from holdfast.peers.tcp import TcpPeers
from holdfast.peers.transport import PutPace, Region
from holdfast.store.base import Bytes

NUM_STREAMS = 4
HOST, SECRET = "127.0.0.1", bytes(32)
TIMEOUT_S = 600.0
#: Bytes of a put, as keepers send them.
RANGE_NBYTES = 16 << 20
#: So many bytes are made at a time.
_MADE_NBYTES = 1 << 26


class DigestingSink:
    """A sink that hashes blocks as they arrive, as the one of a copy does."""

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self._digests: list[bytes] = []
        self._hashed = 0

    def received(self, nbytes: int) -> None:
        self._digests.append(xxhash.xxh3_128_digest(self.memory[self._hashed : nbytes].data))
        self._hashed = nbytes

    def finish(self) -> PeerReply:
        return Noted()

    def abort(self) -> None:
        raise BenchError("The sender failed in the middle of a range.")


class TargetMemory:
    """The mapping of the receiver, into which the sender puts ranges."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory

    def answer(self, request: PeerRequest) -> PeerReply:
        return Noted()

    def sink(self, put: Put) -> DigestingSink:
        assert isinstance(put, PutRange)
        return DigestingSink(self._memory[put.start : put.start + put.nbytes])

    def source(self, get: Get) -> AbstractContextManager[Region]:
        return nullcontext(Region(-1, 0, 0))

    def pace(self, get: Get, address: str) -> PutPace | None:
        return None


def ranges(nbytes: int) -> list[range]:
    """The bytes of each stream: whole blocks, but for the last one."""
    share = -(-nbytes // NUM_STREAMS // BLOCK_NBYTES) * BLOCK_NBYTES
    return [range(min(number * share, nbytes), min((number + 1) * share, nbytes)) for number in range(NUM_STREAMS)]


def side_by_side(call: Callable[[int, range], object], nbytes: int) -> None:
    """Run `call` for each stream, in a thread of its own."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        list(pool.map(call, range(NUM_STREAMS), ranges(nbytes)))


def sender(path: Path, pipe: Connection) -> None:
    """Send all bytes of `path` again and again, each time as told: to an address, by our transport or plainly."""
    fd = os.open(path, os.O_RDONLY)
    nbytes = os.fstat(fd).st_size
    while (order := pipe.recv()) is not None:
        address, is_plain = order
        (plain_turn if is_plain else our_turn)(fd, nbytes, address, pipe)


def our_turn(fd: int, nbytes: int, address: str, pipe: Connection) -> None:
    connections = [TcpPeers(HOST).connect(address, secret=SECRET, timeout_s=10) for _ in range(NUM_STREAMS)]

    def put(number: int, part: range) -> None:
        for start in part[::RANGE_NBYTES]:
            nbytes = min(RANGE_NBYTES, part.stop - start)
            reply = connections[number].put(PutRange(1, start, nbytes), Region(fd, start, nbytes), timeout_s=TIMEOUT_S)
            if not isinstance(reply, Noted):
                raise BenchError(f"The receiver answered {reply}.")

    begin(pipe)
    side_by_side(put, nbytes)
    pipe.send("done")
    for connection in connections:
        connection.close()


def plain_turn(fd: int, nbytes: int, address: str, pipe: Connection) -> None:
    host, _, port = address.rpartition(":")
    connections = [socket.create_connection((host, int(port))) for _ in range(NUM_STREAMS)]
    for number, connection in enumerate(connections):
        connection.sendall(bytes([number]))

    def send(number: int, part: range) -> None:
        start = part.start
        while start < part.stop:
            start += os.sendfile(connections[number].fileno(), fd, start, part.stop - start)

    begin(pipe)
    side_by_side(send, nbytes)
    pipe.send("done")
    for connection in connections:
        connection.close()


def begin(pipe: Connection) -> None:
    pipe.send("ready")
    pipe.recv()


class Receiver:
    """The receiving process, with its sender. Each turn fills `memory`, the mapping of a file."""

    def __init__(self, source: Path, memory: Bytes) -> None:
        self._memory = memory
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._sender = context.Process(target=sender, args=(source, theirs), daemon=True)
        self._sender.start()
        theirs.close()
        self._both = [psutil.Process(), psutil.Process(self._sender.pid)]

    def ours(self) -> dict[str, float]:
        listener = TcpPeers(HOST).listen(TargetMemory(self._memory), secret=SECRET)
        try:
            self._order(listener.address, is_plain=False)
            return self._timed(lambda: None)
        finally:
            listener.close()

    def plain(self, call_nbytes: int) -> dict[str, float]:
        """A plain copy that receives at most `call_nbytes` by a call."""
        with socket.create_server((HOST, 0)) as server:
            self._order(f"{HOST}:{server.getsockname()[1]}", is_plain=True)
            accepted = [server.accept()[0] for _ in range(NUM_STREAMS)]
        streams = {connection.recv(1)[0]: connection for connection in accepted}

        def receive(number: int, part: range) -> None:
            view = self._memory[part.start : part.stop].data
            while view:
                view = view[streams[number].recv_into(view[:call_nbytes]) :]

        try:
            return self._timed(lambda: side_by_side(receive, len(self._memory)))
        finally:
            for connection in accepted:
                connection.close()

    def close(self) -> None:
        self._sender.kill()
        self._sender.join()

    def _order(self, address: str, *, is_plain: bool) -> None:
        self._pipe.send((address, is_plain))

    def _timed(self, receive: Callable[[], None]) -> dict[str, float]:
        self._expect("ready")
        used_s, start_s = cpu_s(self._both), time.monotonic()
        self._pipe.send("go")
        receive()
        self._expect("done")
        return {"seconds": time.monotonic() - start_s, "cpu_s": cpu_s(self._both) - used_s}

    def _expect(self, word: str) -> None:
        if not self._pipe.poll(TIMEOUT_S) or self._pipe.recv() != word:
            raise BenchError(f"The sender is not {word}.")


def mapped(path: Path, nbytes: int) -> Bytes:
    """A mapping of a file in memory, all of whose pages are there."""
    with path.open("w+b") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)
        memory = np.frombuffer(mmap.mmap(file.fileno(), nbytes), np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory


@contextmanager
def receiving(parent: Path, nbytes: int) -> Iterator[tuple[Receiver, Bytes, Bytes]]:
    """A receiver, its memory, and the bytes that its sender has, in files in a folder of `parent`."""
    with scratch(parent) as folder:
        source, target = (mapped(folder / name, nbytes) for name in ("source", "target"))
        for start in range(0, nbytes, _MADE_NBYTES):
            part = source[start : start + _MADE_NBYTES]
            part[:] = np.random.default_rng(start).integers(0, 256, len(part), np.uint8)
        receiver = Receiver(folder / "source", target)
        try:
            yield receiver, target, source
        finally:
            receiver.close()
