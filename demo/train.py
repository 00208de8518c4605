"""The training script: FSDP2, AdamW, warm-up and cosine, and a checkpointer of holdfast. Run by torchrun.

It goes on from the newest checkpoint of its run where there is one, on whatever number of ranks it is started. All that
concerns the witness is the demo's own; the rest is what a script of yours looks like.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import holdfast
from demo.model import GPT, Shape, loss_of
from demo.recorder import Recorder
from demo.records import Restored
from demo.text import Batches, standard_library

_BATCH_SIZE = 32
_LEARNING_RATE = 3e-3
_WARM_UP = 0.1
_SEED = 1


@dataclass(frozen=True)
class Options:
    """`witness` is a folder for what the demo notes, `save_to` a run; without that nothing is saved. Without a
    `node_dir`, a folder in memory, a save returns when it is in storage. The schedule is that of all `steps`, of which
    the first `until` are made."""

    witness: Path
    steps: int
    until: int
    save_to: Path | None
    save_every: int
    node_dir: Path | None
    timeout_s: float


def main() -> int:
    options = _parse()
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    try:
        _train(options)
    except holdfast.HoldfastError as error:
        print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


def _train(options: Options) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shape = Shape()
    model = _sharded(shape, world_size)
    optimizer = _optimizer(model)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, options.steps))
    batches = Batches(standard_library(), size=_BATCH_SIZE, context=shape.context, seed=_SEED)
    witness = Recorder(options.witness, rank=rank)

    state: dict[str, object] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with _checkpointer(options, state) as checkpointer:
        start = 0
        if checkpointer is not None and (restored := _restore(checkpointer)) is not None:
            start = restored.step + 1
            witness.restored(restored)
            witness.state("loaded", restored.step, model, optimizer, schedule)
        for step in range(start, options.until):
            loss = loss_of(model, batches.local(step, rank=rank, world_size=world_size))
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not say
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

            mean_loss = _mean_over_ranks(loss)
            witness.loss(step, mean_loss)
            if checkpointer is not None and (step + 1) % options.save_every == 0:
                witness.state("saved", step, model, optimizer, schedule)
                handle = checkpointer.save(step, metrics={"loss": mean_loss})
                witness.saved(step, handle.blocked_s)


def _checkpointer(options: Options, state: dict[str, object]) -> AbstractContextManager[holdfast.Checkpointer | None]:
    if options.save_to is None:
        return nullcontext()
    memory = None if options.node_dir is None else holdfast.Memory(node_dir=options.node_dir)
    return holdfast.Checkpointer(options.save_to, state, memory=memory, timeout_s=options.timeout_s)


def _restore(checkpointer: holdfast.Checkpointer) -> Restored | None:
    """Go on from the newest checkpoint; None where there is none."""
    begun_s = time.perf_counter()
    report = checkpointer.restore()
    if report.step is None or report.tier is None or report.load is None:
        return None
    return Restored(report.step, report.tier, report.load.read_nbytes, time.perf_counter() - begun_s)


def _sharded(shape: Shape, world_size: int) -> GPT:
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(_SEED)
    model = GPT(shape)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _optimizer(model: nn.Module) -> AdamW:
    """Matrices decay; vectors, which are biases and norms, do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim >= 2], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=_LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth of all `steps`, then half a cosine down to a tenth."""
    warm_up = max(1, round(_WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min((step - warm_up) / max(1, steps - warm_up), 1.0)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def _mean_over_ranks(loss: torch.Tensor) -> float:
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _parse() -> Options:
    parser = argparse.ArgumentParser(
        description="Train a small GPT, from the newest state of its run where there is one."
    )
    parser.add_argument("--witness", type=Path, required=True, help="folder for losses and digests")
    parser.add_argument("--steps", type=int, required=True, help="steps of the whole training")
    parser.add_argument("--until", type=int, required=True, help="how many of them are made")
    parser.add_argument("--save-to", type=Path, metavar="RUN", help="the run to go on from and to save to")
    parser.add_argument("--save-every", type=int, default=10, help="steps between saves")
    parser.add_argument("--node-dir", type=Path, help="folder in memory for saves that training does not wait for")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="how long a save waits for other ranks")
    return Options(**vars(parser.parse_args()))


def _leave(status: int) -> NoReturn:
    """End at once, as processes of `multiprocessing` do.

    DTensor's caches keep the process group beyond its end, and with it the threads of gloo. Should one of them still
    need the interpreter while that is taken down, the process aborts: seen in one of some sixty ends, all work done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _leave(main())
