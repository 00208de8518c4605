"""A job of transformers' `Trainer` with dropout, which torchrun runs.

Arguments: how the model is wrapped ("ddp" or "fsdp2"), the run, the memory of the node, the number of steps, a signal,
and the step in which the last rank gets it. Each rank prints the samples of each step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments

from holdfast import Memory
from holdfast.trainers.transformers_trainer import HoldfastCallback

WRAPPED, RUN, NODE_DIR = sys.argv[1], sys.argv[2], Path(sys.argv[3])
NUM_STEPS, SIGNAL, STEP = map(int, sys.argv[4:])


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.layers(x)[:, 0] - labels).square().mean()}


class PrintingTrainer(Trainer):  # type: ignore[misc] # transformers is not checked
    """Prints the samples of each step, and sends the signal to the last rank."""

    def training_step(self, model: nn.Module, inputs: dict[str, Tensor], *more: Any) -> Tensor:
        step, rank = self.state.global_step, self.args.process_index
        sys.stdout.write(f"{step:02} {rank}: {inputs['x'][:, 0].int().tolist()}\n")
        sys.stdout.flush()
        if step == STEP and rank == self.args.world_size - 1:
            os.kill(os.getpid(), SIGNAL)
        time.sleep(0.05)
        loss: Tensor = super().training_step(model, inputs, *more)
        return loss


torch.manual_seed(0)
rows = [{"x": torch.tensor([float(n)]), "labels": torch.tensor(float(n % 3))} for n in range(26)]
options: dict[str, Any] = {"max_steps": NUM_STEPS, "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
options |= {"per_device_train_batch_size": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
with HoldfastCallback(RUN, memory=Memory(node_dir=NODE_DIR)) as saves:
    trainer = PrintingTrainer(
        model=Regression(),
        args=TrainingArguments("output", **options),
        train_dataset=rows,
        eval_dataset=rows[:6],
        callbacks=[saves],
    )
    if WRAPPED == "fsdp2":  # Trainer shards only on accelerators, so this does what it would do there
        sharding = trainer.accelerator.state
        sharding.distributed_type = DistributedType.FSDP
        sharding.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)
        trainer.is_fsdp_enabled = True
    trainer.train()
assert (WRAPPED == "fsdp2") == isinstance(next(trainer.model.parameters()), DTensor)
dist.destroy_process_group()
sys.exit(saves.exit_code)
