"""A job of accelerate, Fabric, Lightning or transformers that saves when it ends; torchrun runs it.

Arguments: the framework, a folder, the number of the last step. A job goes on from what is saved in ``FOLDER/run``, and
saves what it loaded once more, in ``FOLDER/copy-RANKS``. Each rank writes what it found into
``FOLDER/found-RANKS-RANK``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torchmetrics
from accelerate import Accelerator
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import holdfast

FRAMEWORK, FOLDER, LAST = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
RANK, NUM_RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

State = dict[str, Any]


class Positioned(DataLoader[Any]):
    """A loader that says where it is in the data."""

    def __init__(self) -> None:
        super().__init__(TensorDataset(torch.arange(8)))
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def summed(parts: list[Any], rank: int, world_size: int) -> State:
    """The states of all ranks' metrics, as that of each rank."""
    state = {name: sum(part["state"][name] for part in parts) for name in parts[0]["state"]}
    return {"update_count": parts[0]["update_count"], "state": state}


class Job:
    """The state of a job: what the framework made, and metrics, whose updates do not depend on the framework."""

    def __init__(self, parts: State) -> None:
        self.shared = torchmetrics.wrappers.MinMaxMetric(torchmetrics.MeanMetric())
        self.own = torchmetrics.MeanMetric()
        metrics = {"shared": self.shared, "own": holdfast.PerRank(self.own, on_resize=summed)}
        self.state = parts | metrics
        self.start = 0
        if (FOLDER / "run").exists():
            report = holdfast.load(FOLDER / "run", self.state)
            holdfast.save(FOLDER / f"copy-{NUM_RANKS}", self.state, report.step)
            self.start = report.next_step
        found = {"start": self.start, "shared": self.shared.compute() if self.start else {}, "own": self.own.mean_value}
        loader = parts.get("loader")
        found |= {} if loader is None else {"position": loader.value._dataloader.position}
        (FOLDER / f"found-{NUM_RANKS}-{RANK}").write_text(json.dumps(found, default=float))

    def finished(self, step: int) -> None:
        self.shared.reset()
        self.shared.update(float(step))
        self.shared.compute()
        self.own.update(float(RANK))
        if step == LAST:
            holdfast.save(FOLDER / "run", self.state, step)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 13), nn.BatchNorm1d(13), nn.Linear(13, 1))


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + RANK))


def loop(job: Job, backward: Any) -> None:
    for step in range(job.start, LAST + 1):
        backward(job.state["model"](batch(step)).square().mean())
        job.state["optimizer"].step()
        job.state["scheduler"].step()
        job.state["optimizer"].zero_grad()
        job.finished(step)


def optimizers(model: nn.Module) -> tuple[Optimizer, CosineAnnealingLR]:
    optimizer = AdamW(model.parameters(), lr=0.01)
    return optimizer, CosineAnnealingLR(optimizer, 100)


def run_accelerate() -> None:
    accelerator = Accelerator(cpu=True)
    model = net()
    prepared = accelerator.prepare(model, *optimizers(model))
    loop(Job(dict(zip(("model", "optimizer", "scheduler"), prepared, strict=True))), accelerator.backward)


def run_fabric() -> None:
    fabric = lightning.Fabric(accelerator="cpu", strategy="ddp", devices=NUM_RANKS)
    fabric.launch()
    model = net()
    optimizer, scheduler = optimizers(model)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(Positioned(), use_distributed_sampler=False)
    kept = holdfast.PerRank(loader, on_resize=lambda parts, rank, size: parts[0])
    job = Job({"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": kept})
    loader._dataloader.position = LAST + 1
    loop(job, fabric.backward)


class Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, rows: list[torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.net(rows[0]).square().mean()
        return loss

    def configure_optimizers(self) -> State:
        optimizer, scheduler = optimizers(self)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class LightningSaves(lightning.Callback):  # type: ignore[misc]
    def on_fit_start(self, trainer: Any, module: Any) -> None:
        state = {"model": trainer.model, "optimizers": trainer.optimizers, "schedulers": trainer.lr_scheduler_configs}
        self.job = Job(state | {"loop": holdfast.PerRank(trainer.fit_loop, on_resize="first")})
        assert trainer.global_step == self.job.start

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.job.finished(trainer.global_step - 1)


def run_lightning() -> None:
    world = {"accelerator": "cpu", "strategy": "ddp", "devices": NUM_RANKS}
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_steps=LAST + 1, callbacks=[LightningSaves()], **world, **quiet)
    trainer.fit(Module(), DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=4))


class TrainerSaves(TrainerCallback):  # type: ignore[misc]
    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, lr_scheduler: Any, **_: Any
    ) -> None:
        self.job = Job({"model": model, "optimizer": optimizer, "scheduler": lr_scheduler})
        state.global_step = self.job.start

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.job.finished(state.global_step - 1)


def run_transformers() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True, **sizes))
    tokens = torch.randint(64, (64, 8))
    quiet = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    Trainer(
        model=model,
        args=TrainingArguments(
            str(FOLDER / "output"), max_steps=LAST + 1, per_device_train_batch_size=2, use_cpu=True, **quiet
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[TrainerSaves()],
    ).train()


if __name__ == "__main__":
    run = {
        "accelerate": run_accelerate,
        "fabric": run_fabric,
        "lightning": run_lightning,
        "transformers": run_transformers,
    }
    run[FRAMEWORK]()
    # Without this, gloo sometimes aborts a process that ends ("terminate called without an active exception"), with
    # torch alone too.
    dist.destroy_process_group()
