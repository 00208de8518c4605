"""Saved on one set of ranks, loaded on another: any layout into any other, bit for bit.

The truth is known without asking a rank (see `tests.support.models`): every rank compares its own memory with its slice
of the full tensors.
"""

from __future__ import annotations

import itertools
from math import prod
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import holdfast
from tests.support.models import (
    Cell,
    Job,
    Kind,
    bits,
    build,
    differing,
    filled,
    full,
    holds,
    start_new_job,
    tensors,
    write,
)
from tests.support.ranks import run_ranks

CELLS = [
    Cell("plain", 1),
    *(Cell(kind, world_size) for kind in cast("tuple[Kind, ...]", ("ddp", "fsdp")) for world_size in (1, 2, 3, 4)),
    Cell("plain", 2),
]
#: A ring with chords: each cell is a source and a target, and each step changes kind and number of ranks.
DEFAULT = [
    (Cell("plain", 1), Cell("fsdp", 3)),
    (Cell("plain", 1), Cell("ddp", 2)),
    (Cell("plain", 2), Cell("fsdp", 4)),
    (Cell("ddp", 2), Cell("fsdp", 3)),
    (Cell("ddp", 3), Cell("fsdp", 2)),
    (Cell("ddp", 3), Cell("plain", 1)),
    (Cell("ddp", 4), Cell("ddp", 3)),
    (Cell("fsdp", 2), Cell("plain", 1)),
    (Cell("fsdp", 2), Cell("fsdp", 3)),
    (Cell("fsdp", 3), Cell("fsdp", 4)),
    (Cell("fsdp", 3), Cell("ddp", 4)),
    (Cell("fsdp", 4), Cell("fsdp", 2)),
    (Cell("fsdp", 4), Cell("fsdp", 1)),
    (Cell("fsdp", 4), Cell("ddp", 2)),
    (Cell("fsdp", 4), Cell("plain", 2)),
]
EVERY = [(source, target) for source, target in itertools.permutations(CELLS, 2) if source[1] != target[1]]


def save(kind: Kind, run: str, seed: int, step: int) -> tuple[int, int]:
    start_new_job()
    job = filled(kind, seed)
    report = holdfast.save(run, job.state, step, timeout_s=40)
    return report.nbytes, report.written_nbytes


def load(kind: Kind, run: str, seed: int, num_steps: int) -> tuple[list[str], set[str], int, int]:
    """Differing names, names that were not loaded, and how many bytes this rank holds and was said to need."""
    job = build(kind, num_steps=num_steps, seed=seed + 1)
    report = holdfast.load(run, into=job.state, timeout_s=40)
    names = {name for name, _, _ in tensors(job)}
    held = sum(bits(tensor).nbytes for _, tensor, _ in tensors(job))
    return differing(job, seed), names - set(report.loaded), held, report.needed_nbytes


def check_cells(run: Path, source: Cell, target: Cell, seed: int) -> None:
    sizes = run_ranks(source.world_size, save, source.kind, str(run), seed, 30)
    assert {nbytes for nbytes, _ in sizes} == {sum(written for _, written in sizes)}
    for differing_names, unloaded, held, needed in run_ranks(
        target.world_size, load, target.kind, str(run), seed, seed % 2
    ):
        assert differing_names == []
        assert unloaded == set()
        assert needed == held


def cell_id(value: object) -> str:
    return f"seed{value}" if isinstance(value, int) else str(value)


@pytest.mark.parametrize(
    ("source", "target", "seed"), [(*cells, seed) for seed, cells in enumerate(DEFAULT)], ids=cell_id
)
@pytest.mark.few(6)
def test_any_layout_loads_any_other(tmp_path: Path, source: Cell, target: Cell, seed: int) -> None:
    check_cells(tmp_path / "run", source, target, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [100, 101], ids=cell_id)
@pytest.mark.parametrize(("source", "target"), EVERY, ids=cell_id)
def test_every_layout_loads_every_other(tmp_path: Path, source: Cell, target: Cell, seed: int) -> None:
    check_cells(tmp_path / "run", source, target, seed)


