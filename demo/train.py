"""The training script: FSDP2, AdamW, warm-up and cosine, and a checkpointer of holdfast. Run by torchrun.

It goes on from the newest checkpoint of its run where there is one, on whatever number of ranks it is started. All that
concerns the witness is the demo's own; the rest is what a script of yours looks like. It learns text that every Python
has, the sources of its own standard library.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import sysconfig
import time
from contextlib import nullcontext
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

import holdfast
from demo.witness import Witness

#: A token is a byte.
_VOCABULARY, _CONTEXT = 256, 64
_MAX_NBYTES = 4_000_000
_BATCH_SIZE = 32
_LEARNING_RATE = 3e-3
_SEED = 1
#: Three times that of GPT-2: so narrow a model learns more in few steps.
_INITIAL_STD = 0.06


class GPT(nn.Module):
    """A small GPT over bytes, of 1.4 million parameters, with one matrix as both embedding and head."""

    def __init__(self, *, context: int = _CONTEXT, num_layers: int = 3, num_heads: int = 6, width: int = 192) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(_VOCABULARY, width)
        self.position_embedding = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, num_heads, 4 * width, dropout=0, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, _VOCABULARY, bias=False)
        self.head.weight = self.token_embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=_INITIAL_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) of int64 to (batch, time, vocabulary)."""
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, mask, is_causal=True)
        return cast(Tensor, self.head(self.norm(x)))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy in nats of each byte of `tokens` (batch, time + 1) after those before it."""
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def standard_library() -> Tensor:
    """The sources at the top of Python's standard library, in the order of their names: a vector of uint8."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)[:_MAX_NBYTES]), dtype=torch.uint8)


def batch(
    text: Tensor, step: int, *, rank: int, world_size: int, size: int = _BATCH_SIZE, context: int = _CONTEXT
) -> Tensor:
    """The samples of one rank in `step`: (size / world_size, context + 1) of int64.

    A sample is a function of step and of its index in the whole batch. So nothing of the data order has to be saved,
    and any number of ranks together train on the same bytes in the same steps.
    """
    if size % world_size:
        raise ValueError(f"a batch of {size} samples cannot be divided evenly among {world_size} ranks")
    samples = range(size)[rank * size // world_size : (rank + 1) * size // world_size]
    starts = [int(np.random.default_rng((_SEED, step, index)).integers(len(text) - context)) for index in samples]
    return torch.stack([text[start : start + context + 1].long() for start in starts])


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up over the first tenth of all `steps`, then half a cosine down to a tenth."""
    warm_up = max(1, round(steps / 10))
    if step < warm_up:
        return (step + 1) / warm_up
    progress = min((step - warm_up) / max(1, steps - warm_up), 1.0)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def train(options: argparse.Namespace) -> None:
    """Train from the newest state of the run, or from the beginning."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    witness, text = Witness(options.witness, rank=rank), standard_library()
    torch.manual_seed(_SEED)
    model = GPT()
    mesh = init_device_mesh("cpu", (world_size,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh)
    # Matrices decay; vectors, which are biases and norms, do not.
    matrices, vectors = ([each for each in model.parameters() if (each.ndim >= 2) == wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=_LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    schedule = LambdaLR(optimizer, lambda step: learning_rate_factor(step, options.steps))

    state: dict[str, object] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    memory = None if options.node_dir is None else holdfast.Memory(node_dir=options.node_dir)
    with (
        nullcontext()
        if options.save_to is None
        else holdfast.Checkpointer(options.save_to, state, memory=memory, timeout_s=options.timeout_s)
    ) as checkpointer:
        start, begun_s = 0, time.perf_counter()
        report = None if checkpointer is None else checkpointer.restore()
        if report is not None and report.step is not None and report.load is not None:
            seconds, start = time.perf_counter() - begun_s, report.step + 1
            nbytes = report.load.read_nbytes
            witness.note("restored", step=report.step, tier=report.tier, nbytes=nbytes, seconds=seconds)
            witness.state("loaded", report.step, model, optimizer, schedule)
        for step in range(start, options.until):
            loss = loss_of(model, batch(text, step, rank=rank, world_size=world_size))
            loss.backward()  # type: ignore[no-untyped-call]  # torch does not say
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

            mean_loss = mean_over_ranks(loss)
            witness.note("loss", step=step, value=mean_loss)
            if checkpointer is not None and (step + 1) % options.save_every == 0:
                witness.state("saved", step, model, optimizer, schedule)
                handle = checkpointer.save(step, metrics={"loss": mean_loss})
                witness.note("save", step=step, blocked_s=handle.blocked_s)


def mean_over_ranks(loss: Tensor) -> float:
    """The mean of the losses of all ranks, each of an equal part of the batch. Collective."""
    total = loss.detach().double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main() -> int:
    """Run as one rank of torchrun."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--witness", type=Path, required=True, help="folder for what the demo notes")
    parser.add_argument("--steps", type=int, required=True, help="steps of the whole training, and of its schedule")
    parser.add_argument("--until", type=int, required=True, help="how many of them are made")
    parser.add_argument("--save-to", metavar="RUN", help="the run to go on from and to save to")
    parser.add_argument("--save-every", type=int, default=10, help="steps between saves")
    parser.add_argument("--node-dir", type=Path, help="folder in memory for saves that training does not wait for")
    parser.add_argument("--timeout-s", type=float, default=600.0, help="how long a save waits for other ranks")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    try:
        train(options)
    except holdfast.HoldfastError as error:
        print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once, as processes of `multiprocessing` end. DTensor's caches keep the process group beyond its end, and with
    # it the threads of gloo. Should one of them need the interpreter while that is taken down, the process aborts.
    os._exit(status)
