"""Shards of uneven size, of meshes in any order: the rows that are stored and loaded are those that ranks really hold.

The truth is torch's: real `fully_shard` over real tensor parallelism. With the fake process group of torch one process
plays each rank of a mesh in turn, since neither of the two communicates to divide a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast.errors import StateError
from holdfast.state.flatten import flatten
from holdfast.state.local_memory import LocalPieces
from tests.support.models import start_new_job
from tests.support.ranks import RanksFailedError, run_processes, run_ranks

#: Sizes of the axes of a mesh: those of FSDP2 or HSDP, then those of tensor or expert parallelism.
Grid = tuple[tuple[int, ...], tuple[int, ...]]
Shapes = dict[str, tuple[int, ...]]

SIZES = [*range(1, 80), 97, 128, 131, 257, 599, 600, 50257]
FEW_SIZES = [*range(1, 27), 50257]


def numbered(*shape: int) -> torch.Tensor:
    """A tensor whose elements are their own numbers."""
    return torch.arange(prod(shape), dtype=torch.float64).reshape(shape)


def module(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    made = nn.Module()
    for name, tensor in tensors.items():
        made.register_parameter(name, nn.Parameter(tensor))
    return made


def sharded(grid: Grid, shapes: Shapes, inner: list[Placement], *, whole: bool = True) -> nn.Module:
    """Tensors divided by `inner` over the inner axes of the mesh, and what that left by FSDP2 over the outer ones."""
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it would find process groups of earlier jobs
    outer_axes, inner_axes = (
        tuple(f"{kind}{n}" for n, _ in enumerate(sizes)) for kind, sizes in zip("oi", grid, strict=True)
    )
    mesh = init_device_mesh("cpu", grid[0] + grid[1], mesh_dim_names=outer_axes + inner_axes)
    parts = {
        name: distribute_tensor(numbered(*shape) * whole, mesh[inner_axes], inner, src_data_rank=None)
        for name, shape in shapes.items()
    }
    model = module(parts)
    fully_shard(model, mesh=mesh[outer_axes])
    return model


def misplaced(model: nn.Module, rank: int) -> tuple[list[str], dict[str, int]]:
    """Parameters whose memory is not what the layout says, and the number of elements that the rank holds of each."""
    wrong, numels, pieces = [], {}, LocalPieces(rank)
    for name, local in flatten({"m": model}).tensors.items():
        boxes = pieces.of(local.layout, local.memory)
        truth = numbered(*local.layout.shape)
        if not all(torch.equal(truth[box.slices()], memory) for box, memory in boxes):
            wrong.append(name)
        numels[name] = sum(box.numel for box, _ in boxes)
    return wrong, numels


def played(_: int, grid: Grid, shapes: Shapes, inner: list[Placement], copies: int) -> list[str]:
    """The elements that are misplaced, or held too often or too rarely; this process plays all ranks of the mesh."""
    wrong: set[str] = set()
    totals: dict[str, int] = {}
    for rank in range(world := prod(grid[0] + grid[1])):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        found, numels = misplaced(sharded(grid, shapes, inner), rank)
        wrong.update(found)
        totals = {name: totals.get(name, 0) + numel for name, numel in numels.items()}
        dist.destroy_process_group()
    return sorted(wrong) + [name for name, n in totals.items() if n != copies * prod(shapes[name.removeprefix("m/")])]


def rows(sizes: list[int], *behind: int) -> Shapes:
    return {f"w{size}": (size, *behind) for size in sizes}


def check_played(grid: Grid, shapes: Shapes, inner: list[Placement], *, copies: int = 1) -> None:
    assert run_processes(1, played, grid, shapes, inner, copies, timeout_s=110) == [[]]


@pytest.mark.parametrize("grid", [((3,), (2,)), ((2,), (5,))], ids=["tp2-dp3", "tp5-dp2"])
def test_fsdp2_over_tensor_parallelism_is_described_as_it_is(grid: Grid) -> None:
    check_played(grid, rows(FEW_SIZES), [Shard(0)])


@pytest.mark.slow
@pytest.mark.parametrize("dp", range(2, 9))
@pytest.mark.parametrize("tp", range(2, 9))
def test_fsdp2_over_tensor_parallelism_of_any_size_is_described_as_it_is(tp: int, dp: int) -> None:
    check_played(((dp,), (tp,)), rows(SIZES), [Shard(0)])


@pytest.mark.parametrize(
    ("grid", "inner", "copies"),
    [
        (((2, 2), (3,)), [Shard(0)], 2),
        (((2,), (2, 3)), [Shard(0), Shard(0)], 1),
        (((3,), (2, 2)), [Replicate(), Shard(0)], 2),
        (((2,), (2, 3)), [Shard(1), Shard(0)], 1),
        (((3,), (2,)), [Shard(1)], 1),
    ],
    ids=["hsdp-tp", "fsdp-ep-tp", "fsdp-copies-tp", "fsdp-columns-rows", "fsdp-columns"],
)
def test_meshes_of_two_and_three_axes_are_described_as_they_are(
    grid: Grid, inner: list[Placement], copies: int
) -> None:
    check_played(grid, rows(FEW_SIZES[:-1], 5), inner, copies=copies)


# --- saved and loaded by real ranks ----------------------------------------------------------------------------------

#: The bias and the embedding (GPT-2's vocabulary, two columns) that were saved with wrong bytes, or not at all.
BOTH = {"bias": (13,), "embedding": (50257, 2)}


def save(run: str, grid: Grid, shapes: Shapes) -> None:
    start_new_job()
    holdfast.save(run, {"m": sharded(grid, shapes, [Shard(0)])}, 1, timeout_s=40)


def load(run: str, grid: Grid, shapes: Shapes) -> list[str]:
    model = sharded(grid, shapes, [Shard(0)], whole=False)
    holdfast.load(run, into={"m": model}, timeout_s=40)
    return differing(model, sharded(grid, shapes, [Shard(0)]))


def differing(model: nn.Module, truth: nn.Module) -> list[str]:
    pairs = zip(model.named_parameters(), truth.parameters(), strict=True)
    return [name for (name, found), expected in pairs if not torch.equal(part(found), part(expected))]


def part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.full_tensor()


def test_uneven_rows_under_fsdp2_and_tensor_parallelism_come_back_on_any_layout(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    run_ranks(6, save, run, ((3,), (2,)), BOTH)
    view = holdfast.open(run)
    assert all(torch.equal(view[f"m/{name}"][...], numbered(*shape)) for name, shape in BOTH.items())
    for grid in (((3,), (2,)), ((2,), (3,)), ((1, 2), (2,))):
        world_size = prod(grid[0] + grid[1])
        assert run_ranks(world_size, load, run, grid, BOTH) == [[]] * world_size


def checkpointed_and_moved(run: str, node_dir: Path) -> list[list[str]]:
    """The differences after a restore of a background save, and after a transfer between two layouts."""
    start_new_job()
    here, there = ((3,), (2,)), ((2,), (3,))
    model = sharded(here, BOTH, [Shard(0)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    slots = [optimizer.state[parameter]["exp_avg"].clone() for parameter in model.parameters()]
    memory = holdfast.Memory(node_dir=node_dir)
    with holdfast.Checkpointer(run, {"m": model, "o": optimizer}, memory=memory) as checkpointer:
        checkpointer.save(1).durable.wait(40)
    restored = sharded(here, BOTH, [Shard(0)], whole=False)
    fresh = torch.optim.AdamW(restored.parameters(), lr=0.5)
    with holdfast.Checkpointer(run, {"m": restored, "o": fresh}, memory=memory) as checkpointer:
        checkpointer.restore()
    moved = sharded(there, BOTH, [Shard(0)], whole=False)
    holdfast.transfer({"m": sharded(here, BOTH, [Shard(0)])}, {"m": moved}, timeout_s=40)
    lost = [
        "exp_avg"
        for parameter, slot in zip(restored.parameters(), slots, strict=True)
        if not torch.equal(fresh.state[parameter]["exp_avg"].to_local(), slot.to_local())
    ]
    return [differing(restored, model), lost, differing(moved, sharded(there, BOTH, [Shard(0)]))]


def test_uneven_rows_are_restored_and_transferred(run: str, node_dir: Path) -> None:
    assert run_ranks(6, checkpointed_and_moved, run, node_dir) == [[[], [], []]] * 6


# --- meshes of ranks in another order --------------------------------------------------------------------------------


def on_mesh(ranks: list[int], *, whole: bool = True) -> dict[str, torch.Tensor]:
    """Tensors that `fully_shard` and `distribute_tensor` divide over a mesh; torch itself cuts uneven ones wrongly."""
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    mesh = DeviceMesh("cpu", ranks)
    if dist.get_rank() not in ranks:
        return {}
    even_size, size = 2 * len(ranks), 2 * len(ranks) - 1
    model = module({"fsdp": numbered(size) * whole})
    fully_shard(model, mesh=mesh)
    return {
        "fsdp": model.get_parameter("fsdp"),
        "scattered": distribute_tensor(numbered(even_size) * whole, mesh, [Shard(0)]),
    }


def save_and_load_permuted(run: str, source: list[int], target: list[int]) -> tuple[bool, bool]:
    """Whether the stored tensors are what torch has of them, and whether the loaded ones are, on other ranks."""
    start_new_job()
    saved = on_mesh(source)
    holdfast.save(run, saved, 1, timeout_s=40)
    stored = holdfast.open(run)
    is_stored = all(torch.equal(stored[name][...], full_tensor(tensor)) for name, tensor in saved.items())
    live = on_mesh(target, whole=False)
    holdfast.load(run, into=live, timeout_s=40)
    truth = on_mesh(target)
    return is_stored, all(torch.equal(part(live[name]), part(truth[name])) for name in live)


@pytest.mark.parametrize(
    ("source", "target"),
    [([2, 0, 1], [1, 0, 2]), ([2, 3, 0], [0, 1, 2])],
    ids=["all-ranks", "some-ranks"],
)
def test_a_mesh_of_permuted_ranks_stores_the_rows_that_torch_gives_them(
    tmp_path: Path, source: list[int], target: list[int]
) -> None:
    world_size = max(source + target) + 1
    found = run_ranks(world_size, save_and_load_permuted, str(tmp_path / "run"), source, target)
    assert found == [(True, True)] * world_size


def placed_on_crossed_ranks(run: str) -> None:
    """Both axes divide rows, and torch gives two pairs of ranks one part each: it has lost the others."""
    start_new_job()
    mesh = DeviceMesh("cpu", [[0, 3], [2, 1]])
    tensor = distribute_tensor(numbered(8), mesh, [Shard(0), Shard(0)])
    holdfast.save(run, {"w": tensor}, 1, timeout_s=40)


def test_a_mesh_that_gives_two_ranks_one_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(4, placed_on_crossed_ranks, str(tmp_path / "run"))
    assert {error.code for error in failed.value.exceptions if isinstance(error, StateError)} == {"state.placement"}


# --- local parts of another shape ------------------------------------------------------------------------------------


def with_a_wrong_part(kind: str) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    if kind == "cut otherwise":  # 5 rows of 8 on rank 0
        local = numbered(8)[:5] if rank == 0 else numbered(8)[5:]
    elif kind == "one row for all":
        local = torch.zeros(1)
    else:
        local = torch.zeros(8)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size([8]), stride=(1,))


def save_or_load_a_wrong_part(run: str, kind: str, verb: str) -> None:
    start_new_job()
    mesh = init_device_mesh("cpu", (2,))
    good = {"w": distribute_tensor(numbered(8), mesh, [Shard(0)])}
    if verb == "save":
        holdfast.save(run, {"w": with_a_wrong_part(kind)}, 1, timeout_s=40)
    elif verb == "load":
        holdfast.save(run, good, 1, timeout_s=40)
        holdfast.load(run, {"w": with_a_wrong_part(kind)}, timeout_s=40)
    else:
        holdfast.transfer(good, {"w": with_a_wrong_part(kind)}, timeout_s=40)


@pytest.mark.parametrize(
    ("kind", "verb"),
    [("cut otherwise", "save"), ("one row for all", "load"), ("all rows for all", "transfer")],
)
def test_a_local_part_of_another_shape_than_its_placements_say_is_refused(tmp_path: Path, kind: str, verb: str) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(2, save_or_load_a_wrong_part, str(tmp_path / "run"), kind, verb)
    assert {error.code for error in failed.value.exceptions if isinstance(error, StateError)} == {"state.local_shape"}


def strided_by_distribute_tensor(run: str) -> None:
    start_new_job()
    mesh = init_device_mesh("cpu", (3, 2))
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    holdfast.save(run, {"w": distribute_tensor(numbered(13), mesh, placements, src_data_rank=None)}, 1, timeout_s=40)


def test_strided_shards_that_are_no_fsdp2_shards_are_refused_where_they_hold_other_rows(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(6, strided_by_distribute_tensor, str(tmp_path / "run"))
    assert {error.code for error in failed.value.exceptions if isinstance(error, StateError)} == {"state.local_shape"}
