"""The training script of the last chapters: policies decide when it saves and what it keeps, and one order of samples
goes on through all its jobs. Run by torchrun, on any number of ranks that divides the batch.

All that concerns the witness is the demo's own. `holdfast prove` runs it as well.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from demo.train import GPT, loss_of, mean_over_ranks, standard_library
from demo.witness import Witness
from holdfast.data import GlobalOrder
from holdfast.observing import JsonLines

#: So few samples that the training goes through all of them several times.
NUM_SAMPLES = 100
BATCH_SIZE = 8
_CONTEXT = 64
_SEED = 1


def train(options: argparse.Namespace) -> int:
    """Train up to the last step, or up to a preemption. Returns the exit code of the script."""
    witness = Witness(options.witness, rank=dist.get_rank())
    torch.manual_seed(_SEED)
    model = GPT(num_layers=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    texts = standard_library()[: NUM_SAMPLES * (_CONTEXT + 1)].view(NUM_SAMPLES, -1).long()
    dataset = TensorDataset(torch.arange(NUM_SAMPLES), texts)
    order = GlobalOrder(len(dataset), global_batch_size=BATCH_SIZE, seed=_SEED)
    batches = order.follow(DataLoader(dataset, batch_sampler=order))
    state = {"model": model, "optimizer": optimizer, "data": order, "random": holdfast.RandomState()}
    with holdfast.Checkpointer(
        options.save_to,
        state,
        save=holdfast.EverySteps(options.save_every) | holdfast.OnPreemption(),
        keep=holdfast.KeepLast(2),
        memory=None,
        listeners=[JsonLines()],
    ) as checkpointer:
        for step in checkpointer.steps(options.steps):
            samples, tokens = next(batches)
            loss = loss_of(model, tokens)
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not say
            optimizer.step()
            optimizer.zero_grad()
            witness.note("samples", step=step, numbers=samples.tolist())
            witness.note("loss", step=step, value=mean_over_ranks(loss))
            if checkpointer.step(step, metrics={"loss": loss}) is not None:
                witness.note("save", step=step)
    witness.note("ended", exit_code=checkpointer.exit_code)
    return checkpointer.exit_code


def main() -> int:
    """Run as one rank of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--witness", type=Path, required=True, help="folder for what the demo notes")
    parser.add_argument("--steps", type=int, required=True, help="steps of the whole training")
    parser.add_argument("--save-to", metavar="RUN", required=True, help="the run to go on from")
    parser.add_argument("--save-every", type=int, required=True, help="steps between saves")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    exit_code = train(options)
    dist.destroy_process_group()
    return exit_code


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once, as the script of the other chapters ends.
    os._exit(status)
