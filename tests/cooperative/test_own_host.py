"""The address that a host gives to others."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from holdfast.cooperative.network import own_host
from tests.support.namespaces import INTERFACE
from tests.support.nodes import Network, Node


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


def test_a_host_without_ipv4_gives_others_its_ipv6_address(network: Network, tmp_path: Path) -> None:
    (node,) = network.start(1)
    script = f"""if True:
        import os, socket, subprocess
        open("/proc/sys/net/ipv6/conf/all/disable_ipv6", "w").write("0")
        def ip(*words): subprocess.run(["ip", *words], check=True)
        ip("-4", "addr", "flush", "dev", "{INTERFACE}")
        ip("-6", "addr", "add", "fd00:77::1/64", "dev", "{INTERFACE}", "nodad")
        ip("-6", "route", "add", "default", "via", "fd00:77::2")
        from holdfast.cooperative.network import TcpTransport, own_host
        from holdfast.keeper.link_counters import interface_to
        for os.environ["MASTER_ADDR"] in ("fd00:77::2", "fd00:99::1", "fd00:77::1"):
            assert own_host() == "fd00:77::1", own_host()
        assert interface_to("fd00:77::2") == interface_to("fd00:99::1") == "{INTERFACE}"
        assert interface_to("fd00:77::1") == interface_to("::1") == "lo"
        with TcpTransport(0) as first:
            assert first.address.startswith("fd00:77::1:")
            socket.create_connection((first.address.rpartition(":")[0], int(first.address.rpartition(":")[2]))).close()
    """
    process = node.popen([sys.executable, "-c", script], log=tmp_path / "log")
    assert process.wait() == 0, (tmp_path / "log").read_text()


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
