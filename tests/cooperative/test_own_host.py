"""The address that a host gives to others."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final, cast

import pytest

from holdfast.cooperative.network import TcpTransport, own_host
from holdfast.peers.tcp import TcpPeers
from holdfast.peers.transport import PeerService
from tests.support.nodes import Network, Node
from tests.support.nursery import until

SECRET: Final = b"s" * 32


def tell(result: Path, master: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", master)
        result.write_text(own_host())


def told_on(node: Node, master: str, folder: Path) -> str:
    """The address that a process of the node gives, for which `master` is the MASTER_ADDR."""
    result = folder / "told"
    assert node.start(tell, result, master, err=folder / "err").wait() == 0, (folder / "err").read_text()
    return result.read_text()


def test_a_host_whose_name_leads_to_its_loopback_gives_others_an_address_that_they_reach(
    network: Network, tmp_path: Path
) -> None:
    first, other = network.start(2)
    network.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {first.name}\n{other.address} {other.name}\n")
    assert told_on(first, first.name, tmp_path) == "127.0.0.1"  # there is no route to anything but the other nodes
    route = ["ip", "route", "add", "default", "via", other.address]
    assert first.popen(route, log=tmp_path / "log").wait() == 0
    assert told_on(first, first.name, tmp_path) == first.address
    assert told_on(first, other.name, tmp_path) == first.address
    assert told_on(first, other.address, tmp_path) == first.address


def with_ipv6_alone(node: Node, folder: Path) -> str:
    """Take the IPv4 address of a node away. Returns its new address."""
    address = f"fd00::{node.number + 1}"
    steps = (
        "echo 0 > /proc/sys/net/ipv6/conf/all/disable_ipv6",
        "ip addr flush dev eth0",
        f"ip addr add {address}/64 dev eth0 nodad",
    )
    assert node.popen(["sh", "-ec", "\n".join(steps)], log=folder / "log").wait() == 0, (folder / "log").read_text()
    return address


def listen(told: Path, master: str, reached: Path) -> None:
    """Listen for ranks and for keepers of other nodes, until one has connected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", master)
        with TcpTransport(0) as transport:
            listener = TcpPeers(own_host()).listen(cast("PeerService", None), secret=SECRET)
            told.with_suffix(".new").write_text(f"{transport.address} {listener.address}")
            told.with_suffix(".new").rename(told)
            until(reached.exists, timeout_s=60)
            listener.close()


def reach(told: Path, reached: Path) -> None:
    """Connect to both."""
    until(told.exists, timeout_s=60)
    for_ranks, for_keepers = told.read_text().split()
    host, _, port = for_ranks.rpartition(":")
    socket.create_connection((host, int(port)), timeout=10).close()
    TcpPeers(host).connect(for_keepers, secret=SECRET, timeout_s=10).close()
    reached.touch()


def test_hosts_that_have_no_other_addresses_than_those_of_ipv6_reach_each_other(
    network: Network, tmp_path: Path
) -> None:
    """Each gave its loopback, where others reach nothing: ranks did not read together, and nothing was protected."""
    first, other = network.start(2)
    addresses = [with_ipv6_alone(node, tmp_path) for node in (first, other)]
    network.hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {first.name}\n{addresses[1]} {other.name}\n")
    assert told_on(first, addresses[1], tmp_path) == addresses[0]
    assert told_on(first, other.name, tmp_path) == addresses[0]
    route = ["ip", "-6", "route", "add", "default", "via", addresses[1]]
    assert first.popen(route, log=tmp_path / "log").wait() == 0
    assert told_on(first, first.name, tmp_path) == addresses[0]
    told, reached = tmp_path / "addresses", tmp_path / "reached"
    listening = first.start(listen, told, addresses[1], reached, err=tmp_path / "listen.err")
    assert other.start(reach, told, reached, err=tmp_path / "reach.err").wait() == 0, (
        tmp_path / "reach.err"
    ).read_text()
    assert listening.wait() == 0, listening.err


@pytest.mark.parametrize("master", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_a_job_on_the_loopback_stays_there(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    assert own_host().startswith("127.")


def test_a_master_that_nobody_can_resolve_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object) -> None:
        raise socket.gaierror("there is no name server")

    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    monkeypatch.setattr(socket.socket, "connect", resolve, raising=False)
    assert own_host() == "127.0.0.1"
