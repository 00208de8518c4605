"""The pace of a link: whose turn it is, what counters say, and what is sent in the end."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import msgspec
import numpy as np
import pytest

from holdfast import Copies, Memory
from holdfast.errors import StorageError
from holdfast.keeper import link_counters, pacing, piece_pacer
from holdfast.keeper.link_counters import LOOPBACK, chosen_route, interface_to, sent_nbytes
from holdfast.keeper.pacing import LinkPace, LinkPaces
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.peering import PacingRules, PeerNode, PeerTable, note_table, noted_table
from holdfast.peers.peer_messages import GetRange, Noted, PeerReply, Put, PutRange, Sent
from holdfast.peers.transport import PutPace, PutPiece
from tests.peers.stub_keeper import CHECKPOINT, MIB, StubKeeper, StubSink, connect, listening
from tests.support.namespaces import INTERFACE
from tests.support.nodes import Network

ROUTES = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0
ib0\t00004D0A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth1\t00004D0A\t00000000\t0001\t0\t0\t5\t00FFFFFF\t0\t0\t0
none\t07004D0A\t00000000\t0201\t0\t0\t0\tFFFFFFFF\t0\t0\t0
"""
#: As the kernel writes them: destination, source, gateway, metric, two counts, flags, interface.
ROUTES_6 = "".join(
    f"{destination} {'0' * 32} 00 {'0' * 32} {metric} 00000001 00000000 {flags} {interface}\n"
    for destination, metric, flags, interface in (
        ("fd000077000000000000000000000000 40", "00000100", "00000001", "ib0"),
        ("fd000077000000000000000000000000 40", "00000005", "00000001", "eth1"),
        ("fd000077000000000000000000000000 40", "00000001", "00000200", "none"),
        ("00000000000000000000000000000000 00", "00000400", "00000003", "eth0"),
        ("00000000000000000000000000000000 00", "ffffffff", "00200200", "lo"),
    )
)


class Training:
    """Sends so many bytes per second through an interface that only it uses."""

    def __init__(self, bytes_per_s: float = 0.0) -> None:
        self._bytes_per_s, self._since_s, self._sent = bytes_per_s, time.monotonic(), 0.0

    def send(self, bytes_per_s: float) -> None:
        self._sent = self.count("")
        self._bytes_per_s, self._since_s = bytes_per_s, time.monotonic()

    def count(self, interface: str) -> int:
        return int(self._sent + self._bytes_per_s * (time.monotonic() - self._since_s))


def idle_pace(training: Training, *, mode: str = "idle") -> LinkPace:
    rules = msgspec.convert((mode, None), PacingRules)
    return LinkPace("eth7", rules, is_idle_paced=True, count=training.count)


def in_s(seconds: float) -> float:
    return time.monotonic() + seconds


def take(pace: PutPace, *, timeout_s: float = 10.0) -> int:
    with pace.turn(1 << 30, in_s(timeout_s)) as piece:
        return piece.nbytes


def put(pace: PutPace | None, nbytes: int) -> bool:
    """Whether bytes arrive as they were sent."""
    keeper = StubKeeper(nbytes)
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    with listening(keeper) as listener, connect(listener.address) as connection:
        assert connection.put(PutRange(1, 0, nbytes), data, timeout_s=30, pace=pace) == Noted()
    return bool(np.array_equal(keeper.copies[1], data))


def test_bytes_arrive_as_they_were_sent_whatever_the_pace() -> None:
    assert put(idle_pace(Training()), 5 * MIB + 7)
    assert put(idle_pace(Training(), mode="auto"), 5 * MIB + 7)
    assert put(None, 5 * MIB + 7)


def test_what_a_peer_reads_comes_at_the_pace_of_the_node_that_has_it(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, 3 * MIB + 7, dtype=np.uint8)
    path, out = tmp_path / "slot", np.zeros_like(data)
    path.write_bytes(data.tobytes())

    def read(training: Training, timeout_s: float) -> PeerReply:
        pace = idle_pace(training)
        with listening(StubKeeper(path=path, paced=pace)) as listener, connect(listener.address) as connection:
            try:
                return connection.get(GetRange(CHECKPOINT, 0, 0, data.nbytes), out, timeout_s=timeout_s)
            finally:
                pace.release()

    with pytest.raises(StorageError, match="did not answer"):
        read(Training(1e9), 0.3)
    assert read(Training(), 30.0) == Sent(data.nbytes)
    assert np.array_equal(out, data)


