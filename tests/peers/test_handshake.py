"""The handshake with a keeper: only peers of the same job and version may talk to it. Everybody else learns nothing,
and holds nothing up."""

from __future__ import annotations

import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from holdfast.errors import ConfigurationError, HoldfastError, StorageError
from holdfast.peers.handshake import HELLO, MAGIC, VERDICT, VERSION, Verdict
from holdfast.peers.peer_messages import CopyKept, Finish, encode_message
from holdfast.peers.tcp_listener import PeerLimits, TcpListener
from tests.peers.stub_keeper import (
    HOST,
    SECRET,
    SHORT,
    StubKeeper,
    connect,
    listening,
    peer_threads,
    raw_socket,
    rest,
    wait_until,
)

TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(189))
HTTP = b"GET / HTTP/1.1\r\nHost: node-3:29500\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n"


def hello(role: bytes, *, version: int = VERSION, nonce: bytes = b"n" * 32) -> bytes:
    return HELLO.pack(MAGIC, version, role, nonce)


def proof(secret: bytes, role: bytes, client_hello: bytes, server_hello: bytes) -> bytes:
    return hmac.digest(secret, role + client_hello + server_hello, "sha256")


def exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        assert part, f"the other end closed the connection after {data!r}"
        data += part
    return data


def assert_serves(listener: TcpListener) -> None:
    with connect(listener.address) as connection:
        assert connection.ask(Finish(1), timeout_s=10) == CopyKept()


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of a server that does `answer` with its one connection, and closes it."""
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):  # the client may have seen enough
                connection.settimeout(10)
                answer(connection)
                connection.shutdown(socket.SHUT_WR)
                rest(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"{HOST}:{server.getsockname()[1]}"
        finally:
            thread.join(20)


def refusal(answer: Callable[[socket.socket], object], *, timeout_s: float = 10.0) -> HoldfastError:
    """The error of a client that connects to a server that does `answer`."""
    with answering(answer) as address, pytest.raises(HoldfastError) as caught:
        connect(address, timeout_s=timeout_s)
    assert caught.value.path == address
    return caught.value


def test_a_client_with_another_secret_is_told_so_and_may_try_again() -> None:
    keeper = StubKeeper()
    with listening(keeper) as listener:
        for secret in (SECRET[:-1] + b"x", SECRET + b"x", bytes(32)):
            with pytest.raises(ConfigurationError, match="does not know the secret of this job") as caught:
                connect(listener.address, secret=secret)
            assert (caught.value.code, caught.value.retryable) == ("config.peer", True)
        assert_serves(listener)
    assert keeper.requests == [Finish(1)]


def test_the_proofs_of_both_ends_bind_both_hellos_and_the_role_of_the_prover() -> None:
    with listening(StubKeeper()) as listener, raw_socket(listener.address) as connection:
        mine = hello(b"C")
        connection.sendall(mine)
        theirs = exactly(connection, HELLO.size)
        connection.sendall(proof(SECRET, b"C", mine, theirs))
        answer = exactly(connection, VERDICT.size)
        assert answer == VERDICT.pack(Verdict.WELCOME, proof(SECRET, b"S", mine, theirs))


def test_a_server_does_not_prove_anything_to_a_client_with_another_secret() -> None:
    with listening(StubKeeper()) as listener, raw_socket(listener.address) as connection:
        connection.sendall(hello(b"C"))
        theirs = exactly(connection, HELLO.size)
        connection.sendall(proof(b"x" * 32, b"C", hello(b"C"), theirs))
        assert rest(connection) == VERDICT.pack(Verdict.WRONG_SECRET, bytes(32))


def test_a_recorded_conversation_that_is_played_again_opens_nothing() -> None:
    """A relay between two peers records all that the client sends; the same bytes then go to the same listener."""
    keeper, recorded = StubKeeper(), bytearray()
    with listening(keeper) as listener:

        def relay(client: socket.socket) -> None:
            with raw_socket(listener.address) as server:
                for source, target, nbytes in (
                    (client, server, HELLO.size),
                    (server, client, HELLO.size),
                    (client, server, 32),
                    (server, client, VERDICT.size),
                    (client, server, 12 + len(encode_message(Finish(1)))),
                ):
                    data = exactly(source, nbytes)
                    target.sendall(data)
                    if source is client:
                        recorded.extend(data)

        with answering(relay) as address, connect(address) as connection, pytest.raises(StorageError):
            connection.ask(Finish(1), timeout_s=10)
        wait_until(lambda: peer_threads() == ["holdfast-peers"])
        assert keeper.requests == [Finish(1)]
        with raw_socket(listener.address) as again:
            again.sendall(recorded)
            answer = rest(again)
        assert len(answer) == HELLO.size + VERDICT.size
        assert answer[HELLO.size :] == VERDICT.pack(Verdict.WRONG_SECRET, bytes(32))
        assert_serves(listener)
    assert keeper.requests == [Finish(1)] * 2


def test_a_server_that_sends_everything_back_is_recognised() -> None:
    def echo(connection: socket.socket) -> None:
        connection.sendall(exactly(connection, HELLO.size))

    error = refusal(echo)
    assert isinstance(error, ConfigurationError)
    assert "sends messages back to their sender" in str(error)
    assert (error.code, error.retryable) == ("config.peer", False)


def test_a_listener_whose_hello_is_sent_back_to_it_is_not_deceived(caplog: pytest.LogCaptureFixture) -> None:
    """With the listener's own hello, as it is or with the role of a client, and with the listener's own proof."""
    keeper = StubKeeper()
    with listening(keeper) as listener:
        with raw_socket(listener.address) as connection:
            connection.sendall(hello(b"S"))
            assert len(rest(connection)) == HELLO.size
        wait_until(lambda: "it sends messages back to their sender" in caplog.text)
        with raw_socket(listener.address) as first, raw_socket(listener.address) as second:
            first.sendall(hello(b"C"))
            theirs = exactly(first, HELLO.size)
            second.sendall(HELLO.pack(MAGIC, VERSION, b"C", theirs[-32:]))
            exactly(second, HELLO.size)
            for connection in (first, second):
                connection.sendall(proof(SECRET, b"S", hello(b"C"), theirs))
                assert rest(connection) == VERDICT.pack(Verdict.WRONG_SECRET, bytes(32))
        assert_serves(listener)


def test_a_server_that_does_not_prove_the_secret_is_refused() -> None:
    """One that welcomes everybody, and one that sends the client's own proof back."""

    def welcome(connection: socket.socket) -> None:
        exactly(connection, HELLO.size)
        connection.sendall(hello(b"S"))
        exactly(connection, 32)
        connection.sendall(VERDICT.pack(Verdict.WELCOME, bytes(32)))

    def mirror(connection: socket.socket) -> None:
        exactly(connection, HELLO.size)
        connection.sendall(hello(b"S"))
        connection.sendall(VERDICT.pack(Verdict.WELCOME, exactly(connection, 32)))

    for answer in (welcome, mirror):
        error = refusal(answer)
        assert "did not prove that it knows the secret of this job" in str(error)
        assert (error.code, error.retryable) == ("config.peer", False)


