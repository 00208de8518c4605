"""One rank alone reaches its deadline in a save, after the others got their answer: only that save is lost."""

from __future__ import annotations

from collections.abc import Callable
from errno import ENOSPC
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast import Checkpointer, DeadlineError, HoldfastError, Memory
from holdfast.agreement.planning import Planning
from holdfast.checkpointer import memory_tier
from holdfast.checkpointer.memory_tier import MemoryTier
from holdfast.checkpointer.staging import Stager
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks

TIMEOUT_S = 5.0


def late(call: Callable[..., Any], times: list[int]) -> Callable[..., Any]:
    """`call`, which works, and then raises in those of its `times` what its caller gets when the answer is late."""
    count = iter(range(1000))

    def made(*arguments: object, **options: object) -> object:
        answer = call(*arguments, **options)
        if next(count) in times:
            raise DeadlineError("late.", code="timeout.ranks", action="Wait.")
        return answer

    return made


def save_with_late_answers(run: str, node_dir: Path, where: str, times: list[int], lost: set[int]) -> list[str]:
    """The outcomes of six saves. Rank 1 does not hear the answer in those that are `lost`."""
    start_new_job()
    shard = DTensor.from_local(torch.zeros(1, 1000), init_device_mesh("cpu", (2,)), [Shard(0)])
    owner: Any = Planning if where == "agree" else memory_tier
    times = times if dist.get_rank() == 1 else []
    outcomes = []
    with patch.object(owner, where, late(getattr(owner, where), times)):
        memory = Memory(node_dir=node_dir)
        saving = Checkpointer(run, {"shard": shard}, memory=memory, timeout_s=TIMEOUT_S)
        for step in range(6):
            dist.barrier()
            try:
                handle = saving.save(step)
                if step in lost:
                    handle.staged.wait(TIMEOUT_S)
                else:
                    handle.durable.wait(TIMEOUT_S)
                outcomes.append("saved" if step not in lost else "staged")
            except HoldfastError as error:
                outcomes.append(error.code)
    assert holdfast.open(run).step == 5
    return outcomes


@pytest.mark.parametrize(
    ("where", "times", "lost"),
    [("agree", [1, 2], {1, 2}), ("drop_parts", [0], {0})],
    ids=["the place of a save", "what memory held before"],
)
@pytest.mark.few(1)
def test_an_answer_that_one_rank_hears_too_late_costs_that_save_alone(
    tmp_path: Path, where: str, times: list[int], lost: set[int]
) -> None:
    outcomes = run_ranks(2, save_with_late_answers, str(tmp_path / "run"), tmp_path, where, times, lost, timeout_s=150)
    end_keepers(tmp_path)
    for rank, codes in enumerate(outcomes):
        assert [step for step, code in enumerate(codes) if code != "saved"] == sorted(lost), (rank, codes)


def save_while_memory_fails(run: str, node_dir: Path) -> list[str]:
    """The outcomes of twelve saves. For some, rank 0 cannot use its memory, and rank 1 hears of it too late."""
    start_new_job()
    shard = DTensor.from_local(torch.zeros(1, 1000), init_device_mesh("cpu", (2,)), [Shard(0)])
    rank = dist.get_rank()
    saving = Checkpointer(run, {"shard": shard}, memory=Memory(node_dir=node_dir), timeout_s=TIMEOUT_S)
    look, fall_back, heard = Stager._look_at_slots, MemoryTier.fall_back, iter(range(1000))

    def look_in_vain(self: Stager, *known: Any) -> Any:
        if rank == 0 and step in (2, 3, 4):
            raise OSError(ENOSPC, "full")
        return look(self, *known)

    def hear_late(self: MemoryTier, why: HoldfastError) -> None:
        if rank == 1 and next(heard) == 0:
            raise DeadlineError("late.", code="timeout.ranks", action="Wait.")
        fall_back(self, why)

    outcomes = []
    with patch.object(Stager, "_look_at_slots", look_in_vain), patch.object(MemoryTier, "fall_back", hear_late):
        for step in range(12):
            dist.barrier()
            try:
                saving.save(step).durable.wait(TIMEOUT_S)
                outcomes.append("saved")
            except HoldfastError as error:
                outcomes.append(error.code)
    assert holdfast.open(run).step == 11
    assert saving._tier is not None
    assert not saving._tier._backoff.has_begun
    return outcomes


@pytest.mark.slow
def test_trouble_with_memory_that_one_rank_hears_of_too_late_costs_that_save_alone(tmp_path: Path) -> None:
    outcomes = run_ranks(2, save_while_memory_fails, str(tmp_path / "run"), tmp_path, timeout_s=150)
    end_keepers(tmp_path)
    for codes in outcomes:
        assert [step for step, code in enumerate(codes) if code != "saved"] == [2], codes
