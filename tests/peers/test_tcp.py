"""TCP between keepers: bytes arrive bit by bit, and whatever one end suffers, the other goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import ConfigurationError, CorruptError, StorageError
from holdfast.peers.peer_messages import (
    CopyKept,
    Damaged,
    Declined,
    Finish,
    GetRange,
    MarkProtected,
    Noted,
    OfferCopy,
    PutGeneration,
    PutRange,
    RequestRefused,
    Sent,
    encode_message,
)
from holdfast.peers.tcp import TcpPeers
from holdfast.peers.tcp_listener import PeerLimits
from holdfast.peers.transport import PutPace, Region
from holdfast.peers.wire import Deadline, within
from holdfast.store.base import Bytes
from tests.peers.stub_keeper import (
    CHECKPOINT,
    HOST,
    MIB,
    SECRET,
    SHORT,
    StubKeeper,
    connect,
    listening,
    peer_threads,
    wait_until,
)
from tests.peers.test_peer_messages import CONTENTS

#: A process that puts one range, whose bytes come from a file that is as large as the range, and stops in the middle.
SENDER = """
import sys, time
import numpy as np
from holdfast.peers.peer_messages import PutRange
from holdfast.peers.tcp import TcpPeers
connection = TcpPeers("127.0.0.1").connect(sys.argv[1], secret=bytes(range(32)), timeout_s=20)
wire, nbytes = connection._wire, int(sys.argv[2])
send = wire.send_bytes
def half(data, deadline, pace):
    send(data[: nbytes // 2], deadline)
    print("half", flush=True)
    time.sleep(60)
wire.send_bytes = half
connection.put(PutRange(1, 0, nbytes), np.ones(nbytes, np.uint8), timeout_s=60)
"""


def noise(nbytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def written(path: Path, data: Bytes) -> Path:
    path.write_bytes(data.tobytes())
    return path


def test_requests_get_their_replies_in_order() -> None:
    keeper = StubKeeper()
    with listening(keeper) as listener, connect(listener.address) as connection:
        offer = OfferCopy(CONTENTS, ("a" * 32,), 7)
        assert connection.ask(offer, timeout_s=10) == Declined("no room for rank 7")
        assert connection.ask(MarkProtected(CHECKPOINT), timeout_s=10) == Noted()
        assert connection.ask(Finish(5), timeout_s=10) == CopyKept()
    assert keeper.requests == [offer, MarkProtected(CHECKPOINT), Finish(5)]


@pytest.mark.parametrize("nbytes", [0, 1, 4095, MIB, MIB + 1])
@pytest.mark.parametrize("is_file", [True, False])
def test_a_range_arrives_bit_by_bit(nbytes: int, is_file: bool, tmp_path: Path) -> None:
    data, keeper = noise(nbytes + 7), StubKeeper(nbytes + 5)
    path = written(tmp_path / "slot", data)
    with path.open("rb") as file, listening(keeper) as listener, connect(listener.address) as connection:
        given = Region(file.fileno(), 7, nbytes) if is_file else data[7:]
        assert connection.put(PutRange(1, 3, nbytes), given, timeout_s=10) == Noted()
    assert keeper.copies[1][3 : nbytes + 3].tobytes() == data[7:].tobytes()
    assert not keeper.copies[1][:3].any()
    assert not keeper.copies[1][nbytes + 3 :].any()
    (sink,) = keeper.sinks
    assert sink.ends == ["finish"]
    assert sink.marks == [*range(MIB, nbytes, MIB), *([nbytes] if nbytes else [])]


def test_37_mib_arrive_over_four_streams_and_come_back(tmp_path: Path) -> None:
    data = noise(37 * MIB)
    path = written(tmp_path / "slot", data)
    keeper, out = StubKeeper(data.size, path=path), np.zeros_like(data)
    cuts = [0, 5 * MIB, 20 * MIB + 13, 30 * MIB, data.size]

    def carry(start: int, stop: int) -> None:
        with path.open("rb") as file, connect(listener.address) as connection:
            region = Region(file.fileno(), start, stop - start)
            assert connection.put(PutRange(1, start, stop - start), region, timeout_s=60) == Noted()
            get = GetRange(CHECKPOINT, 0, start, stop - start)
            assert connection.get(get, out[start:stop], timeout_s=60) == Sent(stop - start)

    with listening(keeper) as listener, ThreadPoolExecutor(4) as pool:
        list(pool.map(carry, cuts[:-1], cuts[1:]))
    assert np.array_equal(keeper.copies[1], data)
    assert np.array_equal(out, data)
    assert keeper.num_sources == 0


def test_a_generation_and_no_bytes_arrive(tmp_path: Path) -> None:
    keeper = StubKeeper(path=written(tmp_path / "slot", noise(1)))
    with listening(keeper) as listener, connect(listener.address) as connection:
        data = noise(1234)
        assert connection.put(PutGeneration(CHECKPOINT, 1234), data, timeout_s=10) == Noted()
        assert connection.get(GetRange(CHECKPOINT, 0, 0, 0), np.empty(0, np.uint8), timeout_s=10) == Sent(0)
    assert keeper.generations[CHECKPOINT].tobytes() == data.tobytes()


def test_refusals_say_why_and_the_connection_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with listening(StubKeeper(100)) as listener, connect(listener.address) as connection:
        refusals = (
            connection.ask(Finish(0), timeout_s=10),
            connection.ask(Finish(2), timeout_s=10),
            connection.put(PutRange(9, 0, 5), noise(5), timeout_s=10),
            connection.get(GetRange(CHECKPOINT, 0, 0, 5), noise(5), timeout_s=10),
        )
        assert [type(each) for each in refusals] == [RequestRefused] * 4
        whys = [each.reason for each in refusals if isinstance(each, RequestRefused)]
        assert whys[0] == "[storage.memory] the copy is gone. Try again."
        assert whys[1] == "it failed with a ZeroDivisionError; the log of the keeper there says more"
        assert "there is no copy 9" in whys[2]
        assert "no such file" in whys[3]
        assert connection.put(PutRange(1, 0, 13), noise(13), timeout_s=10) == Damaged("a bit differs")
        assert connection.ask(Finish(1), timeout_s=10) == CopyKept()
    assert [record.message for record in caplog.records] == ["a request of another node failed"]


def test_a_request_must_name_as_many_bytes_as_are_given() -> None:
    with listening(StubKeeper(100)) as listener, connect(listener.address) as connection:
        with pytest.raises(ValueError, match="names 5 bytes, and 6 were given"):
            connection.put(PutRange(1, 0, 5), noise(6), timeout_s=10)
        with pytest.raises(ValueError, match="names 5 bytes, and 6 were given"):
            connection.get(GetRange(CHECKPOINT, 0, 0, 5), noise(6), timeout_s=10)
        assert connection.ask(Finish(1), timeout_s=10) == CopyKept()


def test_a_slot_that_was_cut_short_is_reported_and_the_peer_drops_the_range(tmp_path: Path) -> None:
    path, keeper = written(tmp_path / "slot", noise(3 * MIB)), StubKeeper(4 * MIB)
    with path.open("rb") as file, listening(keeper) as listener, connect(listener.address) as connection:
        with pytest.raises(CorruptError, match=r"corrupt\.short"):
            connection.put(PutRange(1, 0, 4 * MIB), Region(file.fileno(), 0, 4 * MIB), timeout_s=10)
        assert keeper.aborted.wait(10)
        with pytest.raises(StorageError, match="is no longer connected"):
            connection.ask(Finish(1), timeout_s=10)
    assert keeper.sinks[0].marks == [MIB, 2 * MIB, 3 * MIB]


def test_a_source_that_was_cut_short_breaks_the_connection_and_is_left(tmp_path: Path) -> None:
    keeper = StubKeeper(path=written(tmp_path / "slot", noise(3 * MIB)))
    with listening(keeper) as listener, connect(listener.address) as connection:
        with pytest.raises(StorageError, match="broke the connection") as caught:
            connection.get(GetRange(CHECKPOINT, 0, 0, 4 * MIB), np.empty(4 * MIB, np.uint8), timeout_s=10)
        assert (caught.value.code, caught.value.retryable) == ("storage.peer", True)
        wait_until(lambda: keeper.num_sources == 0)


def test_a_connection_that_breaks_in_the_middle_aborts_the_sink_and_the_listener_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = StubKeeper(8 * MIB)
    with listening(keeper) as listener:
        connection = connect(listener.address)
        send = connection._wire.send_bytes

        def send_some(data: Bytes, deadline: Deadline, pace: PutPace | None) -> None:
            send(data[: 3 * MIB], deadline)
            connection.close()

        monkeypatch.setattr(connection._wire, "send_bytes", send_some)
        with pytest.raises(StorageError, match="broke the connection"):
            connection.put(PutRange(1, 0, 8 * MIB), noise(8 * MIB), timeout_s=10)
        assert keeper.aborted.wait(10)
        assert keeper.sinks[0].ends == ["abort"]
        with connect(listener.address) as again:
            assert again.put(PutRange(1, 0, 8 * MIB), noise(8 * MIB), timeout_s=10) == Noted()
    assert np.array_equal(keeper.copies[1], noise(8 * MIB))


def test_a_peer_that_is_killed_in_the_middle_aborts_the_sink_and_the_listener_goes_on() -> None:
    keeper, nbytes = StubKeeper(8 * MIB), 8 * MIB
    with listening(keeper) as listener:
        command = [sys.executable, "-c", SENDER, listener.address, str(nbytes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
            assert sender.stdout is not None
            assert sender.stdout.readline() == "half\n"
            wait_until(lambda: keeper.sinks[0].marks[-1:] == [4 * MIB])
            assert not keeper.aborted.is_set()
            sender.send_signal(signal.SIGKILL)
        assert keeper.aborted.wait(10)
        with connect(listener.address) as again:
            assert again.put(PutRange(1, 0, nbytes), noise(nbytes), timeout_s=10) == Noted()


def test_a_peer_that_stands_still_in_the_middle_meets_the_deadline() -> None:
    keeper = StubKeeper(8 * MIB)
    with listening(keeper, limits=SHORT) as listener:
        connection = connect(listener.address)
        connection._wire.send_message(encode_message(PutRange(1, 0, 8 * MIB)), within(10))
        connection._reply(within(10))
        connection._wire.send_bytes(noise(MIB + 1), within(10))
        start_s = time.monotonic()
        assert keeper.aborted.wait(10)
        assert time.monotonic() - start_s < 3
        assert keeper.sinks[0].marks == [MIB]
        connection.close()


def test_a_peer_that_sends_a_byte_now_and_then_meets_the_deadline_too() -> None:
    keeper = StubKeeper(MIB)
    with listening(keeper, limits=SHORT) as listener:
        connection = connect(listener.address)
        connection._wire.send_message(encode_message(PutRange(1, 0, MIB)), within(10))
        connection._reply(within(10))
        start_s = time.monotonic()
        while not keeper.aborted.wait(0.02):
            connection._wire.send(b"x", within(10))
        assert time.monotonic() - start_s < 3
        assert keeper.sinks[0].marks == []
        connection.close()


def test_a_peer_that_does_not_take_its_bytes_meets_the_deadline(tmp_path: Path) -> None:
    keeper = StubKeeper(path=written(tmp_path / "slot", noise(64 * MIB)))
    with listening(keeper, limits=SHORT) as listener:
        connection = connect(listener.address)
        connection._wire.send_message(encode_message(GetRange(CHECKPOINT, 0, 0, 64 * MIB)), within(10))
        assert connection._reply(within(10)) == Sent(64 * MIB)
        wait_until(lambda: keeper.num_sources == 0)
        connection.close()


def test_a_silent_peer_is_not_waited_for_longer_than_the_caller_says() -> None:
    keeper = StubKeeper()
    keeper.answers.clear()
    with listening(keeper) as listener, connect(listener.address) as connection:
        start_s = time.monotonic()
        with pytest.raises(StorageError, match=r"did not answer within 0\.2 s") as caught:
            connection.ask(Finish(1), timeout_s=0.2)
        assert time.monotonic() - start_s < 3
        assert (caught.value.code, caught.value.retryable) == ("storage.peer", True)
        keeper.answers.set()


def test_an_idle_connection_ends_and_its_next_request_says_so() -> None:
    with listening(StubKeeper(), limits=SHORT) as listener, connect(listener.address) as connection:
        assert connection.ask(Finish(1), timeout_s=10) == CopyKept()
        wait_until(lambda: peer_threads() == ["holdfast-peers"])
        with pytest.raises(StorageError, match="broke the connection") as caught:
            connection.ask(Finish(1), timeout_s=10)
        assert caught.value.retryable


def test_a_close_by_another_thread_ends_the_request() -> None:
    keeper = StubKeeper()
    keeper.answers.clear()
    with listening(keeper) as listener, connect(listener.address) as connection:
        closing = threading.Timer(0.1, connection.close)
        closing.start()
        with pytest.raises(StorageError, match="broke the connection"):
            connection.ask(Finish(1), timeout_s=20)
        closing.join()
        keeper.answers.set()
        with pytest.raises(StorageError, match="is no longer connected"):
            connection.ask(Finish(1), timeout_s=10)
        assert connection._wire._socket.fileno() == -1


def test_closing_a_listener_ends_its_connections_threads_and_sinks() -> None:
    keeper = StubKeeper(8 * MIB)
    with listening(keeper) as listener:
        idle, busy = connect(listener.address), connect(listener.address)
        busy._wire.send_message(encode_message(PutRange(1, 0, 8 * MIB)), within(10))
        busy._reply(within(10))
        listener.close()
        assert keeper.sinks[0].ends == ["abort"]
        wait_until(lambda: peer_threads() == [])
        for connection in (idle, busy):
            with pytest.raises(StorageError, match="broke the connection"):
                connection.ask(Finish(1), timeout_s=10)
        with pytest.raises(StorageError, match="cannot be reached") as caught:
            connect(listener.address)
        assert (caught.value.code, caught.value.retryable) == ("storage.peer", True)
        listener.close()


def test_200_connections_leave_no_descriptor_and_no_thread() -> None:
    keeper = StubKeeper(100)
    with listening(keeper) as listener:
        before = len(os.listdir("/proc/self/fd"))
        for number in range(200):
            connection = connect(listener.address)
            if number % 3 == 0:
                connection._wire.cut()
            elif number % 3 == 1:
                assert connection.put(PutRange(1, 0, 100), noise(100, number), timeout_s=10) == Noted()
            connection.close()
        wait_until(lambda: peer_threads() == ["holdfast-peers"])
        assert len(os.listdir("/proc/self/fd")) == before
        assert (listener._threads, listener._peers, listener._strangers) == (set(), set(), {})
    assert peer_threads() == []


def test_a_listener_serves_so_many_connections_and_tells_the_next_one() -> None:
    with listening(StubKeeper(), limits=PeerLimits(num_connections=2)) as listener:
        with connect(listener.address) as first, connect(listener.address):
            with pytest.raises(StorageError, match="serves as many connections as it can") as caught:
                connect(listener.address)
            assert (caught.value.code, caught.value.retryable) == ("storage.peer", True)
            assert first.ask(Finish(1), timeout_s=10) == CopyKept()
        wait_until(lambda: peer_threads() == ["holdfast-peers"])
        connect(listener.address).close()


def test_an_address_that_cannot_be_listened_at_is_refused() -> None:
    with socket.create_server((HOST, 0)) as taken:
        for host, port in (
            (HOST, taken.getsockname()[1]),
            ("192.0.2.1", 0),
            ("no.such.host.invalid", 0),
        ):
            with pytest.raises(ConfigurationError, match=f"cannot listen at {host}, port {port}") as caught:
                TcpPeers(host).listen(StubKeeper(), secret=SECRET, port=port)
            assert caught.value.code == "config.peer"


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16 bytes, not 3"):
        TcpPeers(HOST).listen(StubKeeper(), secret=b"abc")
    with pytest.raises(ValueError, match="at least 16 bytes, not 0"):
        TcpPeers(HOST).connect("127.0.0.1:1", secret=b"", timeout_s=1)


def test_keepers_meet_over_ipv6() -> None:
    try:
        listener = TcpPeers("::1").listen(StubKeeper(), secret=SECRET)
    except ConfigurationError:
        pytest.skip("this machine has no IPv6")
    with connect(listener.address) as connection:
        assert connection.ask(Finish(1), timeout_s=10) == CopyKept()
    listener.close()
