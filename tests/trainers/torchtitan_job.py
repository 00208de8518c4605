"""A job of torchtitan's own Trainer with the manager of holdfast; torchrun runs it.

Arguments: the run, the number of steps, the step in which the last rank kills itself, tensor and pipeline parallelism,
and the run, if any, into which the job saves the state that it ends with once more. Data-parallel ranks print the
samples of each step. The environment says what is torchtitan's: the LOADER, the MANAGER; it names what is EXCLUDED from
loading, the INITIAL folder to begin with, and SIGNALLED, the step in which the job is preempted.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import holdfast
from holdfast.data import GlobalOrder
from tests.trainers import torchtitan_on_cpu  # noqa: F401 - before torchtitan

from holdfast.trainers.torchtitan_manager import TorchtitanManager  # isort: skip
from torchtitan.components.checkpointer import CheckpointManager  # isort: skip
from torchtitan.components.dataloader import BaseDataLoader, ParallelAwareDataloader  # isort: skip
from torchtitan.config import ParallelismConfig  # isort: skip
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # isort: skip

RUN, NUM_STEPS, KILLED, TP, PP = sys.argv[1], *map(int, sys.argv[2:6])
ASKED = os.environ
RANK, NUM_RANKS = int(ASKED["RANK"]), int(ASKED["WORLD_SIZE"])
NUM_SAMPLES, GLOBAL_BATCH = 36, 12
TOKENS = torch.randint(2048, (NUM_SAMPLES, 17), generator=torch.Generator().manual_seed(0))
TOKENS[:, 0] = torch.arange(NUM_SAMPLES)

Batches = Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]


class OrderedLoader(BaseDataLoader):  # type: ignore[misc] # torchtitan is not checked
    """Samples in an order of the whole job."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        size = local_batch_size * dp_world_size
        self.order = GlobalOrder(NUM_SAMPLES, global_batch_size=size, seed=7, rank=dp_rank, world_size=dp_world_size)
        self.loader = DataLoader(TensorDataset(TOKENS), batch_sampler=self.order)

    def __iter__(self) -> Batches:
        for (tokens,) in self.order.follow(self.loader):
            if trainer.step == KILLED and RANK == NUM_RANKS - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if str(trainer.step) == ASKED.get("SIGNALLED"):
                os.kill(os.getpid(), signal.SIGTERM)
            sys.stdout.write(f"{trainer.step:02} {RANK}: {tokens[:, 0].tolist()}\n")
            sys.stdout.flush()
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.order.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order.load_state_dict(state)


class Endless(IterableDataset[Any]):
    """Samples of one data-parallel rank."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.position, self.num_ranks = rank, num_ranks

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            tokens = TOKENS[self.position % NUM_SAMPLES]
            self.position += self.num_ranks
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class TheirLoader(ParallelAwareDataloader):  # type: ignore[misc] # as above
    """A loader as torchtitan has them."""

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):  # type: ignore[misc]
        pass

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **options: Any
    ) -> None:
        super().__init__(
            Endless(dp_rank, dp_world_size),
            dp_rank,
            dp_world_size,
            batch_size=local_batch_size,
            snapshot_every_n_steps=options["snapshot_every_n_steps"],
        )


def their_manager() -> Any:
    return CheckpointManager.Config(enable=True, folder=RUN, interval=2, last_save_model_only=False)


def our_manager() -> Any:
    memory = holdfast.Memory(node_dir=Path("node").resolve())
    excluded = ASKED["EXCLUDED"].split() if "EXCLUDED" in ASKED else []
    return TorchtitanManager.Config(
        enable=True,
        folder=RUN,
        interval=1,
        keep_latest_k=3,
        memory=memory,
        exclude_from_loading=excluded,
        initial_load_path=ASKED.get("INITIAL"),
        initial_load_model_only=False,
    )


random.seed(0)
np.random.seed(0)  # noqa: NPY002 - the state of the process is saved
config = llama3_debugmodel()
config.model_spec.model.layers = config.model_spec.model.layers[:4]
config.hf_assets_path = "tokenizer"
config.dump_folder = str(Path.cwd())
config.dataloader = TheirLoader.Config() if "LOADER" in ASKED else OrderedLoader.Config()
config.training.seq_len, config.training.steps = 16, NUM_STEPS
config.training.local_batch_size = GLOBAL_BATCH * TP * PP // NUM_RANKS
config.training.disable_cuda_graphs = True
config.debug.seed, config.lr_scheduler.total_steps = 0, 100
config.parallelism = ParallelismConfig(
    spmd_backend="full_dtensor",
    tensor_parallel_degree=TP,
    pipeline_parallel_degree=PP,
    pipeline_parallel_schedule="Interleaved1F1B",
)
config.checkpoint = their_manager() if "MANAGER" in ASKED else our_manager()
trainer = config.build()
trainer.train()
sys.stdout.write(f"parts: {len(trainer.model_parts)}\n")
if len(sys.argv) > 6:
    holdfast.save(sys.argv[6], trainer.checkpointer.states, trainer.step)
trainer.close()
torch.distributed.destroy_process_group()