def test_a_piece_that_is_larger_than_the_buffer_of_its_connection_is_seen_on_its_way() -> None:
    looked = Event()

    class SlowKeeper(StubKeeper):
        def sink(self, put: Put) -> StubSink:
            sink, received = super().sink(put), 0

            def receive(nbytes: int) -> None:
                nonlocal received
                received += nbytes
                # The buffers hold the rest or not, which depends on the machine. So it is slow at the end.
                if received > 20 * MIB:
                    looked.wait(0.02)

            sink.received = receive  # type: ignore[method-assign]
            return sink

    class Whole:
        def __init__(self) -> None:
            self.seen: list[int] = []

        @contextmanager
        def turn(self, nbytes: int, end_s: float) -> Iterator[PutPiece]:
            yield PutPiece(nbytes, self.left)

        def left(self, nbytes: int) -> float:
            self.seen.append(nbytes)
            looked.set()
            return 0.001

    pace, nbytes = Whole(), 32 * MIB
    with listening(SlowKeeper(nbytes)) as listener, connect(listener.address) as connection:
        connection.put(PutRange(1, 0, nbytes), np.zeros(nbytes, np.uint8), timeout_s=30, pace=pace)
    assert pace.seen
    assert 0 < pace.seen[-1] < nbytes // 2


def test_a_limit_holds_on_any_interface() -> None:
    pace = LinkPaces(PacingRules("auto", 20e6)).to("127.0.0.1:1")
    start_s = time.monotonic()
    assert put(pace, 10 * MIB)
    assert put(pace, 10 * MIB)
    assert time.monotonic() - start_s >= 0.6  # the last piece, of some MiB, is sent at once


def test_nothing_is_held_back_within_a_node_or_where_the_user_wants_no_pace() -> None:
    assert LinkPaces(PacingRules()).to("127.0.0.1:1") is None
    assert LinkPaces(PacingRules("none")).to("127.0.0.1:1") is None


def test_no_piece_is_sent_while_training_sends_and_one_soon_after() -> None:
    training = Training(1e9)
    pace = idle_pace(training)
    with pytest.raises(TimeoutError):
        take(pace, timeout_s=0.2)
    training.send(0.0)
    start_s = time.monotonic()
    assert take(pace) == piece_pacer.MIN_PIECE_NBYTES
    assert time.monotonic() - start_s < 10


def test_training_without_idle_time_does_not_starve_copies_and_the_log_tells_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(piece_pacer, "GRACE_S", 0.2)
    pace = idle_pace(Training(1e9))
    with caplog.at_level(logging.WARNING):
        assert take(pace)
        assert take(pace)
    (record,) = caplog.records
    assert "eth7 too little idle time for copies" in record.message


def test_turns_come_in_the_order_of_the_threads() -> None:
    pace, order = idle_pace(Training()), list[int]()
    threads = []

    def wait_for_turn(number: int) -> None:
        with pace.turn(1, in_s(20)):
            order.append(number)

    with pace.turn(1, in_s(20)):
        for number in range(4):
            threads.append(threading.Thread(target=wait_for_turn, args=(number,)))
            threads[-1].start()
            time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert order == [0, 1, 2, 3]


def test_a_thread_whose_time_is_over_leaves_the_line() -> None:
    pace = idle_pace(Training())
    with pace.turn(1, in_s(20)), pytest.raises(TimeoutError):
        take(pace, timeout_s=0.05)
    assert take(pace)


def test_with_auto_nothing_is_held_back_once_training_did_not_use_the_link_between_two_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "_MIN_REST_S", 0.15)
    training = Training()
    pace, paced = idle_pace(training, mode="auto"), idle_pace(training)
    for each in (pace, paced):
        assert take(each) < 1 << 30
    time.sleep(0.2)
    assert take(pace) == 1 << 30
    assert take(paced) < 1 << 30
    pace._open_until_s = 0.0
    training.send(1e9)
    time.sleep(0.2)
    training.send(0.0)
    assert take(pace) < 1 << 30


