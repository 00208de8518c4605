"""Peers that know the secret and send nonsense: a keeper refuses it or ends the connection, and serves others.

The decoders alone meet more of it in `tests.faults.test_hostile`.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.errors import StorageError
from holdfast.peers import handshake
from holdfast.peers.peer_messages import (
    MAX_NBYTES,
    CopyKept,
    Finish,
    GetRange,
    Noted,
    PeerMessage,
    PutRange,
    Sent,
    decode_reply,
    encode_message,
)
from holdfast.peers.tcp_listener import PeerLimits, TcpListener
from holdfast.peers.wire import Wire, within
from tests.peers.stub_keeper import (
    CHECKPOINT,
    HOST,
    MIB,
    SECRET,
    StubKeeper,
    connect,
    listening,
    peer_threads,
    wait_until,
)
from tests.peers.test_peer_messages import REPLIES, REQUESTS

BUDGET = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
SWEEP = settings(BUDGET, max_examples=5000)
HEADER = struct.Struct("<I8s")


def framed(message: bytes) -> bytes:
    return HEADER.pack(len(message), xxhash.xxh3_64_digest(message)) + message


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TcpListener]:
    path = tmp_path_factory.mktemp("node") / "slot"
    path.write_bytes(bytes(100))
    with listening(StubKeeper(1 << 31, path=path), limits=PeerLimits(block_s=2.0)) as listener:
        yield listener


@pytest.fixture(autouse=True)
def _nothing_unexpected(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No request may end in an error that a keeper did not expect, which it would log."""
    yield
    assert [each for each in caplog.records if each.levelname == "ERROR"] == []


def answers(listener: TcpListener, data: bytes) -> list[PeerMessage]:
    """Send `data` as a peer, and then nothing more. Returns what the listener answers until it ends the connection;
    it must not keep anything of it, and must serve others."""
    connection = connect(listener.address)
    with suppress(OSError):
        connection._wire.send(data, within(20))
    with suppress(OSError):
        connection._wire._socket.shutdown(socket.SHUT_WR)
    received = bytearray()
    with suppress(OSError):
        while True:
            received += connection._wire.receive(1, within(20))
    connection.close()
    wait_until(lambda: not listener._peers)
    with connect(listener.address) as sound:
        assert sound.ask(Finish(1), timeout_s=10) == CopyKept()
    return list(decoded(bytes(received)))


def decoded(data: bytes) -> Iterator[PeerMessage]:
    """The replies in `data`, with which the bytes of a get may be mixed: all that this keeper has are zero."""
    while len(data) >= HEADER.size:
        nbytes, digest = HEADER.unpack_from(data)
        message = data[HEADER.size : HEADER.size + nbytes]
        if len(message) < nbytes:
            return  # the connection was reset
        assert xxhash.xxh3_64_digest(message) == digest
        reply = decode_reply(message)
        yield reply
        data = data[HEADER.size + nbytes :]
        if isinstance(reply, Sent):
            assert not any(data[: reply.nbytes])
            data = data[reply.nbytes :]


def hostile(seed: int) -> bytes:
    """Sound requests, some of them with their bytes, which are then changed, cut or joined."""
    rng = random.Random(seed)
    stream = bytearray()
    for _ in range(rng.choice([1, 1, 2, 5])):
        request = rng.choice([*REQUESTS, PutRange(1, 0, 50), GetRange(CHECKPOINT, 0, 0, 20), PutRange(1, 7, 1 << 30)])
        message = bytearray(encode_message(request))
        if rng.random() < 0.6:
            message[rng.randrange(len(message))] = rng.randrange(256)
        stream += framed(bytes(message))
        if rng.random() < 0.5:
            stream += rng.randbytes(rng.choice([1, 50, 3000]))
    for _ in range(rng.choice([0, 0, 1, 3])):
        at = rng.randrange(len(stream))
        match rng.randrange(4):
            case 0:
                stream[at] = rng.randrange(256)
            case 1:
                del stream[at : at + rng.choice([1, 5, 1000])]
            case 2:
                stream[at:at] = stream[at : at + rng.choice([1, 40])]
            case _:
                stream[at : at + 4] = struct.pack("<I", rng.choice([0, MAX_NBYTES, MAX_NBYTES + 1, 2**31, 2**32 - 1]))
        if not stream:
            break
    return bytes(stream)


@BUDGET
@given(data=st.binary(max_size=300))
def test_random_bytes_of_a_peer_end_its_connection_or_are_refused(data: bytes, listener: TcpListener) -> None:
    assert answers(listener, data) == []
    assert all(type(each).__name__ == "RequestRefused" for each in answers(listener, framed(data)))


@BUDGET
@given(seed=st.integers(0, 2**64))
def test_sound_requests_with_changes_do_no_harm(seed: int, listener: TcpListener) -> None:
    answers(listener, hostile(seed))
    assert answers(listener, framed(encode_message(Finish(1)))) == [CopyKept()]


