"""A job of accelerate with dropout, which torchrun runs.

Arguments: the plugin ("ddp" or "fsdp2"), the run, the memory of the node, the number of steps, a signal, and
the step in which the last rank gets it. Each rank prints the samples and the losses of each step; a job saves what it
loaded once more, in ``RUN-copy-RANKS``.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType, set_seed
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.trainers.accelerate_state import state_of

PLUGIN, RUN, NODE_DIR = sys.argv[1], sys.argv[2], Path(sys.argv[3])
NUM_STEPS, SIGNAL, STEP = map(int, sys.argv[4:])
KINDS = {"ddp": DistributedDataParallel, "fsdp2": FSDPModule}


class Average:
    """An object that a user registers for checkpointing."""

    def __init__(self) -> None:
        self.weights = torch.zeros(3)
        self.num_steps = 0

    def update(self, step: int) -> None:
        self.weights.lerp_(torch.full((3,), float(step)), 0.25)
        self.num_steps += 1

    def state_dict(self) -> dict[str, object]:
        return {"weights": self.weights, "num_steps": self.num_steps}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.weights.copy_(state["weights"])
        self.num_steps = int(state["num_steps"])


def accelerator_of(plugin: str) -> Accelerator:
    data = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=data, gradient_accumulation_steps=2)
    if plugin == "fsdp2":  # accelerate shards only on accelerators, so this does what it would do there
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=20
        )
    return accelerator


def report(accelerator: Accelerator, **found: object) -> None:
    sys.stdout.write(json.dumps({"rank": accelerator.process_index, **found}) + "\n")
    sys.stdout.flush()


def main() -> None:
    accelerator = accelerator_of(PLUGIN)
    set_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    loader = DataLoader(TensorDataset(torch.arange(26.0).unsqueeze(1)), batch_size=2, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    assert accelerator.num_processes == 1 or isinstance(model, KINDS[PLUGIN])
    average = Average()
    accelerator.register_for_checkpointing(average)
    state = state_of(accelerator)
    with holdfast.Checkpointer(RUN, state, memory=holdfast.Memory(node_dir=NODE_DIR)) as checkpointer:
        step = checkpointer.restore().next_step
        if step:
            holdfast.save(f"{RUN}-copy-{accelerator.num_processes}", state, step - 1)
        while step < NUM_STEPS:
            for (batch,) in islice(loader, 2 * (NUM_STEPS - step)):
                if step == STEP and accelerator.process_index == accelerator.num_processes - 1:
                    checkpointer.wait()
                    os.kill(os.getpid(), SIGNAL)
                with torch.no_grad():
                    probe = model.eval()(batch).square().mean()
                with accelerator.accumulate(model.train()):
                    loss = model(batch).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                report(
                    accelerator,
                    step=step,
                    samples=batch.flatten().int().tolist(),
                    loss=loss.item().hex(),
                    probe=probe.item().hex(),
                    counted=average.num_steps,
                )
                if accelerator.sync_gradients:
                    average.update(step)
                    checkpointer.save(step)
                    step += 1
    accelerator.end_training()


if __name__ == "__main__":
    main()
