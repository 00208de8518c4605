"""Writes the fixtures of ByteCheckpoint, by the real package on ranks of gloo.

It is run by hand, with bytecheckpoint 0.0.2, grpcio, mmh3, cachetools and protobuf 3.20 beside torch::

    python -m tests.interop.write_byte_checkpoint tests/interop/fixtures/byte_checkpoint
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.interop.byte_checkpoint_state import SLOTS, STEP, named_tensor

WORLDS = {"fsdp2": 3, "fsdp": 2, "ddp": 2}


def built(kind: str) -> tuple[nn.Module, torch.optim.AdamW]:
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    net.register_buffer("seen", named_tensor("seen", (4,)).bfloat16())
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.copy_(named_tensor(name, tuple(parameter.shape)))
    if kind == "fsdp2":
        fully_shard(net)
        model: nn.Module = net
    elif kind == "fsdp":
        model = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    else:
        model = nn.parallel.DistributedDataParallel(net)
    return model, torch.optim.AdamW(model.parameters(), lr=0.25)


def fill_slots(kind: str, model: nn.Module, optimizer: torch.optim.AdamW) -> None:
    """Give each parameter slots that are known from its name. (FSDP1 has its own, of a step with zero gradients.)"""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.numel() else None
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.25
    for name, parameter in model.named_parameters() if kind != "fsdp" else ():
        for slot in SLOTS:
            kept = optimizer.state[parameter][slot]
            full = named_tensor(f"{name.removeprefix('module.')}/{slot}", tuple(parameter.shape))
            is_sharded = isinstance(kept, DTensor)
            kept.copy_(distribute_tensor(full, kept.device_mesh, kept.placements) if is_sharded else full)


def write(rank: int, folder: str, kind: str, world_size: int) -> None:
    environment = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29581", BYTECHECKPOINT_ENABLE_PINNED_MEM_D2H="0")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    model, optimizer = built(kind)
    fill_slots(kind, model, optimizer)
    extra = {"rank": rank, "step": STEP, "rng": torch.full((3,), rank, dtype=torch.uint8)}
    state = {"model": model, "optimizer": optimizer, "extra_state": extra}
    importlib.import_module("bytecheckpoint").save(
        ckpt_path=folder, checkpoint_state=state, framework=kind, global_steps=STEP
    )
    time.sleep(10)  # its threads and its server tell nobody when they have finished
    for server in multiprocessing.active_children():
        server.kill()
    os._exit(0)


if __name__ == "__main__":
    for each, ranks in WORLDS.items():
        with tempfile.TemporaryDirectory() as made:
            mp.spawn(write, args=(made, each, ranks), nprocs=ranks)  # type: ignore[no-untyped-call]
            with tarfile.open(Path(sys.argv[1]) / f"byte-checkpoint-{each}-on-{ranks}.tar.xz", "w:xz") as archive:
                archive.add(made, arcname=".")
