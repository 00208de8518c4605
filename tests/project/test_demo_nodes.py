"""The parts of the demo that loses a node, and the demo itself."""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from demo import nodes
from demo.page import Block, NodeBox, Phase, Picture, Story, drawn, page_of
from demo.processes import ROOT
from demo.promises import Promise, newest_from_peers
from demo.traffic import Packet, Traffic, parsed
from tests.support.browser import found_by, needs_browser
from tests.support.nodes import Network
from tests.support.nursery import until

PROMISE = "what is promised"
PORT = 2900


def frame(nbytes: int, *, protocol: int = 6, ethertype: int = 0x0800) -> bytes:
    """The headers of a packet with so many bytes of data, from 10.0.0.1:1000 to 10.0.0.2:2000."""
    ip = struct.pack("!BBHHHBBH", 0x46, 0, 24 + 32 + nbytes, 0, 0, 64, protocol, 0)
    ip += socket.inet_aton("10.0.0.1") + socket.inet_aton("10.0.0.2") + bytes(4)
    tcp = struct.pack("!HHIIBBHHH", 1000, 2000, 0, 0, 0x80, 0, 0, 0, 0) + bytes(12)
    return bytes(12) + struct.pack("!H", ethertype) + ip + tcp


def test_the_data_of_a_packet_are_counted_without_its_headers() -> None:
    assert parsed(frame(777), at=1.5) == Packet(1.5, ("10.0.0.1", 1000), ("10.0.0.2", 2000), 777)


@pytest.mark.parametrize("data", [frame(777, protocol=17), frame(777, ethertype=0x86DD), frame(777)[:40]])
def test_what_is_no_packet_of_tcp_is_not_counted(data: bytes) -> None:
    assert parsed(data, at=1.5) is None


def serve(nbytes: int) -> None:
    with socket.create_server(("", PORT)) as server:
        connection, _ = server.accept()
        with connection:
            connection.sendall(bytes(nbytes))


def receive(name: str) -> None:
    with socket.create_connection((name, PORT), timeout=20) as connection:
        while connection.recv(2**20):
            pass


def test_the_switch_sees_who_sends_how_many_bytes_to_whom(network: Network, tmp_path: Path) -> None:
    one, other = network.start(2)
    with Traffic(network.switch) as traffic:
        begin = time.time()
        serving = one.start(serve, 3_000_000, err=tmp_path / "err")
        until(lambda: f":{PORT:04X} 00000000:0000 0A" in Path(f"/proc/{one.init}/net/tcp").read_text())
        assert other.start(receive, one.name, err=tmp_path / "err").wait() == 0
        assert serving.wait() == 0
        until(lambda: traffic.sent(begin, time.time())[one.address, other.address] >= 3_000_000)
        end = time.time()
    assert traffic.num_missed == 0
    sent = traffic.sent(begin, end)
    assert set(sent) == {(one.address, other.address)}
    assert 3_000_000 <= sent.total() < 3_100_000  # bytes that are sent again count again
    assert traffic.sent(begin, end, of=[(one.address, PORT)]) == sent
    assert not traffic.sent(begin, end, but=[(one.address, PORT)])
    assert not traffic.sent(end, end + 1)


def test_only_the_newest_protected_step_from_peers_on_all_ranks_keeps_the_promise() -> None:
    restored: dict[str, object] = {"step": 14, "tier": "peer memory"}
    assert newest_from_peers(PROMISE, [restored] * 3, protected=14, head=8).kept
    assert newest_from_peers(PROMISE, [restored] * 3, protected=12, head=8).kept  # protected after the last look
    assert not newest_from_peers(PROMISE, [restored] * 3, protected=16, head=8).kept
    assert not newest_from_peers(PROMISE, [restored, restored | {"tier": "storage"}], protected=14, head=8).kept
    assert not newest_from_peers(PROMISE, [restored, restored | {"step": 16}], protected=14, head=8).kept
    assert not newest_from_peers(PROMISE, [restored] * 3, protected=14, head=14).kept


def picture() -> Picture:
    boxes = [NodeBox(f"node{i}", f"10.0.0.{i}", [Block(f"rank {i}", is_copy=False)], is_lost=i == 2) for i in range(3)]
    return Picture("It goes on", "<nodes>", boxes, {("10.0.0.0", "10.0.0.1"): 4_000_000, ("10.0.0.1", "10.0.0.0"): 50})


def test_a_picture_has_an_arrow_for_each_pair_of_nodes_that_sent_more_than_messages() -> None:
    svg = drawn(picture())
    assert svg.count('class="arrow"') == 1
    assert "node0 sent 4.0 MB to node1" in svg
    assert svg.count('class="cross"') == 2


def page() -> str:
    phases = [Phase("The others notice", 6.5), Phase("holdfast restores", 0.5, is_own=True)]
    promises = [Promise("All is well", kept=True, seen="yes"), Promise("No & yes", kept=False, seen="<no>")]
    return page_of(Story("A node is lost", "The story.", [picture()], phases, promises, "Counted."))


def test_the_page_loads_nothing_and_says_what_was_seen() -> None:
    text = page()
    assert not re.findall(r"(?:src|href|url)\s*[=(]", text)
    for told in ("&lt;nodes&gt;", "7.0 s, of which holdfast took 0.5 s", "BROKEN", "No &amp; yes", "&lt;no&gt;"):
        assert told in text


@needs_browser
@pytest.mark.slow
def test_the_page_opens_in_a_browser_and_nothing_of_it_is_wider_than_the_window(tmp_path: Path) -> None:
    file = tmp_path / "nodes.html"
    file.write_text(page())
    assert found_by(file, "document.querySelectorAll('svg rect.box').length") == "2"
    assert found_by(file, "document.documentElement.scrollWidth <= innerWidth", width=800) == "true"


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("network")  # nodes can be emulated here
def test_the_demo_loses_a_node_and_keeps_its_promises(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "COLUMNS": "200"}
    command = [sys.executable, "-m", "demo.nodes"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BROKEN" not in done.stdout
    assert re.search(r"All \d+ promises were kept", done.stdout)
    assert "node3 is lost" in (tmp_path / "demo-nodes-out" / "nodes.html").read_text()


def test_the_demo_says_in_one_sentence_why_no_nodes_can_be_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "missing", lambda: "only root may make the namespaces of emulated nodes")
    monkeypatch.setattr("sys.argv", ["demo.nodes"])
    with pytest.raises(SystemExit, match="demo: only root may make the namespaces of emulated nodes"):
        nodes.main()
