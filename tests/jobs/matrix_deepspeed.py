"""The DeepSpeed side of the cross-framework matrix: the GPT in engines of the real package, in bf16."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist

from tests.interop.write_deepspeed import live_values
from tests.jobs.matrix_gpt import Gpt, Whole, batch, loss_of, parameter_groups

VOCABULARY = 64


class EngineJob:
    """A job of DeepSpeed; `case` is ``zero`` with a stage, and after it
    "moe" where the model has experts, "universal" where DeepSpeed itself loads it."""

    def __init__(self, case: str, *, seed: int) -> None:
        stage, _, option = case.removeprefix("zero").partition("-")
        self.stage = int(stage)
        torch.manual_seed(seed)
        model = Gpt(VOCABULARY, experts=4 if option == "moe" else None)
        zero: dict[str, Any] = {"stage": self.stage}
        if self.stage == 3:
            zero |= {"sub_group_size": 1000, "stage3_param_persistence_threshold": 10}
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(parameter_groups(model), lr=0.01),
            config={
                "train_micro_batch_size_per_gpu": 2,
                "zero_allow_untested_optimizer": True,
                "bf16": {"enabled": True},
                "zero_optimization": zero,
                "checkpoint": {"load_universal": option == "universal"},
            },
        )
        self.state: dict[str, Any] = {"engine": self.engine}
        self.cast: str | None = None

    def train(self, steps: int, *, first: int) -> float:
        """As `TorchJob.train`."""
        self.engine.train()
        loss = torch.zeros(())
        for step in range(first, first + steps):
            tokens = batch(step, dist.get_rank(), VOCABULARY)
            loss = loss_of(self.engine(tokens), tokens)
            self.engine.backward(loss)
            self.engine.step()
        return float(loss.detach())

    def loss(self) -> float:
        """As `TorchJob.loss`."""
        tokens = batch(1000, 0, VOCABULARY)
        self.engine.eval()
        with torch.no_grad():
            return float(loss_of(self.engine(tokens), tokens))

    def steps(self) -> set[float]:
        """As `TorchJob.steps`."""
        return {float(slots["step"]) for slots in self.engine.optimizer.optimizer.state.values()}

    def whole(self) -> Whole:
        """The state in global coordinates, by DeepSpeed's own getters and by its flat groups."""
        return {name: tensor.detach().clone() for name, tensor in live_values(self.engine, self.stage).items()}

    def low_precision_faults(self) -> list[str]:
        """The parameters of the module that are no casts of their master weights."""
        masters, faults = self.whole(), []
        for name, parameter in self.engine.module.named_parameters():
            with deepspeed.zero.GatheredParameters([parameter], enabled=self.stage == 3):
                if not torch.equal(parameter.detach(), masters[f"{name}/master"].bfloat16()):
                    faults.append(name)
        return faults

    def catch_up(self, steps: int) -> None:
        """Bring what depends on the number of steps, and was not loaded, up to date: nothing here."""


@contextmanager
def job(case: str, *, seed: int) -> Iterator[EngineJob]:
    """A job with the weights that `seed` draws."""
    # Else DeepSpeed compiles C++ for its own collectives in shared memory, which takes minutes and a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    yield EngineJob(case, seed=seed)