@pytest.mark.slow
@pytest.mark.timeout(900)
@SWEEP
@given(seed=st.integers(0, 2**64))
def test_a_long_sweep_of_changes_does_no_harm(seed: int, listener: TcpListener) -> None:
    answers(listener, hostile(seed))
    assert answers(listener, framed(encode_message(Finish(1)))) == [CopyKept()]


@pytest.mark.parametrize("nbytes", [MAX_NBYTES + 1, 2**31, 2**32 - 1])
def test_a_message_that_says_it_is_huge_is_not_waited_for(nbytes: int, listener: TcpListener) -> None:
    start_s = time.monotonic()
    assert answers(listener, HEADER.pack(nbytes, bytes(8)) + bytes(100)) == []
    assert time.monotonic() - start_s < 5


def test_a_message_as_large_as_the_limit_is_read_and_refused(listener: TcpListener) -> None:
    (reply,) = answers(listener, framed(b"\x92\xa6Finish" + bytes(MAX_NBYTES - 8)))
    assert type(reply).__name__ == "RequestRefused"


def test_a_frame_that_ends_too_early_ends_the_connection(listener: TcpListener) -> None:
    frame = framed(encode_message(Finish(1)))
    assert answers(listener, frame) == [CopyKept()]
    for nbytes in range(len(frame)):
        assert answers(listener, frame[:nbytes]) == []


def test_a_message_with_a_wrong_bit_is_not_carried_out(listener: TcpListener) -> None:
    frame = framed(encode_message(Finish(1)))
    for at in range(4, len(frame)):
        assert answers(listener, frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]) == []


def test_replies_are_no_requests(listener: TcpListener) -> None:
    for reply in REPLIES:
        (answer,) = answers(listener, framed(encode_message(reply)))
        assert type(answer).__name__ == "RequestRefused"


def test_requests_that_are_sent_ahead_are_answered_in_their_order(listener: TcpListener) -> None:
    data = framed(encode_message(PutRange(1, 0, 5))) + b"abcde" + framed(encode_message(Finish(3)))
    assert answers(listener, data + framed(encode_message(PutRange(9, 0, 5)))[:0]) == [Noted(), Noted(), CopyKept()]


class HostileServer:
    """A server that knows the secret, admits one client after the other, and answers any request by `data`."""

    def __init__(self) -> None:
        self._server = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._server.getsockname()[1]}"
        self.data = b""
        threading.Thread(target=self._serve, name="hostile", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            wire = Wire(connection)
            with suppress(OSError):
                handshake.admit(wire, secret=SECRET, deadline=within(10), has_room=lambda: True)
                wire.receive_message(within(10))
                wire.send(self.data, within(10))
                connection.shutdown(socket.SHUT_WR)
                wire.wait(within(10))
            wire.close()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture(scope="module")
def server() -> Iterator[HostileServer]:
    server = HostileServer()
    yield server
    server.close()


def errors(server: HostileServer, data: bytes) -> list[str]:
    """Make each kind of request of a server that answers `data`. Returns the codes of the errors."""
    server.data, codes = data, []
    for kind in range(3):
        with connect(server.address) as connection:
            try:
                match kind:
                    case 0:
                        connection.ask(Finish(1), timeout_s=10)
                    case 1:
                        connection.put(PutRange(1, 0, MIB), np.zeros(MIB, np.uint8), timeout_s=10)
                    case _:
                        connection.get(GetRange(CHECKPOINT, 0, 0, 50), np.zeros(50, np.uint8), timeout_s=10)
            except StorageError as error:
                codes.append(error.code)
    return codes


@BUDGET
@given(data=st.binary(max_size=300))
def test_random_answers_are_errors_of_the_peer(data: bytes, server: HostileServer) -> None:
    assert errors(server, data) == ["storage.peer"] * 3
    assert errors(server, framed(data)) == ["storage.peer"] * 3


@BUDGET
@given(seed=st.integers(0, 2**64))
def test_sound_answers_with_changes_are_replies_or_errors_of_the_peer(seed: int, server: HostileServer) -> None:
    rng = random.Random(seed)
    data = bytearray(b"".join(framed(encode_message(rng.choice(REPLIES))) for _ in range(rng.choice([1, 2]))))
    for _ in range(rng.choice([0, 1, 2])):
        data[rng.randrange(len(data))] = rng.randrange(256)
    assert set(errors(server, bytes(data[: rng.choice([len(data), rng.randrange(len(data))])]))) <= {"storage.peer"}


def test_a_get_that_is_answered_by_another_size_is_an_error(server: HostileServer) -> None:
    for nbytes in (0, 49, 51, 2**40):
        server.data = framed(encode_message(Sent(nbytes))) + bytes(100)
        with connect(server.address) as connection, pytest.raises(StorageError, match=r"storage\.peer") as caught:
            connection.get(GetRange(CHECKPOINT, 0, 0, 50), np.zeros(50, np.uint8), timeout_s=10)
        assert caught.value.path == server.address


def test_no_thread_is_left(listener: TcpListener, server: HostileServer, tmp_path: Path) -> None:
    wait_until(lambda: peer_threads() == ["holdfast-peers"])
    assert peer_threads() == ["holdfast-peers"]
