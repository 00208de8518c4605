"""Defects of loading on another number of ranks, or on another division of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.optim import AdamW

import holdfast
from holdfast import FlatRange, Piecewise, StateError
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


def matrix(num_rows: int) -> torch.Tensor:
    return torch.arange(3.0 * num_rows).reshape(num_rows, 3)


def save_rows(run: str, num_rows: int) -> None:
    start_new_job()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    holdfast.save(run, {"weight": distribute_tensor(matrix(num_rows), mesh, [Shard(0)])}, 1, timeout_s=30)


def load_columns(run: str, num_rows: int) -> bool:
    start_new_job()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    into = distribute_tensor(torch.zeros(num_rows, 3), mesh, [Shard(1)])
    holdfast.load(run, into={"weight": into}, timeout_s=30, continues=True)
    return torch.equal(into.to_local(), matrix(num_rows).chunk(dist.get_world_size(), 1)[dist.get_rank()])


def test_shards_without_elements_break_resharding(tmp_path: Path) -> None:
    """Fewer rows than ranks, or rows that the ranks do not divide: saving or loading fails.

    Seen in: PyTorch, pytorch/pytorch#108869.
    """
    for num_rows in (2, 4):
        run = str(tmp_path / f"run-{num_rows}")
        run_ranks(3, save_rows, run, num_rows)
        assert torch.equal(holdfast.open(run)["weight"][:], matrix(num_rows))
        assert run_ranks(3, load_columns, run, num_rows) == [True] * 3


def load_strided(run: str) -> list[float]:
    start_new_job()
    mesh = init_device_mesh("cpu", (2,))
    placements: list[Placement] = [_StridedShard(0, split_factor=2)]
    into = DTensor.from_local(torch.zeros(4), mesh, placements, run_check=False, shape=torch.Size([8]), stride=(1,))
    holdfast.load(run, into={"weight": into}, timeout_s=30, continues=True)
    return into.to_local().tolist()


def test_strided_shards_get_the_rows_of_others(tmp_path: Path) -> None:
    """A tensor that is divided in an interleaved way is filled with consecutive rows: [0, 1, 2, 3] for [0, 1, 4, 5].

    Seen in: PyTorch DCP 2.13 (a lone `_StridedShard`).
    """
    holdfast.save(tmp_path / "run", {"weight": torch.arange(8.0)}, 1)
    assert run_ranks(2, load_strided, str(tmp_path / "run")) == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_a_checkpoint_cannot_even_be_looked_at_on_fewer_devices(tmp_path: Path) -> None:
    """Metadata cannot be read, nor a tensor loaded, without the number of devices that saved.

    Seen in: Orbax, google/orbax#332, #391, #648.
    """
    run_ranks(3, save_rows, str(tmp_path / "run"), 7)
    view = holdfast.open(tmp_path / "run")
    assert (view.names(), view["weight"].shape, view["weight"].dtype) == (["weight"], (7, 3), "float32")
    into = torch.zeros(7, 3)
    holdfast.load(tmp_path / "run", into={"weight": into})
    assert torch.equal(into, matrix(7))


def sharded_job() -> tuple[nn.Parameter, AdamW]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight = nn.Parameter(distribute_tensor(matrix(5), mesh, [Shard(0)]))
    return weight, AdamW([weight], lr=0.25)


def save_after_a_step(run: str) -> None:
    start_new_job()
    weight, optimizer = sharded_job()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    weight.grad = distribute_tensor(matrix(5) + 1, mesh, [Shard(0)])
    optimizer.step()
    holdfast.save(run, {"weight": weight, "optimizer": optimizer}, 1, timeout_s=30)


def test_optimizer_state_is_bound_to_the_number_of_ranks(tmp_path: Path) -> None:
    """A change of the number of ranks is refused, or ends with weights loaded and moments lost.

    Seen in: DeepSpeed, deepspeedai/DeepSpeed#2898, #3810, #6441; Megatron-LM ``dp_reshardable``.
    """
    run_ranks(3, save_after_a_step, str(tmp_path / "run"))
    weights = [nn.Parameter(matrix(5)), nn.Parameter(torch.zeros(5, 3))]
    alone, into = (AdamW([weight], lr=0.25) for weight in weights)
    weights[0].grad = matrix(5) + 1
    alone.step()
    holdfast.load(tmp_path / "run", into={"weight": weights[1], "optimizer": into})
    assert torch.equal(weights[1], weights[0])
    for slot in ("step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(into.state[weights[1]][slot], alone.state[weights[0]][slot])


def test_ranges_are_put_together_in_the_order_of_the_list(tmp_path: Path) -> None:
    """Flat shards are glued in declared order while memory has another one: wrong tensors of the right size.

    Seen in: DeepSpeed 0.19.6 (``round_robin_gradients: true``: 3 of 7 parameters corrupted by `ds_to_universal`).
    """
    pieces = [(FlatRange(8, 12), torch.arange(8.0, 12.0)), (FlatRange(0, 8), torch.arange(0.0, 8.0))]
    holdfast.save(tmp_path / "run", {"weight": Piecewise((4, 3), pieces)}, 1)
    assert holdfast.open(tmp_path / "run")["weight"][1, 0].item() == 3
    parts = [(FlatRange(7, 12), torch.zeros(5)), (FlatRange(0, 7), torch.zeros(7))]
    holdfast.load(tmp_path / "run", into={"weight": Piecewise((4, 3), parts)})
    assert [part.tolist() for _, part in parts] == [list(range(7, 12)), list(range(7))]


def test_what_nobody_holds_is_filled_with_zeros(tmp_path: Path) -> None:
    """The ranks' ranges leave a gap or a padded end, which comes back as zeros or as whatever the memory held.

    Seen in: Megatron-LM, NVIDIA/Megatron-LM#5077 (``fully_reshardable``), PyTorch DCP 2.13 (rank-local mode).
    """
    for last in (11, 13):
        pieces = [(FlatRange(0, 5), torch.ones(5)), (FlatRange(5, last), torch.ones(last - 5))]
        with pytest.raises((StateError, ValueError)):
            holdfast.save(tmp_path / "run", {"weight": Piecewise((4, 3), pieces)}, 1)
    assert not (tmp_path / "run").exists()


def save_local_experts(run: str) -> str:
    start_new_job()
    experts = nn.ModuleList([nn.Linear(2, 2)])  # expert 0 of this rank, not of the model
    nn.init.constant_(experts[0].get_parameter("weight"), dist.get_rank())
    nn.init.zeros_(experts[0].get_parameter("bias"))
    with pytest.raises(StateError) as raised:
        holdfast.save(run, {"experts": experts}, 1, timeout_s=30)
    return raised.value.tensor or ""


def test_experts_that_each_rank_numbers_from_zero_become_one(tmp_path: Path) -> None:
    """Every rank calls its first expert 0: all ranks get the expert of rank 0 when they load.

    Seen in: DeepSpeed 0.15.5 (expert parallelism in X-MoE), KempnerForge#202.
    """
    assert run_ranks(2, save_local_experts, str(tmp_path / "run")) == ["experts/0.weight"] * 2


def save_unreduced(run: str) -> str:
    start_new_job()
    mesh = init_device_mesh("cpu", (2,))
    from torch.distributed.tensor import Partial

    unreduced = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(StateError) as raised:
        holdfast.save(run, {"sum": unreduced}, 1, timeout_s=30)
    return raised.value.tensor or raised.value.path or ""


def test_terms_of_a_sum_are_averaged(tmp_path: Path) -> None:
    """The terms of a pending reduction, one on each rank, are stored as their mean, or as one rank's term.

    Seen in: DeepSpeed Universal Checkpointing (``parameter_to_average_patterns``).
    """
    assert run_ranks(2, save_unreduced, str(tmp_path / "run")) == ["sum"] * 2


@pytest.mark.parametrize("change", ["content", "added", "shape", "dtype", "value", "removed"])
def test_a_plan_that_does_not_fit_any_more_is_used_again(tmp_path: Path, change: str) -> None:
    """The cached plan of an earlier save is used although the state changed: the checkpoint is silently incomplete.

    Seen in: NVIDIA/Megatron-LM#4378; ByteCheckpoint 0.0.3 (the cache's key ignores leaf names, shapes and dtypes).
    """
    run = tmp_path / "run"
    before: dict[str, Any] = {"a": torch.ones(4), "b": torch.ones(2), "note": "x"}
    changes: dict[str, dict[str, Any]] = {
        "content": {"a": torch.zeros(4)},
        "added": {"c": torch.full((3,), 5.0)},
        "shape": {"a": torch.full((2, 2), 3.0)},
        "dtype": {"a": torch.full((4,), 3, dtype=torch.int32)},
        "value": {"note": "y" * 9000},
        "removed": {},
    }
    after = before | changes[change]
    if change == "removed":
        del after["b"]
    holdfast.save(run, before, 1)
    holdfast.save(run, after, 2)
    view = holdfast.open(run)
    tensors = {name: tensor for name, tensor in after.items() if isinstance(tensor, torch.Tensor)}
    assert view.names() == sorted(tensors)
    for name, tensor in tensors.items():
        assert view[name].dtype == str(tensor.dtype).removeprefix("torch.")
        assert torch.equal(view[name][...], tensor)
    assert view.value("note") == after["note"]


def save_replicated(run: str) -> int:
    start_new_job()
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.arange(2.0**18), mesh, [Replicate()])
    return holdfast.save(run, {"weight": weight}, 1, timeout_s=30).written_nbytes


def test_replicated_tensors_are_stored_once_per_rank(tmp_path: Path) -> None:
    """Every holder of a replicated tensor writes all of it.

    Seen in: torch_checkpointing 0.1.1 (Replicate DTensors).
    """
    written = run_ranks(2, save_replicated, str(tmp_path / "run"))
    stored = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert sum(written) == stored
    assert 2**20 <= stored < 2**20 + 2**15
    assert torch.equal(holdfast.open(tmp_path / "run")["weight"][:], torch.arange(2.0**18))
