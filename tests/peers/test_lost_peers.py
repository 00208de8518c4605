"""Peers that vanish from the network in the middle of a request, and close no connection."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest

from holdfast.errors import StorageError
from holdfast.peers import wire
from holdfast.peers.peer_messages import Finish
from holdfast.peers.tcp import TcpPeers
from tests.peers.stub_keeper import SECRET, StubKeeper
from tests.support.nodes import Network
from tests.support.nursery import until

PORT = 29600
LOST_S = 3


def serve(host: str, asked: Path) -> None:
    """Answer no request."""
    keeper = StubKeeper()
    keeper.answers.clear()
    with patch.object(wire, "LOST_S", LOST_S):
        TcpPeers(host).listen(keeper, secret=SECRET, port=PORT)
        asked.with_name("listens").touch()
        until(lambda: bool(keeper.requests))
        asked.touch()
        time.sleep(60)


def ask(host: str, result: Path) -> None:
    """Make a request that gets no answer."""
    connect = partial(TcpPeers(host).connect, f"{host}:{PORT}", secret=SECRET, timeout_s=20)
    with patch.object(wire, "LOST_S", LOST_S), connect() as connection:
        begun_s = time.monotonic()
        with pytest.raises(StorageError, match="broke the connection") as raised:
            connection.ask(Finish(1), timeout_s=600)
        result.write_text(f"{time.monotonic() - begun_s} {raised.value}")


@pytest.mark.slow
def test_a_request_of_a_peer_that_vanishes_fails_soon(network: Network, tmp_path: Path) -> None:
    peer, own = network.start(2)
    asked, result, err = tmp_path / "asked", tmp_path / "result", tmp_path / "err"
    peer.start(serve, peer.address, asked, err=err)
    until((tmp_path / "listens").exists)
    asking = own.start(ask, peer.address, result, err=err)
    until(asked.exists)
    peer.lose()
    assert asking.wait(60) == 0, err.read_text()
    assert float(result.read_text().split()[0]) < 3 * LOST_S