def test_rests_of_pieces_of_two_connections_that_are_still_on_the_way_are_not_taken_for_training() -> None:
    counted = 0

    def count(_: str) -> int:
        return counted

    pace = LinkPace("eth7", msgspec.convert(("idle", None), PacingRules), is_idle_paced=True, count=count)
    on_the_way = [0, 0]
    for number in range(20):
        with pace.turn(1 << 30, in_s(20)) as piece:
            assert piece.left is not None
            counted += sum(on_the_way) + piece.nbytes // 2
            on_the_way = [0, piece.nbytes // 2] if number % 2 else [piece.nbytes // 4, piece.nbytes // 4]
            time.sleep(piece.left(piece.nbytes // 2))
    assert not pace._pacer.spans.was_busy


def test_when_the_keeper_ends_nothing_is_held_back() -> None:
    pace = idle_pace(Training(1e9))
    threading.Timer(0.1, pace.release).start()
    assert take(pace) == 1 << 30


@pytest.mark.parametrize(
    ("address", "interface"),
    [("10.77.0.9", "ib0"), ("10.77.0.7", "ib0"), ("8.8.8.8", "eth0")],
)
def test_the_route_with_the_longest_prefix_and_the_least_metric_leads_to_a_peer(address: str, interface: str) -> None:
    if sys.byteorder == "little":
        assert chosen_route(ROUTES, address) == interface
    assert chosen_route(ROUTES.splitlines()[0], address) is None


def test_routes_of_ipv6_lead_to_peers_too() -> None:
    assert chosen_route(ROUTES_6, "fd00:77::9") == "eth1"
    assert chosen_route(ROUTES_6, "2001:db8::1") == "eth0"
    assert chosen_route(ROUTES_6.splitlines()[-1], "2001:db8::1") is None


def test_the_own_addresses_of_a_node_are_reached_by_loopback_whose_bytes_are_counted() -> None:
    assert interface_to("127.0.0.1") == LOOPBACK
    before = sent_nbytes(LOOPBACK)
    assert put(None, MIB)
    assert sent_nbytes(LOOPBACK) - before >= MIB


def test_a_node_of_its_own_network_counts_what_its_own_interface_sends(network: Network, tmp_path: Path) -> None:
    first, second = network.start(2)
    script = f"""
import socket
from holdfast.keeper.link_counters import interface_to, sent_nbytes
print(interface_to("{second.address}"), interface_to("{first.address}"))
before = sent_nbytes("{INTERFACE}")
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    for _ in range(10):
        probe.sendto(bytes(1000), ("{second.address}", 9))
print(10_000 <= sent_nbytes("{INTERFACE}") - before <= 20_000)
"""
    log = tmp_path / "log"
    assert first.popen([sys.executable, "-c", script], log=log).wait(60) == 0, log.read_text()
    assert log.read_text().split() == [INTERFACE, LOOPBACK, "True"]


def test_a_node_without_ipv4_finds_its_interface_too(network: Network, tmp_path: Path) -> None:
    (node,), log = network.start(1), tmp_path / "log"
    ips = (
        "-4 addr flush dev eth0",
        "-6 addr add fd00:77::1/64 dev eth0 nodad",
        "-6 route add default via fd00:77::2",
    )
    enable = "echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6"
    steps = "\n".join((enable, *(f"ip {each}".replace("eth0", INTERFACE) for each in ips)))
    assert node.popen(["sh", "-ec", steps], log=log).wait(60) == 0, log.read_text()
    script = """if True:
        from holdfast.keeper.link_counters import interface_to
        print(*(interface_to(peer) for peer in ("fd00:77::2", "fd00:99::1", "fd00:77::1", "::1")))
    """
    assert node.popen([sys.executable, "-c", script], log=log).wait(60) == 0, log.read_text()
    assert log.read_text().split() == [INTERFACE, INTERFACE, LOOPBACK, LOOPBACK]


def test_the_pace_travels_to_keepers_in_the_table_of_peers(tmp_path: Path) -> None:
    table = PeerTable(bytes(16), 0, (PeerNode("a", "h:1"), PeerNode("b", "h:2")), ((1,), (0,)))
    with NodeFolder("file:///run", node_dir=tmp_path) as folder:
        for rules in (PacingRules(), PacingRules("idle", 1e9), PacingRules("none")):
            wanted = msgspec.structs.replace(table, pacing=rules)
            note_table(folder, wanted)
            assert noted_table(folder) == wanted


def test_wrong_paces_are_refused_where_they_are_given() -> None:
    with pytest.raises(ValueError, match="protect_pace is 'auto', 'idle' or 'none', not 'fast'"):
        Memory(protect=Copies(1), protect_pace="fast")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="protect_bytes_per_s must be positive"):
        Memory(protect=Copies(1), protect_bytes_per_s=-1.0)
    for endless, why in ((10**400, "a float can hold"), (math.inf, "is infinite; pass None"), (math.nan, "positive")):
        with pytest.raises(ValueError, match=why):
            Memory(protect=Copies(1), protect_bytes_per_s=endless)
    with pytest.raises(ValueError, match="must be at least 1,000,000"):
        Memory(protect=Copies(1), protect_bytes_per_s=1000)
    with pytest.raises(TypeError, match="a number of bytes"):
        Memory(protect=Copies(1), protect_bytes_per_s="fast")  # type: ignore[arg-type]
    rules = Memory(protect=Copies(1), protect_pace="idle", protect_bytes_per_s=5_000_000).protection
    assert rules is not None
    assert rules.pacing == PacingRules("idle", 5e6)


def test_counters_that_cannot_be_read_are_no_error_of_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper's log said that the peer had broken the connection, and to look at a firewall."""
    monkeypatch.setattr(link_counters, "_COUNTERS", tmp_path / "none")
    with pytest.raises(StorageError, match="this node cannot read"):
        sent_nbytes("eth0")
