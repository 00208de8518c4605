"""Connections between ranks of one node that read for each other: shared memory for the bytes, sockets for messages.

Each rank fills memory that the others see. One message says which chunk a part of it holds, and another one that the
part may be reused. The memory is a ``memfd``, which has no name and is passed through the sockets, and the sockets have
abstract addresses. So neither uses a file system or its space, and a killed rank leaves nothing behind. The death of a
rank closes its sockets, and the others notice at once.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from holdfast.io import pages
from holdfast.store.base import Bytes

_CREDENTIALS = struct.Struct("iII")
#: The rank that greets, and the bytes of memory that it shares: first those of its data, then those of its note.
_HELLO = struct.Struct("<IQQ")
#: Pause before the next attempt to reach a rank that does not listen yet.
_RETRY_S = 0.002


def node_id() -> bytes:
    """16 bytes that are equal on two processes exactly when they can be neighbours.

    Where the system lacks what neighbours need (``memfd`` or abstract sockets), the bytes are random, so that the
    process has no neighbours.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")
        network = Path("/proc/self/ns/net").stat().st_ino
        with Neighbours(secrets.token_bytes(16), 0), SharedMemory(1, b""):
            pass
    except (OSError, AttributeError):
        return secrets.token_bytes(16)
    mixed = int(boot, 16) ^ (network << 32) ^ os.geteuid()
    return mixed.to_bytes(16, "little")


class NeighbourGone(Exception):  # noqa: N818 - no error of this rank: the other rank knows what happened
    """The ranks that this rank waited for and that failed, died or were late. Never reaches a caller: all ranks raise
    the error that those ranks report, or a `DeadlineError` that names them."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(sorted(ranks))
        super().__init__(f"waited for ranks {', '.join(map(str, self.ranks))}")


class SharedMemory:
    """Memory of this process that its neighbours can read: `data_nbytes` of data, which it fills again and again, and
    a `note`, which never changes."""

    def __init__(self, data_nbytes: int, note: bytes) -> None:
        self.data_nbytes = data_nbytes
        self.note_nbytes = len(note)
        self._fd = os.memfd_create("holdfast", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, data_nbytes + len(note))
            # If the memory shrank, a neighbour that reads it would be killed by SIGBUS.
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            os.pwrite(self._fd, note, data_nbytes)
            self.data = pages.shared(self._fd, data_nbytes)
        except BaseException:
            os.close(self._fd)
            raise

    def fileno(self) -> int:
        """The file descriptor of the memory."""
        return self._fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the descriptor. The system frees the memory when no process refers to `data` any more."""
        os.close(self._fd)


class Neighbour(NamedTuple):
    """Another rank: the connection to it, the data memory that it fills, and its note."""

    connection: socket.socket
    data: Bytes
    note: bytes


class Neighbours:
    """The neighbours of `rank`. Use it as a context manager, which closes all connections at its end.

    The constructor listens, and `connect` finds the others. Only the ranks of one operation know its `token`.
    """

    def __init__(self, token: bytes, rank: int) -> None:
        self.rank = rank
        self.others: dict[int, Neighbour] = {}
        self._token = token
        self._connections: list[socket.socket] = []
        self._listener = self._socket()
        self._listener.bind(self._address(rank))
        self._listener.listen(1024)

    def connect(self, ranks: Iterable[int], shared: SharedMemory, *, end_s: float) -> None:
        """Connect to all other `ranks`, and exchange memory with each. Blocks until `end_s` of the monotonic clock at
        most.

        Raises `NeighbourGone` for ranks that it could not connect to.
        """
        lower = sorted(rank for rank in ranks if rank < self.rank)
        waiting = {rank for rank in ranks if rank > self.rank}
        reached = {rank: self._reach(rank, shared, end_s) for rank in lower}
        while waiting:
            rank, neighbour = self._admit(waiting, end_s)
            _greet(neighbour.connection, self.rank, shared)
            self.others[rank] = neighbour
            waiting.remove(rank)
        for rank, connection in reached.items():
            self.others[rank] = self._greeting(connection, {rank}, end_s)[1]
        for neighbour in self.others.values():
            neighbour.connection.settimeout(None)

    def close(self) -> None:
        """Close all connections, which tells the neighbours that this rank has stopped. Never raises."""
        for connection in (self._listener, *self._connections):
            connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _reach(self, rank: int, shared: SharedMemory, end_s: float) -> socket.socket:
        connection = self._socket()
        self._connections.append(connection)
        while True:
            connection.settimeout(_remaining_s(end_s))
            try:
                connection.connect(self._address(rank))
                _greet(connection, self.rank, shared)
                return connection
            except (ConnectionError, TimeoutError) as error:
                if time.monotonic() > end_s:
                    raise NeighbourGone([rank]) from error
            time.sleep(_RETRY_S)

    def _admit(self, waiting: set[int], end_s: float) -> tuple[int, Neighbour]:
        while True:
            self._listener.settimeout(_remaining_s(end_s))
            try:
                connection, _ = self._listener.accept()
            except TimeoutError as error:
                raise NeighbourGone(waiting) from error
            self._connections.append(connection)
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] == os.geteuid():
                return self._greeting(connection, waiting, end_s)

    def _greeting(self, connection: socket.socket, expected: set[int], end_s: float) -> tuple[int, Neighbour]:
        connection.settimeout(_remaining_s(end_s))
        try:
            hello, fds, _, _ = socket.recv_fds(connection, _HELLO.size, 1)
        except (ConnectionError, TimeoutError) as error:
            raise NeighbourGone(expected) from error
        if len(hello) != _HELLO.size or len(fds) != 1:
            raise NeighbourGone(expected)
        with os.fdopen(fds[0], "rb") as file:
            rank, data_nbytes, note_nbytes = _HELLO.unpack(hello)
            # Mapped writable although nothing writes to it: torch warns about read-only memory.
            memory = mmap.mmap(file.fileno(), data_nbytes + note_nbytes)
        assert rank in expected, f"rank {rank} took the address of another"
        data = np.frombuffer(memory, np.uint8, data_nbytes)
        return rank, Neighbour(connection, data, memory[data_nbytes:])

    def _address(self, rank: int) -> bytes:
        return b"\0holdfast-" + self._token.hex().encode("ascii") + b"-%d" % rank

    @staticmethod
    def _socket() -> socket.socket:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def _greet(connection: socket.socket, rank: int, shared: SharedMemory) -> None:
    hello = _HELLO.pack(rank, shared.data_nbytes, shared.note_nbytes)
    socket.send_fds(connection, [hello], [shared.fileno()])


def _remaining_s(end_s: float) -> float:
    return max(end_s - time.monotonic(), 0.001)
