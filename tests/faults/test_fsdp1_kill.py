"""Four ranks under FSDP1 die by SIGKILL, and two go on: their training has the bits of one that was never stopped."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import holdfast
from tests.support.bound import bits
from tests.support.nursery import start, until
from tests.support.rank_worker import HOST, environment_of
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

NUM_STEPS = 40


class Counted(nn.Module):
    """A module whose gradients are small whole numbers, and the same on all ranks: any number of ranks adds them up
    exactly, so training has the same bits on any layout."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, step: int) -> torch.Tensor:
        whole = (torch.arange(self.weight.numel()) * (step + 3)) % 5 - 2
        return (self.weight * whole.view_as(self.weight)).sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Counted(7, 5), Counted(33), Counted(4, 3, 2)])

    def forward(self, step: int) -> torch.Tensor:
        return cast("torch.Tensor", sum(part(step) for part in self.parts))


def job(*, original: bool, wraps: bool = True) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so often
    torch.manual_seed(0)
    net: nn.Module = Net()
    if wraps:
        options: dict[str, Any] = {"use_orig_params": original, "device_id": torch.device("cpu")}
        parts = cast("nn.ModuleList", net.parts)
        parts[0] = FullyShardedDataParallel(parts[0], **options)
        net = FullyShardedDataParallel(net, **options)
    return {"model": net, "optimizer": torch.optim.AdamW(net.parameters(), lr=0.01)}


def train(state: dict[str, Any], step: int) -> None:
    state["model"](step).backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def work(run: str, node_dir: Path, original: bool, pause_s: float) -> int:
    """Go on to the last step, with a save at each; returns the first step."""
    state = job(original=original)
    with holdfast.Checkpointer(run, state, memory=holdfast.Memory(node_dir=node_dir)) as checkpointer:
        first = checkpointer.restore().next_step
        for step in range(first, NUM_STEPS):
            train(state, step)
            checkpointer.save(step)
            time.sleep(pause_s)
    return first


def victim(rank: int, port: int, run: str, node_dir: Path, original: bool) -> None:
    os.environ |= environment_of(rank, 4, port)
    dist.init_process_group("gloo")
    work(run, node_dir, original, 0.05)


@pytest.mark.parametrize("original", [True, False])
def test_two_ranks_go_on_where_four_were_killed(tmp_path: Path, node_dir: Path, original: bool) -> None:
    run = str(tmp_path / "run")
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    ranks = [
        start(victim, rank, store.port, run, node_dir, original, err=tmp_path / f"err-{rank}") for rank in range(4)
    ]
    history = Path(run, "history")
    try:
        until(lambda: history.is_dir() and len(list(history.iterdir())) > 3, timeout_s=100)
    finally:
        for rank in ranks:
            rank.send(signal.SIGKILL)
    statuses = [rank.wait() for rank in ranks]
    assert statuses == [-signal.SIGKILL] * 4, [rank.err for rank in ranks]
    firsts = run_ranks(2, work, run, node_dir, not original, 0.0)
    assert len(set(firsts)) == 1
    assert 0 < firsts[0] < NUM_STEPS
    truth = job(original=True, wraps=False)
    for step in range(NUM_STEPS):
        train(truth, step)
    holdfast.save(str(tmp_path / "truth"), truth, NUM_STEPS - 1)
    expected, found = (holdfast.open(path).torch() for path in (str(tmp_path / "truth"), run))
    assert {name: bits(tensor) for name, tensor in found.items()} == {
        name: bits(tensor) for name, tensor in expected.items()
    }