def resume_and_save(kind: Kind, run: str, seed: int) -> tuple[list[str], str]:
    """Load what the run holds, check that it is `seed`'s, and save it again as a new job."""
    start_new_job()
    job = build(kind, num_steps=seed % 2)
    holdfast.load(run, into=job.state, timeout_s=40)
    return differing(job, seed), holdfast.save(run, job.state, 50, timeout_s=40).place


@pytest.mark.slow
def test_a_state_survives_a_chain_of_jobs_each_on_another_world(tmp_path: Path) -> None:
    run, seed = str(tmp_path / "run"), 9
    run_ranks(2, save, "fsdp", run, seed, 1)
    chain: list[Cell] = [Cell("fsdp", 3), Cell("ddp", 2), Cell("fsdp", 4), Cell("plain", 1), Cell("fsdp", 2)]
    for epoch, cell in enumerate(chain, start=2):
        assert (
            run_ranks(cell.world_size, resume_and_save, cell.kind, run, seed) == [([], f"{epoch}.1")] * cell.world_size
        )
    view = holdfast.open(run)
    for name, tensor, _ in tensors(build("plain")):
        assert view[name].numpy().tobytes() == full(seed, name, tensor).tobytes()


def train(kind: Kind, run: str) -> dict[str, bytes]:
    """Take real steps, save, and return the full tensors as torch itself gathers them."""
    start_new_job()
    torch.manual_seed(3)
    job = build(kind, num_steps=0)
    rank = dist.get_rank()
    for step in range(3):
        # Under DDP batches differ, and so do the statistics of the batch norm.
        tokens = torch.arange(8) if kind == "fsdp" else (torch.arange(8) * (rank + 2) + step) % 13
        job.model(tokens).square().mean().backward()
        job.optimizer.step()
        job.scheduler.step()
        job.optimizer.zero_grad()
    holdfast.save(run, job.state, 3, timeout_s=40)
    return gather(job)


@pytest.mark.parametrize(
    ("source", "target"),
    [(Cell("fsdp", 2), Cell("fsdp", 3)), (Cell("fsdp", 3), Cell("fsdp", 2)), (Cell("ddp", 2), Cell("fsdp", 3))],
    ids=cell_id,
)
@pytest.mark.few(1)
def test_what_real_steps_left_is_what_is_stored(tmp_path: Path, source: Cell, target: Cell) -> None:
    run = str(tmp_path / "run")
    gathered = run_ranks(source.world_size, train, source.kind, run)
    view = holdfast.open(run)
    assert sorted(gathered[0]) == view.names()
    for name in view.names():
        assert view[name].numpy().tobytes() == gathered[0][name], name
    if source.kind == "ddp":  # the job was one where ranks differ, and rank 0 was followed
        assert gathered[0]["model/pool.running_mean"] != gathered[1]["model/pool.running_mean"]
    for resumed in run_ranks(target.world_size, load_and_gather, run):
        assert resumed == gathered[0]


def load_and_gather(run: str) -> dict[str, bytes]:
    """Load into jobs that never stepped, return the full tensors, and check that training goes on."""
    job = build("fsdp", num_steps=0)
    holdfast.load(run, into=job.state, timeout_s=40)
    found = gather(job)
    job.model(torch.arange(8)).sum().backward()
    job.optimizer.step()
    assert gather(job) != found
    return found


def gather(job: Job) -> dict[str, bytes]:
    """The bytes of all full tensors."""
    return {name: bits(whole_of(tensor)).tobytes() for name, tensor, _ in tensors(job)}


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, put together by torch."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_optimizer_state_that_is_built_on_loading_is_sharded_like_its_parameter(tmp_path: Path) -> None:
    run_ranks(2, save, "fsdp", str(tmp_path / "run"), 1, 1)
    assert run_ranks(3, placements_of_built_state, str(tmp_path / "run")) == [True, True, True]


def placements_of_built_state(run: str) -> bool:
    job = build("fsdp", num_steps=0)
    holdfast.load(run, into=job.state, timeout_s=40)
    slots = [
        (parameter, tensor)
        for parameter, state in job.optimizer.state.items()
        for slot, tensor in state.items()
        if slot != "step"
    ]
    assert len(slots) == 2 * len(list(job.model.parameters()))
    return all(
        isinstance(tensor, DTensor)
        and isinstance(parameter, DTensor)
        and tensor.placements == parameter.placements
        and tensor.to_local().shape == parameter.to_local().shape
        for parameter, tensor in slots
    )


