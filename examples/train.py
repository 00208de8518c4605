"""A complete training with Holdfast: a small language model over FSDP2 that loses nothing, whatever ends it.

torchrun --nproc_per_node=2 examples/train.py runs/demo 200     # end it as you like, and start it again,
torchrun --nproc_per_node=4 examples/train.py runs/demo 200     # also on another number of ranks
holdfast report runs/demo                                       # what its saves did
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import holdfast
from holdfast.data import GlobalOrder
from holdfast.observing import JsonLines, TerminalLine

VOCABULARY, LENGTH, WIDTH = 256, 32, 64


class Text(Dataset[torch.Tensor]):
    """Sequences of tokens that a model can learn: arithmetic progressions."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, number: int) -> torch.Tensor:
        return (number + torch.arange(LENGTH + 1) * (number % 7 + 1)) % VOCABULARY


class Model(nn.Module):
    """A small transformer, which computes its own loss. Sharded layer by layer."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 4, batch_first=True) for _ in range(num_layers))
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for layer in self.layers:
            fully_shard(layer)
        fully_shard(self)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        predicted = self.head(self.layers(self.embedding(tokens[:, :-1])))
        return nn.functional.cross_entropy(predicted.flatten(0, 1), tokens[:, 1:].flatten())


def main(run: str, num_steps: int) -> int:
    dist.init_process_group()
    torch.manual_seed(0)
    model, dataset = Model(), Text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    order = GlobalOrder(len(dataset), global_batch_size=24, seed=7)
    batches = order.follow(DataLoader(dataset, batch_sampler=order, num_workers=1))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": order}
    state["random"] = holdfast.RandomState()
    with holdfast.Checkpointer(
        run,
        state,
        save=holdfast.Auto(max_overhead=0.05) | holdfast.EverySteps(50) | holdfast.OnPreemption(),
        keep=holdfast.KeepLast(3) | holdfast.KeepEvery(100) | holdfast.KeepBest("loss", 2),
        listeners=[JsonLines(), TerminalLine()],
    ) as checkpointer:
        for step in checkpointer.steps(num_steps):
            loss = model(next(batches))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            checkpointer.step(step, metrics={"loss": loss})
    dist.destroy_process_group()
    return checkpointer.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
