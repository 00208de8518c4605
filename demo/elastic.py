"""The training script of ``python -m demo.nodes``: the copies of each snapshot lie on other nodes. Run by torchrun, on
any number of ranks that divides the batch.

All that concerns the witness is the demo's own.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import holdfast
from demo.train import GPT, batch, learning_rate_factor, loss_of, mean_over_ranks, standard_library
from demo.witness import Witness
from holdfast.observing import Event, EventSource, SaveProtected

#: Four ranks divide it, and so do three.
BATCH_SIZE = 24
_LEARNING_RATE, _SEED = 3e-3, 1


class _Protections:
    """A listener that tells the witness when copies protect a snapshot."""

    def __init__(self, witness: Witness) -> None:
        self._witness = witness

    def hear(self, event: Event, source: EventSource) -> None:
        """Note that a snapshot is protected."""
        if isinstance(event, SaveProtected):
            self._witness.note("protected", step=event.step, at=time.time())


def train(options: argparse.Namespace, witness: Witness) -> None:
    """Train up to the last step, from the newest state that storage and the memory of all nodes have."""
    rank, world_size, text = dist.get_rank(), dist.get_world_size(), standard_library()
    torch.manual_seed(_SEED)
    model = GPT()
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=_LEARNING_RATE)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, options.steps))
    state: dict[str, object] = {"model": model, "optimizer": optimizer, "schedule": schedule}

    policy: holdfast.SavePolicy = holdfast.EverySteps(options.storage_every)
    memory = None
    if options.node_dir is not None:
        policy |= holdfast.EverySteps(options.memory_every, memory_only=True)
        memory = holdfast.Memory(node_dir=options.node_dir, protect=holdfast.Copies(1))
    with holdfast.Checkpointer(
        options.save_to,
        state,
        save=policy,
        memory=memory,
        listeners=[_Protections(witness)],
        timeout_s=options.timeout_s,
    ) as checkpointer:
        witness.note("built", at=time.time())
        report = checkpointer.restore()
        if report.step is not None and report.load is not None:
            load = report.load
            sources = [(source.tier, source.rank, source.nbytes) for source in report.sources]
            told = {"tier": report.tier, "nbytes": load.read_nbytes, "sources": sources}
            witness.note("restored", step=report.step, at=time.time(), **told)
            witness.state("loaded", report.step, model, optimizer, schedule)
            witness.note("compared", at=time.time())
        for step in checkpointer.steps(options.until):
            loss = loss_of(model, batch(text, step, rank=rank, world_size=world_size, size=BATCH_SIZE))
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not say
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

            mean_loss = mean_over_ranks(loss)
            witness.note("loss", step=step, value=mean_loss, at=time.time())
            if memory is not None and step % options.memory_every == 0:
                witness.state("saved", step, model, optimizer, schedule)
            checkpointer.step(step, metrics={"loss": mean_loss})
        witness.state("final", options.until - 1, model, optimizer, schedule)


def main() -> None:
    """Run as one rank of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--witness", type=Path, required=True, help="folder for what the demo notes")
    parser.add_argument("--steps", type=int, required=True, help="steps of the whole training, and of its schedule")
    parser.add_argument("--until", type=int, required=True, help="how many of them are made")
    parser.add_argument("--save-to", metavar="RUN", required=True, help="the run to go on from and to save to")
    parser.add_argument("--storage-every", type=int, required=True, help="steps between saves to storage")
    parser.add_argument("--memory-every", type=int, default=1, help="steps between saves to memory alone")
    parser.add_argument("--node-dir", type=Path, help="folder in memory; without it, saves go to storage alone")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="how long ranks wait for each other")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout_s))
    # A rank that is started again may have another number, so each world has a folder of its own.
    folder: Path = options.witness / f"{dist.get_world_size()}-ranks"
    folder.mkdir(parents=True, exist_ok=True)
    witness = Witness(folder, rank=dist.get_rank())
    begun, store = psutil.Process().create_time(), int(os.environ["MASTER_PORT"])
    witness.note("joined", node=socket.gethostname(), begun=begun, at=time.time(), store=store)
    try:
        train(options, witness)
    except Exception as error:
        witness.note("failed", error=f"{type(error).__name__}: {error}", at=time.time())
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except Exception:  # noqa: BLE001 - whatever it is, it ends this rank
        traceback.print_exc()
        status = 1
    else:
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    # At once, as the script of the other demo ends. A rank that failed must not wait for others on its way out.
    os._exit(status)