def save_between_forward_and_backward(run: str, reshard: bool, saving: bool) -> tuple[dict[str, bytes], list[bytes]]:
    """Save when parameters may be gathered, then finish the step: the full parameters, and the gradients."""
    start_new_job()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    whole = {f"model/{name}": bits(whole_of(parameter)).tobytes() for name, parameter in model.named_parameters()}
    loss = model(torch.ones(2, 3)).square().sum()
    if saving:
        holdfast.save(run, {"model": model}, 1, timeout_s=40)
    loss.backward()
    return whole, [bits(cast("torch.Tensor", parameter.grad)).tobytes() for parameter in model.parameters()]


@pytest.mark.parametrize("reshard", [True, False], ids=["resharded-after-forward", "gathered-after-forward"])
def test_a_save_between_forward_and_backward_disturbs_neither(tmp_path: Path, reshard: bool) -> None:
    run = str(tmp_path / "run")
    saving = run_ranks(2, save_between_forward_and_backward, run, reshard, True)
    assert saving == run_ranks(2, save_between_forward_and_backward, run, reshard, False)
    view = holdfast.open(run)
    assert {name: view[name].numpy().tobytes() for name in view.names()} == saving[0][0]


def stages(indexes: list[int], seed: int | None) -> tuple[dict[str, Any], list[tuple[str, torch.Tensor]]]:
    """The stages of a pipeline that one rank holds, and their tensors by name, with the content of `seed`."""
    model = nn.ModuleDict({f"stage{index}": nn.Linear(3, 2 + index) for index in indexes})
    optimizer = AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held: list[tuple[str, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        held.append((f"model/{name}", parameter))
        held += [(f"optimizer/state/model/{name}/{slot}", item) for slot, item in optimizer.state[parameter].items()]
    for name, tensor in held:
        if seed is not None:
            write(tensor, full(seed, name, tensor))
    return {"model": model, "optimizer": optimizer, "step": 3}, held


def save_stages(run: str, division: list[list[int]]) -> None:
    start_new_job()
    state, _ = stages(division[dist.get_rank()], 4)
    holdfast.save(run, state, 1, timeout_s=40)


def load_stages(run: str, division: list[list[int]]) -> list[str]:
    state, held = stages(division[dist.get_rank()], None)
    report = holdfast.load(run, into=state, timeout_s=40)
    assert report.missing == report.unexpected == ()
    return [name for name, tensor in held if not holds(tensor, full(4, name, tensor))]


def test_ranks_that_hold_different_modules_make_one_checkpoint(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    run_ranks(3, save_stages, run, [[0], [1, 2], [3]])
    for division in ([[0, 1], [2, 3]], [[3], [2], [1], [0]], [[0, 1, 2, 3]]):
        assert run_ranks(len(division), load_stages, run, division) == [[]] * len(division)


Spec = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


SHAPES: list[tuple[int, ...]] = [(7, 5), (2, 3, 4), (1,), (9,), (3, 1, 6), (0, 4), (16, 2)]


MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(1,)],
    2: [(2,), (1, 2)],
    3: [(3,), (3, 1)],
    4: [(4,), (2, 2)],
    6: [(2, 3), (3, 2), (6,)],
}


def spec(world_size: int, seed: int) -> Spec:
    """A mesh shape, and for each tensor the axes that the mesh's axes shard (-1: replicated)."""
    generator = np.random.default_rng(seed)
    mesh = MESHES[world_size][generator.integers(len(MESHES[world_size]))]
    axes = tuple(tuple(int(a) for a in generator.integers(-1, len(shape), len(mesh))) for shape in SHAPES)
    return mesh, axes


def state_of(mesh_shape: tuple[int, ...], axes: tuple[tuple[int, ...], ...], seed: int | None) -> dict[str, Any]:
    """DTensors with the content of `seed`, or zeros."""
    mesh = init_device_mesh("cpu", mesh_shape)
    state: dict[str, Any] = {}
    for number, (shape, sharded) in enumerate(zip(SHAPES, axes, strict=True)):
        placements: list[Placement] = [Replicate() if axis < 0 else Shard(axis) for axis in sharded]
        dtype = [torch.float32, torch.int64, torch.bfloat16, torch.complex64][number % 4]
        whole = torch.zeros(shape, dtype=dtype)
        if seed is not None:
            write(whole, full(seed, str(number), whole))
        state[f"t{number}"] = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return state


def save_dtensors(run: str, mesh: tuple[int, ...], axes: tuple[tuple[int, ...], ...], seed: int) -> None:
    start_new_job()
    holdfast.save(run, state_of(mesh, axes, seed), 1, timeout_s=40)


def load_dtensors(run: str, mesh: tuple[int, ...], axes: tuple[tuple[int, ...], ...], seed: int) -> list[str]:
    found, expected = state_of(mesh, axes, None), state_of(mesh, axes, seed)
    holdfast.load(run, into=found, timeout_s=40)
    return [name for name in found if bits(found[name]).tobytes() != bits(expected[name]).tobytes()]


def check_meshes(run: Path, num_saving: int, num_loading: int, seed: int) -> None:
    run_ranks(num_saving, save_dtensors, str(run), *spec(num_saving, seed), seed)
    view = holdfast.open(run)
    for number, shape in enumerate(SHAPES):
        lazy = view[f"t{number}"]
        assert lazy.shape == shape
        found = lazy[...].reshape(-1)
        if prod(shape):
            assert bits(found).tobytes() == full(seed, str(number), found.reshape(shape)).tobytes()
    mesh, axes = spec(num_loading, seed + 1)
    for differing_names in run_ranks(num_loading, load_dtensors, str(run), mesh, axes, seed):
        assert differing_names == []


@pytest.mark.parametrize(("num_saving", "num_loading", "seed"), [(4, 3, 1), (4, 2, 2), (2, 4, 3), (3, 4, 4), (6, 4, 5)])
@pytest.mark.few(2)
def test_meshes_of_several_axes_load_on_others(tmp_path: Path, num_saving: int, num_loading: int, seed: int) -> None:
    check_meshes(tmp_path / "run", num_saving, num_loading, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 40))
