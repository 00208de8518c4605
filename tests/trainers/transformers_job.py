"""A job of transformers' `Trainer` with dropout, which torchrun runs.

Arguments: the run, the memory of the node, the number of steps, a signal, and the step in which the last rank gets it.
Each rank prints the samples of each step.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

from holdfast import Memory
from holdfast.trainers.transformers_trainer import HoldfastCallback

RUN, NODE_DIR, NUM_STEPS, SIGNAL, STEP = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:])


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
    trainer.train()
dist.destroy_process_group()
sys.exit(saves.exit_code)
