"""Collective calls of torch.distributed, counted by torch's profiler, and the bytes that connections send."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@contextmanager
def counted() -> Iterator[list[str]]:
    """Note each collective of torch.distributed that the block runs."""
    calls: list[str] = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        yield calls
    calls += [event.name for event in profiler.events() if event.name.startswith("c10d::")]


def sent_bytes() -> dict[int, int]:
    """For each TCP connection of this process, by the inode of its socket, the bytes that it has sent, but for those to
    the job's store: those of gloo. Linux counts them."""
    found = {}
    store = int(os.environ["MASTER_PORT"])
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # the descriptor of the folder itself
            continue
        if not target.startswith("socket:"):
            continue
        with socket.socket(fileno=os.dup(int(link.name))) as connection:
            is_tcp = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
            if is_tcp and store not in (_peer_port(connection), connection.getsockname()[1]):
                told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 512)
                found[int(target[8:-1])] = struct.unpack_from("Q", told, 200)[0]  # tcpi_bytes_sent
    return found


def _peer_port(connection: socket.socket) -> int:
    """The port of the other end; 0 for a socket that listens."""
    try:
        return int(connection.getpeername()[1])
    except OSError:
        return 0
