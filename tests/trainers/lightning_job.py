"""A job of Lightning or of pytorch_lightning with its callback; torchrun runs it.

Arguments: the package, the run, the number of steps, and the step in which the last rank kills itself. Each rank prints
the samples of each step. With SHARDED in the environment, FSDP2 shards the model. AGAIN is a run into which the job
saves the model and the optimizer as it restored them.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.data import GlobalOrder

PACKAGE, RUN, NUM_STEPS, KILLED = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

if PACKAGE == "lightning":
    from holdfast.trainers.lightning_trainer import LightningCheckpoint as Saves
else:
    from holdfast.trainers.pytorch_lightning_trainer import (
        PytorchLightningCheckpoint as Saves,
    )
lightning = importlib.import_module(PACKAGE)
strategies = importlib.import_module(
    "pytorch_lightning.strategies" if PACKAGE[0] == "p" else "lightning.pytorch.strategies"
)


class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.LayerNorm(16) if "SHARDED" in os.environ else nn.BatchNorm1d(16)
        self.layers = nn.Sequential(nn.Linear(1, 16), norm, nn.Dropout(0.2), nn.Linear(16, 1))

    def configure_model(self) -> None:
        for layer in (*self.layers, self.layers) if "SHARDED" in os.environ else ():
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def on_train_start(self) -> None:
        if "AGAIN" in os.environ:
            restored = {"model": self.trainer.model, "optimizers": self.trainer.optimizers}
            holdfast.save(os.environ["AGAIN"], restored, self.trainer.global_step - 1)

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        sys.stdout.write(f"{self.trainer.global_step:02} {RANK}: {batch[0].int().flatten().tolist()}\n")
        sys.stdout.flush()
        if self.trainer.global_step == KILLED and RANK == NUM_RANKS - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss: torch.Tensor = self.layers(batch[0] / 24).square().mean()
        return loss

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log("val_loss", self.layers(batch[0] / 24).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)}


lightning.seed_everything(0, verbose=False)
data = TensorDataset(torch.arange(24.0)[:, None])
order = GlobalOrder(24, global_batch_size=6, seed=7, rank=RANK, world_size=NUM_RANKS)
keep = holdfast.KeepBest("val_loss") | holdfast.KeepLast(3)
memory = holdfast.Memory(node_dir=Path("node").resolve())
saves = Saves(RUN, save=holdfast.EverySteps(1), keep=keep, memory=memory, order=order)
strategy: Any = "ddp"
if "SHARDED" in os.environ:
    strategy = strategies.ModelParallelStrategy(data_parallel_size=NUM_RANKS, tensor_parallel_size=1)
lightning.Trainer(
    max_steps=NUM_STEPS,
    val_check_interval=3,
    callbacks=[saves],
    accelerator="cpu",
    strategy=strategy,
    devices=NUM_RANKS,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
).fit(Model(), DataLoader(data, batch_sampler=order), DataLoader(data, batch_size=6))
torch.distributed.destroy_process_group()
