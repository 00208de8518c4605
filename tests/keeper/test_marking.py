"""The messages of keepers about protection, where one of them cannot be reached or cannot be protected."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

import pytest

from holdfast.errors import ConfigurationError
from holdfast.keeper import marking, protecting
from holdfast.keeper.daemon import Keeper
from holdfast.keeper.peer_memory import KEPT
from holdfast.node_memory.generations import protected_ids
from holdfast.node_memory.node_folder import NodeFolder
from holdfast.node_memory.peering import (
    PeerNode,
    PeerSecret,
    PeerTable,
    digest_of,
    note_secret,
    note_table,
    noted_port,
    peer_trouble,
    trouble_elsewhere,
)
from holdfast.node_memory.slots import Slot, copy_names
from holdfast.peers import tcp_listener
from holdfast.peers.peer_messages import Declined
from holdfast.peers.tcp import TcpConnection, TcpPeers
from holdfast.run.history import Run
from tests.keeper.test_copies import SECRET, keepers_of, look, meet
from tests.keeper.test_copies import saved as _saved
from tests.keeper.test_copies import stack as _stack
from tests.keeper.test_keeper_promises import Later
from tests.keeper.test_persist import CHECKPOINT, Saved
from tests.keeper.test_persist import folders as _folders
from tests.keeper.test_persist import run as _run
from tests.support.nursery import until

run, folders, saved, stack = _run, _folders, _saved, _stack

#: Time after which a connection to the silent keeper fails.
_CONNECT_S: Final = 1.5


class SilentNode:
    """A node whose keeper takes connections, and says nothing. Connections to it fail after a while."""

    def __init__(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.num_connections = 0
        connect = TcpPeers.connect

        def counted(peers: TcpPeers, address: str, *, secret: bytes, timeout_s: float) -> TcpConnection:
            if address == self.address:
                self.num_connections += 1
                timeout_s = _CONNECT_S
            return connect(peers, address, secret=secret, timeout_s=timeout_s)

        monkeypatch.setattr(TcpPeers, "connect", counted)


def keepers_beside(
    silent: SilentNode, folders: Sequence[NodeFolder], targets: tuple[tuple[int, ...], ...], stack: ExitStack
) -> list[Keeper]:
    """Keepers of the nodes after the first one, which is silent."""
    keepers = [Keeper(folder) for folder in folders]
    for folder, keeper in zip(folders, keepers, strict=True):
        stack.callback(keeper.close)
        note_secret(folder, PeerSecret(SECRET, "127.0.0.1"))
        keeper.look()
    ports = [noted_port(folder) for folder in folders]
    addresses = [silent.address, *(f"127.0.0.1:{port.port}" for port in ports if port)]
    nodes = tuple(PeerNode(str(number), address) for number, address in enumerate(addresses))
    for number, folder in enumerate(folders, start=1):
        note_table(folder, PeerTable(digest_of(SECRET), number, nodes, targets))
    return keepers


class OneSender(ThreadPoolExecutor):
    """One thread that sends, which counts what it has begun."""

    def __init__(self) -> None:
        super().__init__(1)
        self.num_begun = 0

    def submit(self, function: Any, /, *args: Any, **options: Any) -> Future[Any]:
        def counted() -> Any:
            self.num_begun += 1
            return function(*args, **options)

        return super().submit(counted)


def num_copies(folder: NodeFolder, step: int) -> int:
    number = 0
    for name in copy_names(folder):
        with Slot(folder, name) as slot:
            contents = slot.record.contents
            number += slot.state in KEPT and contents is not None and contents.step == step
    return number


def test_a_first_node_that_does_not_answer_does_not_delay_copies_to_other_nodes(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each second, a keeper told the first node that its copies are kept, and each try took ten seconds: they took all
    threads that send copies, and ever more of them waited."""
    silent = SilentNode(stack, monkeypatch)
    monkeypatch.setattr(marking, "_SAY_AGAIN_S", 0.02)
    keepers = keepers_beside(silent, folders, ((1,), (2,), (1,)), stack)
    until(lambda: look(*keepers) and num_copies(folders[1], 7) == 1 and num_copies(folders[0], 7) == 1)
    until(lambda: look(*keepers) and silent.num_connections >= 2)
    end_s = time.monotonic() + 0.3
    until(lambda: look(*keepers) and time.monotonic() > end_s)
    assert silent.num_connections == 2  # one of each node
    Later(saved, folders[0], stack)
    begun_s = time.monotonic()
    until(lambda: look(*keepers) and num_copies(folders[1], 8) == 2)
    assert time.monotonic() - begun_s < 4 * _CONNECT_S


def test_a_peer_that_cannot_be_reached_takes_one_thread_of_those_that_send_copies(
    run: Run, folders: list[NodeFolder], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of all slots for a lost peer took all threads for ten seconds each, again and again, before those for
    other peers."""
    silent = SilentNode(stack, monkeypatch)
    Saved(run, [folders[0], folders[0]], stack)
    keepers = keepers_beside(silent, folders, ((1,), (0, 2), (0, 1)), stack)
    monkeypatch.setattr(keepers[0]._protection, "_senders", sender := OneSender())
    until(lambda: look(*keepers) and num_copies(folders[1], 7) == 2)
    assert sender.num_begun <= 4  # two of slots to the node that answers, and one or two to the one that does not
    assert "127.0.0.1" in peer_trouble(folders[0])


@pytest.mark.parametrize("number", [0, 1])
def test_the_ranks_of_all_nodes_hear_why_one_of_them_cannot_be_protected(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Only the ranks of the node that could not be protected did. The others were told to read the log of a keeper."""
    keepers = keepers_of(folders, stack)
    full, other = 1 - number, folders[1 - number]
    with monkeypatch.context() as patched:  # the copy for node `number` finds no room
        patched.setattr(keepers[full]._copies, "offer", lambda _: Declined("there is no room"))
        until(lambda: look(*keepers) and "there is no room" in trouble_elsewhere(other))
        assert "says: step 7 is not protected by" in trouble_elsewhere(other)
        assert not trouble_elsewhere(folders[number])
        assert not peer_trouble(other)  # its saves go on to wait for protection
    until(lambda: look(*keepers) and all(protected_ids(folder) == {CHECKPOINT} for folder in folders))
    until(lambda: look(*keepers) and not any(trouble_elsewhere(folder) for folder in folders))


def test_a_keeper_that_could_not_listen_tries_again(
    saved: Saved, folders: list[NodeFolder], stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not, so for want of a free port for a moment no snapshot of a job was protected."""
    monkeypatch.setattr(protecting, "_LISTEN_AGAIN_S", 0.05)
    note_secret(folders[0], PeerSecret(SECRET, "127.0.0.1"))
    keeper = Keeper(folders[0])
    stack.callback(keeper.close)
    with monkeypatch.context() as patched:
        patched.setattr(tcp_listener, "_listening", _raise_no_port)
        keeper.look()
        port = noted_port(folders[0])
        assert port is not None
        assert "no free port" in port.error
    until(lambda: look(keeper) and (port := noted_port(folders[0])) is not None and not port.error)
    second = Keeper(folders[1])
    stack.callback(second.close)
    meet(folders, [keeper, second])
    until(lambda: look(keeper, second) and all(protected_ids(folder) == {CHECKPOINT} for folder in folders))


def _raise_no_port(*_: object) -> None:
    raise ConfigurationError("there is no free port.", code="config.peer", action="Name one.")
