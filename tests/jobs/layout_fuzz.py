"""Random layouts, saved and loaded by real ranks: `python -m tests.jobs.layout_fuzz NUM_CASES [SEED]`.

A case is a tensor in a module, a layout that it is saved from and another that it is loaded into. The truth is what the
modules really hold: torch divides the whole tensor (tensor parallelism, `fully_shard` over it), so its modules have the
right elements in memory, and a twin of the target that torch makes of the whole tensor has what is to be loaded. No
arithmetic of the test or of the library is in between. Meshes are of some of the ranks, in any order; axes are uneven.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from math import lcm, prod
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, debug, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import holdfast
from tests.support.models import start_new_job
from tests.support.ranks import RanksFailedError, kill_workers, run_ranks

Way = Literal["fsdp", "hsdp", "placed", "fsdp_tp", "hsdp_tp", "fsdp_ep_tp"]

#: The number of mesh axes of each way, and how many of them are those of `fully_shard`.
WAYS: dict[Way, tuple[int, int]] = {
    "fsdp": (1, 1),
    "hsdp": (2, 2),
    "placed": (2, 0),
    "fsdp_tp": (2, 1),
    "hsdp_tp": (3, 2),
    "fsdp_ep_tp": (3, 1),
}
DTYPES = [torch.float32, torch.float16, torch.float64]  # those that gloo scatters
CASES_PER_ROUND = 16
MESHES_PER_ROUND = 6
ROUNDS_PER_WORKER = 5


class MeshPlan(NamedTuple):
    """A mesh: ranks in row-major order. `steady`: they ascend along each axis."""

    way: Way
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    steady: bool


class LayoutPlan(NamedTuple):
    """The division of a tensor: first by `placements` over the other mesh axes, then by `fully_shard` over its own."""

    mesh: int
    placements: tuple[Placement, ...]
    fsdp_axis: int


class CasePlan(NamedTuple):
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: LayoutPlan
    target: LayoutPlan


class Round(NamedTuple):
    meshes: list[MeshPlan]
    cases: list[CasePlan]


def draw_round(seed: int, world_size: int, num_cases: int) -> Round:
    """The same on every rank."""
    rng = random.Random(seed)
    meshes = [_draw_mesh(rng, world_size) for _ in range(MESHES_PER_ROUND)]
    return Round(meshes, [_draw_case(rng, number, meshes) for number in range(num_cases)])


def _draw_mesh(rng: random.Random, world_size: int) -> MeshPlan:
    way: Way = rng.choice([*WAYS])
    shape = tuple(rng.randint(1, max(1, world_size)) for _ in range(WAYS[way][0]))
    while prod(shape) > world_size:
        shape = tuple(rng.randint(1, extent) for extent in shape)
    ranks = torch.tensor(sorted(rng.sample(range(world_size), prod(shape)))).reshape(shape)
    is_permuted = rng.random() < 0.4
    if is_permuted and way in ("fsdp", "hsdp"):  # one axis divides: any order is one that torch can place
        ranks = ranks.reshape(-1)[torch.tensor(rng.sample(range(ranks.numel()), ranks.numel()))].reshape(shape)
    elif is_permuted:
        for axis, extent in enumerate(shape):
            ranks = ranks.index_select(axis, torch.tensor(rng.sample(range(extent), extent)))
    steady = all(bool((ranks.diff(dim=axis) > 0).all()) for axis in range(len(shape)))
    return MeshPlan(way, shape, tuple(ranks.reshape(-1).tolist()), steady)


def _draw_case(rng: random.Random, number: int, meshes: list[MeshPlan]) -> CasePlan:
    shape = [rng.choice([rng.randint(1, 9), rng.randint(1, 45), 13]) for _ in range(rng.randint(1, 3))]
    layouts = [_draw_layout(rng, meshes, len(shape)) for _ in range(2)]
    for axis, extent in enumerate(shape):
        unit = lcm(*(_unit(meshes[layout.mesh], layout, axis) for layout in layouts))
        shape[axis] = -(-extent // unit) * unit
    return CasePlan(number, tuple(shape), rng.choice(DTYPES), *layouts)


def _draw_layout(rng: random.Random, meshes: list[MeshPlan], num_axes: int) -> LayoutPlan:
    index = rng.randrange(len(meshes))
    inner = meshes[index].shape[WAYS[meshes[index].way][1] :]
    placements = (Shard(rng.randrange(num_axes)) if rng.random() < 0.85 else Replicate() for _ in inner)
    return LayoutPlan(index, tuple(placements), rng.randrange(num_axes) if rng.random() < 0.3 else 0)


def _unit(mesh: MeshPlan, layout: LayoutPlan, axis: int) -> int:
    """The number of which an axis must be a multiple, or torch refuses to divide it, or loses a part of it."""
    num_sharding = WAYS[mesh.way][1]
    if num_sharding and layout.fsdp_axis == axis > 0:  # uneven sharding is there for the first axis alone
        return prod(mesh.shape)
    is_scattered = any(isinstance(item, Shard) and item.dim == axis for item in layout.placements)
    # Rows are cut off where uneven shards go to ranks that do not ascend. And FSDP2 shards of another axis than the
    # first may not be empty: torch's own hook of load_state_dict refuses them.
    if is_scattered and (layout.fsdp_axis or not mesh.steady):
        return prod(mesh.shape[num_sharding:])
    return 1


def whole(seed: int, case: CasePlan) -> torch.Tensor:
    """The truth: random bits."""
    generator = torch.Generator().manual_seed(1000 * seed + case.number)
    numel = prod(case.shape) * case.dtype.itemsize
    return torch.randint(256, (numel,), dtype=torch.uint8, generator=generator).view(case.dtype).reshape(case.shape)


def divided(layout: LayoutPlan, plan: Round, meshes: list[DeviceMesh], tensor: torch.Tensor) -> nn.Module | None:
    """A module whose parameter torch has divided; None on ranks that are not in the mesh."""
    mesh, way = meshes[layout.mesh], plan.meshes[layout.mesh].way
    if dist.get_rank() not in plan.meshes[layout.mesh].ranks:
        return None
    num_sharding = WAYS[way][1]
    names = mesh.mesh_dim_names
    assert names is not None
    if layout.placements:
        tensor = distribute_tensor(tensor, mesh[names[num_sharding:]], list(layout.placements))
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(tensor))
    if num_sharding:
        fully_shard(module, mesh=mesh[names[:num_sharding]], shard_placement_fn=lambda _: Shard(layout.fsdp_axis))
    return module


State = dict[str, object]


def state_of(seed: int | None, plan: Round, meshes: list[DeviceMesh], side: Literal["source", "target"]) -> State:
    """Modules, and averages of their parameters; of zeros without a seed."""
    modules, averages = {}, {}
    for case in plan.cases:
        tensor = torch.zeros(case.shape, dtype=case.dtype) if seed is None else whole(seed, case)
        module = divided(getattr(case, side), plan, meshes, tensor)
        if module is not None:
            modules[f"c{case.number}"] = module
            averages[f"c{case.number}"] = module.get_parameter("w").detach().clone()
    return {"modules": modules, "averages": averages}


def tensors_of(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    modules, averages = state["modules"], state["averages"]
    assert isinstance(modules, dict)
    assert isinstance(averages, dict)
    yield from ((f"modules/{name}/w", module.w) for name, module in modules.items())
    yield from ((f"averages/{name}", tensor) for name, tensor in averages.items())


def wrong(found: State, truth: State) -> list[str]:
    pairs = zip(tensors_of(found), tensors_of(truth), strict=True)
    return [name for (name, tensor), (_, expected) in pairs if bits(tensor) != bits(expected)]


def bits(tensor: torch.Tensor) -> tuple[tuple[int, ...], bytes]:
    local = tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()
    return tuple(local.shape), local.contiguous().view(torch.uint8).numpy().tobytes() if local.numel() else b""


def fuzzed(run: str, seed: int, num_cases: int) -> list[str]:
    """One round on one rank: what was stored, loaded or transferred wrongly."""
    start_new_job()
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # it would find process groups of earlier jobs
    plan = draw_round(seed, dist.get_world_size(), num_cases)
    meshes = [
        DeviceMesh(
            "cpu", torch.tensor(mesh.ranks).reshape(mesh.shape), mesh_dim_names=("a", "b", "c")[: len(mesh.shape)]
        )
        for mesh in plan.meshes
    ]
    source, truth = (state_of(seed, plan, meshes, side) for side in ("source", "target"))
    holdfast.save(run, source, 1, timeout_s=90)
    faults = []
    if dist.get_rank() == 0:
        view = holdfast.open(run)
        for case in plan.cases:
            expected = bits(whole(seed, case))
            names = (f"modules/c{case.number}/w", f"averages/c{case.number}")
            faults += [f"{name} stored" for name in names if bits(view[name][...]) != expected]
    verbs: list[tuple[str, Callable[[State], object]]] = [
        ("loaded", lambda state: holdfast.load(run, into=state, timeout_s=90)),
        ("transferred", lambda state: holdfast.transfer(source, state, timeout_s=90)),
    ]
    for verb, fill in verbs:
        state = state_of(None, plan, meshes, "target")
        fill(state)
        faults += [f"{name} {verb}" for name in wrong(state, truth)]
    return faults


def fuzz(num_cases: int, seed: int, folder: Path, *, report_every: int = 0) -> list[str]:
    """Faults of `num_cases` cases, with the seeds that show them again."""
    faults: list[str] = []
    begun_s = time.monotonic()
    for number, first in enumerate(range(0, num_cases, CASES_PER_ROUND), 1):
        world_size = random.Random(seed + number).choice([2, 3, 4, 6, 6, 8, 8])
        run = folder / f"run-{number}"
        cases = min(CASES_PER_ROUND, num_cases - first)
        where = f"seed {seed + number}, {cases} cases, {world_size} ranks"
        try:
            found = run_ranks(world_size, fuzzed, str(run), seed + number, cases, timeout_s=100)
        except RanksFailedError as error:
            faults.append(f"{where}: {error}")
        else:
            faults += [f"{where}, rank {rank}: {fault}" for rank, each in enumerate(found) for fault in each]
        shutil.rmtree(run, ignore_errors=True)  # of a save that failed, there may be none
        if number % ROUNDS_PER_WORKER == 0:  # torch never ends the threads of all those process groups
            kill_workers()
        if report_every and number % report_every == 0:
            seconds = time.monotonic() - begun_s
            print(f"{first + cases} cases, {len(faults)} faults, {seconds:.0f} s", *faults[-1:], flush=True)  # noqa: T201
    return faults


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        arguments = [int(argument) for argument in sys.argv[1:]]
        lines = fuzz(arguments[0], (arguments[1:] or [0])[0], Path(scratch), report_every=10)
    print("\n".join(lines) or f"{arguments[0]} cases, no fault")  # noqa: T201