def test_many_meshes_load_on_many_others(tmp_path: Path, seed: int) -> None:
    generator = np.random.default_rng(seed)
    num_saving, num_loading = (int(n) for n in generator.choice([1, 2, 3, 4, 6], 2, replace=False))
    check_meshes(tmp_path / "run", num_saving, num_loading, seed)


WIDE = (5 << 20, 4)


def wide(seed: int) -> torch.Tensor:
    return torch.arange(prod(WIDE), dtype=torch.int32).reshape(WIDE) * (2 * seed + 1)


def save_wide(run: str) -> tuple[int, int]:
    start_new_job()
    model = nn.Module()
    model.table = nn.Parameter(wide(1), requires_grad=False)
    model.bias = nn.Parameter(torch.arange(5.0))
    report = holdfast.save(run, {"model": DistributedDataParallel(model)}, 1, timeout_s=60)
    return report.nbytes, report.written_nbytes


def load_wide(run: str) -> bool:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = distribute_tensor(torch.zeros(WIDE, dtype=torch.int32), mesh, [Shard(1)], src_data_rank=None)
    holdfast.load(run, into={"model": {"table": table, "bias": torch.zeros(5)}}, timeout_s=60)
    first = -(-WIDE[1] // dist.get_world_size()) * dist.get_rank()
    return torch.equal(table.to_local(), wide(1)[:, first : first + -(-WIDE[1] // dist.get_world_size())])


def test_replicated_state_is_written_by_all_its_holders(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    sizes = run_ranks(2, save_wide, run)
    total = prod(WIDE) * 4
    assert all(0.45 * total < written < 0.55 * total for _, written in sizes)
    assert torch.equal(holdfast.open(run)["model/table"][::100_000], wide(1)[::100_000])
    assert run_ranks(3, load_wide, run) == [True, True, True]
