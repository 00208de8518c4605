"""A rank of a job that trains on samples in order, for `test_data_jobs`: it logs what it trains on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import holdfast
from holdfast.data import GlobalOrder, MixedOrder, ShardedStream
from tests.data.test_sharded_stream import NUM_SHARDS, open_shard

BATCH = 120
LENGTHS, WEIGHTS = {"web": 901, "code": 100}, {"web": 3, "code": 1}
#: The sum of digits that each step folds into the state.
BASE = 1_000_003


def data_of(kind: str, num_workers: int) -> tuple[object, Iterator[Any]]:
    """The entry for the state, and this rank's batches."""
    if kind == "stream":
        stream = ShardedStream(open_shard, num_shards=NUM_SHARDS, global_batch_size=BATCH)
        streamed: DataLoader[object] = DataLoader(stream, batch_size=None, num_workers=num_workers)
        return stream.state, stream.follow(streamed)
    order: GlobalOrder | MixedOrder
    if kind == "mixture":
        order = MixedOrder(LENGTHS, weights=WEIGHTS, global_batch_size=BATCH, seed=4)
    else:
        order = GlobalOrder(1001, global_batch_size=BATCH, seed=4)
    numbers: Any = torch.arange(1001)  # not a Dataset, but one that loaders take
    loader: DataLoader[torch.Tensor] = DataLoader(numbers, batch_sampler=order, num_workers=num_workers)
    return order, order.follow(loader)


def main(kind: str, run: str, node_dir: str, log: str, num_steps: int, num_workers: int) -> None:
    """Train up to `num_steps`, and save now and then. The environment is that of a rank."""
    dist.init_process_group("gloo")
    data, batches = data_of(kind, num_workers)
    model = torch.zeros(2, dtype=torch.int64)
    memory = holdfast.Memory(node_dir=Path(node_dir))
    with (
        Path(log).open("a", encoding="utf-8", buffering=1) as lines,
        holdfast.Checkpointer(
            run, {"model": model, "data": data}, memory=memory, save=holdfast.EverySteps(3)
        ) as checkpointer,
    ):
        for step in checkpointer.steps(num_steps):
            batch = next(batches)
            lines.write(f"{step} {batch.tolist()}\n")
            total = batch.sum().to(torch.int64)
            dist.all_reduce(total)
            model.mul_(BASE).add_(total)
            checkpointer.step(step)
            time.sleep(0.03)  # so that a kill comes between two saves
        lines.write(f"{num_steps} {model.tolist()}\n")
    dist.destroy_process_group()