@pytest.mark.parametrize("version", [0, 2, 65535])
def test_another_version_is_named_on_both_sides(version: int, caplog: pytest.LogCaptureFixture) -> None:
    def other(connection: socket.socket) -> None:
        exactly(connection, HELLO.size)
        connection.sendall(hello(b"S", version=version))

    error = refusal(other)
    assert f"speaks version {version} of the protocol between keepers, and this node version 1" in str(error)
    assert "Run the same version of Holdfast on all nodes." in str(error)
    assert (error.code, error.retryable) == ("config.peer", False)
    with listening(StubKeeper()) as listener, raw_socket(listener.address) as connection:
        connection.sendall(hello(b"C", version=version))
        answer = rest(connection)
        assert HELLO.unpack(answer)[:3] == (MAGIC, VERSION, b"S")
        wait_until(lambda: f"it speaks version {version}" in caplog.text)
        assert_serves(listener)


def test_nobody_in_between_can_make_both_ends_use_another_version() -> None:
    """The hellos are part of the proofs, so a hello that was changed on the way makes them wrong."""
    with listening(StubKeeper()) as listener, raw_socket(listener.address) as connection:
        mine = hello(b"C")
        connection.sendall(mine)
        theirs = exactly(connection, HELLO.size)
        connection.sendall(proof(SECRET, b"C", hello(b"C", version=2), theirs))
        assert rest(connection) == VERDICT.pack(Verdict.WRONG_SECRET, bytes(32))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46" * 9,
        os.urandom(1 << 20),
    ],
    ids=["HTTP", "SSH", "TLS", "noise"],
)
def test_another_program_at_the_address_of_a_peer_is_recognised(answer: bytes) -> None:
    error = refusal(lambda connection: connection.sendall(answer))
    assert "is no keeper of Holdfast" in str(error)
    assert (error.code, error.retryable) == ("config.peer", False)


