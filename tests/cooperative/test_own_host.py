"""The address that a host gives to others."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from holdfast.cooperative.network import own_host
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
