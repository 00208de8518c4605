"""``ShardedTensor``, as FSDP1 and older scripts put it into state dicts, in states of holdfast."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard

import holdfast
from tests.support.ranks import run_ranks

ROWS = 7


def sharded(*, fill: float | None = None) -> ShardedTensor:
    """Rows of a tensor of numbers that count up, of which the last rank holds none."""
    rank, num_owners = dist.get_rank(), dist.get_world_size() - 1
    first, behind = (min(ROWS, -(-ROWS // num_owners) * at) for at in (rank, rank + 1))
    whole = torch.arange(ROWS * 3.0).view(ROWS, 3) if fill is None else torch.full((ROWS, 3), fill)
    shards = [Shard.from_tensor_and_offsets(whole[first:behind].clone(), [first, 0], rank)] if first < behind else []
    return init_from_local_shards(shards, [ROWS, 3])


def _save(run: str) -> None:
    holdfast.save(run, {"w": sharded(), "other": sharded(fill=1.0)}, 0)


def _load(run: str) -> list[list[float]]:
    """Load one of two tensors; the rows of both that this rank has then."""
    state = {"w": sharded(fill=-1.0), "other": sharded(fill=-1.0)}
    w = state["w"]
    holdfast.load(run, state, select="w")
    assert state["w"] is w
    assert all(bool((shard.tensor == -1).all()) for shard in state["other"].local_shards())
    return [row for shard in w.local_shards() for row in shard.tensor.tolist()]


def test_shards_load_into_shards_of_another_number_of_ranks_and_into_plain_tensors(tmp_path: Path) -> None:
    run_ranks(3, _save, str(tmp_path / "run"))
    expected = torch.arange(ROWS * 3.0).view(ROWS, 3)
    found = run_ranks(4, _load, str(tmp_path / "run"))
    assert [row for rows in found for row in rows] == expected.tolist()
    assert torch.equal(holdfast.open(tmp_path / "run")["w"][:], expected)


def _in_a_per_rank(run: str) -> str:
    with pytest.raises(holdfast.StateError) as caught:
        holdfast.save(run, {"own": holdfast.PerRank({"w": sharded()})}, 0)
    return str(caught.value.code)


def test_a_tensor_of_several_ranks_is_refused_in_a_per_rank(tmp_path: Path) -> None:
    assert run_ranks(2, _in_a_per_rank, str(tmp_path / "run")) == ["state.per_rank"] * 2