@pytest.mark.parametrize("nbytes", [0, 1, 8, HELLO.size, HELLO.size + 5])
def test_a_server_that_closes_the_connection_can_be_tried_again(nbytes: int) -> None:
    error = refusal(lambda connection: connection.sendall((hello(b"S") + bytes(32))[:nbytes]))
    assert "closed the connection before it was established" in str(error)
    assert (error.code, error.retryable) == ("storage.peer", True)


def test_a_server_that_says_nothing_is_not_waited_for_longer_than_the_caller_says() -> None:
    start_s = time.monotonic()
    error = refusal(lambda connection: time.sleep(0.5), timeout_s=0.2)
    assert "did not answer within 0.2 s" in str(error)
    assert (error.code, error.retryable) == ("storage.peer", True)
    assert time.monotonic() - start_s < 3


def test_a_server_that_sends_a_byte_now_and_then_is_not_waited_for_longer_either() -> None:
    def drip(connection: socket.socket) -> None:
        for byte in hello(b"S"):
            connection.sendall(bytes([byte]))
            time.sleep(0.05)

    start_s = time.monotonic()
    error = refusal(drip, timeout_s=0.3)
    assert "did not answer within 0.3 s" in str(error)
    assert time.monotonic() - start_s < 3


@pytest.mark.parametrize(
    "data",
    [HTTP, TLS_HELLO, os.urandom(1 << 20), bytes(1 << 20), b"\n", MAGIC[:-1] + b"x" * 100],
    ids=["HTTP", "TLS", "noise", "zeros", "line", "almost"],
)
def test_nonsense_is_answered_by_nothing_and_the_listener_goes_on(data: bytes) -> None:
    keeper = StubKeeper()
    with listening(keeper, limits=SHORT) as listener, raw_socket(listener.address) as connection:
        try:
            connection.sendall(data)
        except ConnectionError:  # the listener has seen enough
            connection.close()
        else:
            assert rest(connection) == b""
        wait_until(lambda: peer_threads() == ["holdfast-peers"])
        assert_serves(listener)
    assert keeper.requests == [Finish(1)]


@pytest.mark.parametrize("data", [b"", MAGIC, hello(b"C")], ids=["nothing", "magic", "hello"])
def test_a_client_that_stops_in_the_middle_of_its_proof_is_cut(data: bytes) -> None:
    with listening(StubKeeper(), limits=SHORT) as listener, raw_socket(listener.address) as connection:
        start_s = time.monotonic()
        connection.sendall(data)
        assert len(rest(connection)) == (HELLO.size if data == hello(b"C") else 0)
        assert time.monotonic() - start_s < 3
        wait_until(lambda: peer_threads() == ["holdfast-peers"])
        assert_serves(listener)


def test_a_client_that_sends_its_hello_byte_by_byte_is_cut() -> None:
    with listening(StubKeeper(), limits=SHORT) as listener, raw_socket(listener.address) as connection:
        start_s = time.monotonic()
        with suppress(ConnectionError):
            for byte in hello(b"C"):
                connection.sendall(bytes([byte]))
                time.sleep(0.2)
        assert time.monotonic() - start_s < 3
        assert_serves(listener)


def test_peers_get_through_beside_any_number_of_strangers() -> None:
    limits = PeerLimits(num_strangers=4, grace_s=0.05, handshake_s=30)
    with listening(StubKeeper(), limits=limits) as listener:
        strangers = [raw_socket(listener.address) for _ in range(20)]
        assert_serves(listener)
        assert len(peer_threads()) <= 1 + 4 + 1
        for stranger in strangers:
            stranger.close()


def test_the_log_names_a_stranger_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    with listening(StubKeeper()) as listener:
        for _ in range(5):
            with raw_socket(listener.address) as connection:
                connection.sendall(HTTP)
                rest(connection)
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "it is no keeper of Holdfast" in warnings[0].message


def test_a_client_that_resets_its_connection_at_once_is_no_trouble() -> None:
    with listening(StubKeeper()) as listener:
        for _ in range(20):
            connection = raw_socket(listener.address)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        assert_serves(listener)
