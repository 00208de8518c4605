"""The calls of a wire, and their deadlines, over two ends of a connection in this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from holdfast.peers.transport import PutPiece, Region
from holdfast.peers.wire import Wire, each_within, within
from holdfast.store.base import Bytes
from tests.peers.stub_keeper import HOST, MIB


class Ends(NamedTuple):
    """A wire, and the socket at its other end, whose system takes little that nobody reads."""

    wire: Wire
    other: socket.socket


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.socket() as server, socket.socket() as other:
        server.bind((HOST, 0))
        server.listen()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        other.connect(server.getsockname())
        connection, _ = server.accept()
        wire = Wire(connection)
        yield Ends(wire, other)
        wire.close()


def noise(nbytes: int) -> Bytes:
    return np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)


class Reader(threading.Thread):
    """Reads `nbytes` after `wait_s`, and pauses after each MiB."""

    def __init__(self, other: socket.socket, nbytes: int, *, wait_s: float = 0.0, pause_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.data = bytearray()
        self._other, self._nbytes, self._wait_s, self._pause_s = other, nbytes, wait_s, pause_s
        self.start()

    def run(self) -> None:
        time.sleep(self._wait_s)
        while len(self.data) < self._nbytes:
            before = len(self.data)
            self.data += self._other.recv(min(MIB, self._nbytes - before))
            if len(self.data) // MIB > before // MIB:
                time.sleep(self._pause_s)


class Pace:
    """A `PutPace` that has all bytes sent in one turn, and the wire wait for their arrival."""

    @contextmanager
    def turn(self, nbytes: int, end_s: float) -> Iterator[PutPiece]:
        yield PutPiece(nbytes, lambda _: 0.01)


@pytest.fixture
def region(tmp_path: Path) -> Iterator[Region]:
    """8 MiB of a file."""
    path = tmp_path / "slot"
    path.write_bytes(noise(8 * MIB).tobytes())
    with path.open("rb") as file:
        yield Region(file.fileno(), 0, 8 * MIB)


def test_a_peer_that_takes_nothing_for_a_while_gets_all_bytes_of_a_file(ends: Ends, region: Region) -> None:
    reader = Reader(ends.other, region.nbytes, wait_s=0.5)  # longer than the system waits in `sendfile`
    ends.wire.send_region(region, within(60))
    reader.join(60)
    assert reader.data == noise(region.nbytes).tobytes()


def test_each_block_of_a_file_has_its_own_deadline(ends: Ends, region: Region) -> None:
    ends.wire._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
    reader, begun_s = Reader(ends.other, region.nbytes, pause_s=0.5), time.monotonic()
    ends.wire.send_region(region, each_within(3.0))
    assert time.monotonic() - begun_s > 3.0
    reader.join(60)
    assert reader.data == noise(region.nbytes).tobytes()


@pytest.mark.slow
def test_each_block_that_is_received_has_its_own_deadline(ends: Ends) -> None:
    data, out = noise(4 * MIB), np.zeros(4 * MIB, np.uint8)

    def send() -> None:
        for start in range(0, data.size, MIB):
            time.sleep(0.9)
            ends.other.sendall(data[start : start + MIB].data)

    sender, begun_s = threading.Thread(target=send, daemon=True), time.monotonic()
    sender.start()
    ends.wire.receive_bytes(out, each_within(3.0))
    assert time.monotonic() - begun_s > 3.0
    assert np.array_equal(out, data)
    sender.join(60)


def test_bytes_that_do_not_arrive_are_not_waited_for_longer_than_the_deadline(ends: Ends) -> None:
    with pytest.raises(TimeoutError, match="deadline is over"):
        ends.wire.send_bytes(noise(200 << 10), within(0.3), Pace())


def test_an_answer_ends_the_wait_for_bytes_to_arrive(ends: Ends) -> None:
    """A peer that refuses what is sent says so, and takes no more of it."""
    ends.other.sendall(b"no")
    begun_s = time.monotonic()
    ends.wire.send_bytes(noise(200 << 10), within(30), Pace())
    assert time.monotonic() - begun_s < 15
    assert ends.wire.receive(2, within(10)) == b"no"


def test_a_connection_that_a_child_has_inherited_ends_when_it_is_closed(ends: Ends) -> None:
    with ends.wire._socket.dup():
        ends.wire.close()
        ends.other.settimeout(20)
        assert ends.other.recv(1) == b""
