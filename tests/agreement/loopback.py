"""Bytes that two ranks exchange per save, counted by the kernel on the loopback of a network namespace of their own.

A test runs `main` in a process of its own, without threads.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import multiprocessing
import os
import socket
import struct
import tempfile
from pathlib import Path

CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
NO_RIGHT = "no right to make a network namespace"
NUM_TENSORS, NUM_SAVES = 3000, 4


def main(out: Path) -> None:
    """Write one JSON list into the file `out`: the loopback's bytes during each of four saves of 3,000 tensors."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise OSError(f"{NO_RIGHT}: {os.strerror(ctypes.get_errno())}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=rank_main, args=(rank, folder, results)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(90)
        assert all(process.exitcode == 0 for process in ranks), [process.exitcode for process in ranks]
        out.write_text(json.dumps(results.get()))


def rank_main(rank: int, folder: str, results: multiprocessing.SimpleQueue[list[int]]) -> None:
    """Save a few times and report the bytes of each."""
    import torch
    import torch.distributed as dist

    import holdfast

    store = dist.TCPStore("127.0.0.1", 29511, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = torch.nn.ParameterDict({f"layers-{i}": torch.full((2, 2), float(i)) for i in range(NUM_TENSORS)})
    model[f"only-on-{rank}"] = torch.ones(rank)  # so that rank 1's layout is its own, and must be sent
    counts = []
    for step in range(NUM_SAVES):
        dist.barrier()
        before = loopback_nbytes()
        holdfast.save(f"{folder}/run", {"model": model, "epoch": step}, step)
        counts.append(loopback_nbytes() - before)
    dist.barrier()
    if rank == 0:
        results.put(counts)
    dist.destroy_process_group()


def loopback_nbytes() -> int:
    """Bytes that the loopback has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[0])
    raise RuntimeError("there is no loopback")
