"""Rank 0's process may serve the store of the job and end right after its last call; the other ranks still hear how
that call ended."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import Checkpointer, Memory
from tests.support import nursery
from tests.support.keepers import end_keepers

WORLD_SIZE = 3
ROUNDS = 2


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def call_and_end(rank: int, port: int, verb: str, folder: Path) -> None:
    """Rank 0 serves the store here, as where a launcher has no store of its own."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD_SIZE)
    state = {"w": torch.full((1000,), 1.0)}
    run, memory = folder / "run", Memory(node_dir=folder)
    if verb == "save":
        holdfast.save(run, state, 1)
    elif verb == "load":
        holdfast.load(run, state)
    elif verb == "transfer":
        holdfast.transfer(state, {"w": torch.zeros(1000)})
    elif verb == "close":
        with Checkpointer(run, state, memory=memory) as checkpointer:
            checkpointer.save(1)
    else:
        Checkpointer(run, state, memory=memory).restore()
    os._exit(0)


@pytest.mark.parametrize("verb", ["save", "load", "transfer", "close", "restore"])
def test_all_ranks_hear_the_end_of_a_last_call_though_rank_0_ends_at_once(tmp_path: Path, verb: str) -> None:
    folders = [tmp_path / str(number) for number in range(ROUNDS)]
    try:
        for folder in folders:
            folder.mkdir()
            if verb in ("load", "restore"):
                with Checkpointer(folder / "run", {"w": torch.zeros(1000)}, memory=Memory(node_dir=folder)) as saving:
                    saving.save(1)
            port = free_port()
            ranks = [
                nursery.start(call_and_end, rank, port, verb, folder, err=folder / f"err-{rank}")
                for rank in range(WORLD_SIZE)
            ]
            assert [(rank.wait(), rank.err if rank.wait() else "") for rank in ranks] == [(0, "")] * WORLD_SIZE
    finally:
        for folder in folders:
            end_keepers(folder)
