"""Every kind of parallelism into every other: saved as one, loaded as another, bit for bit.

`python -m pytest -rA tests/jobs/test_layouts.py` lists source, target, seed and number of processes of each pair.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import AdamW

import holdfast
from holdfast.errors import StateError
from tests.jobs.layout_cells import UNITS, Cell, build, differing, filled, held, holds, model_of, spread
from tests.support.models import bits, full, start_new_job, write
from tests.support.ranks import RanksFailedError, run_ranks

CELLS = [
    Cell("plain", (1,)),
    Cell("tp", (1,)),
    Cell("pp", (1,)),
    Cell("fsdp", (2,)),
    Cell("hsdp", (1, 2)),
    Cell("hsdp", (2, 1)),
    Cell("fsdp_tp", (1, 2)),
    Cell("ep_fsdp", (2, 1)),
    Cell("pp", (2,)),
    Cell("ddp", (3,)),
    Cell("tp", (3,)),
    Cell("fsdp_tp", (1, 3)),
    Cell("ep", (1, 3)),
    Cell("pp", (3,)),
    Cell("tp", (4,)),
    Cell("hsdp", (2, 2)),
    Cell("fsdp_tp", (2, 2)),
    Cell("pp_fsdp", (2, 2)),
    Cell("ep", (2, 2)),
    Cell("ep_fsdp", (2, 2)),
    Cell("fsdp", (8,)),
    Cell("hsdp", (2, 4)),
    Cell("tp", (8,)),
    Cell("fsdp_tp", (4, 2)),
    Cell("fsdp_tp", (2, 4)),
    Cell("hsdp_tp", (2, 2, 2)),
    Cell("pp", (8,)),
    Cell("pp_fsdp", (4, 2)),
    Cell("ep", (2, 4)),
    Cell("ep_fsdp", (2, 4)),
    Cell("ep_fsdp", (4, 2)),
]
#: Hard pairs: what one side shards strided, unevenly, along other axes or not at all, the other divides differently.
#: Every kind is a source and a target.
HARD = [
    (Cell("fsdp_tp", (2, 2)), Cell("tp", (3,))),
    (Cell("tp", (3,)), Cell("fsdp_tp", (2, 2))),
    (Cell("fsdp_tp", (1, 3)), Cell("fsdp_tp", (2, 2))),
    (Cell("hsdp", (2, 2)), Cell("fsdp_tp", (1, 3))),
    (Cell("ddp", (3,)), Cell("hsdp", (2, 2))),
    (Cell("ep_fsdp", (2, 2)), Cell("ep", (1, 3))),
    (Cell("ep", (2, 2)), Cell("pp", (3,))),
    (Cell("pp", (3,)), Cell("ep_fsdp", (2, 2))),
    (Cell("pp_fsdp", (2, 2)), Cell("fsdp", (3,))),
    (Cell("fsdp", (3,)), Cell("pp_fsdp", (2, 2))),
    (Cell("tp", (4,)), Cell("plain", (1,))),
    (Cell("plain", (1,)), Cell("tp", (4,))),
    (Cell("pp", (2,)), Cell("ddp", (2,))),
    (Cell("hsdp_tp", (2, 2, 2)), Cell("pp", (8,))),
    (Cell("pp", (8,)), Cell("hsdp_tp", (2, 2, 2))),
]


def save(cell: Cell, run: str, seed: int) -> tuple[int, int]:
    start_new_job()
    report = holdfast.save(run, filled(cell, seed).state, 30, timeout_s=60)
    return report.nbytes, report.written_nbytes


def load(cell: Cell, run: str, seed: int) -> tuple[list[str], set[str]]:
    """Load, also into optimizers that never stepped; return the differences from the truth, and names not loaded."""
    job = build(cell, seed + 1, stepped=seed % 2 == 1)
    report = holdfast.load(run, into=job.state, timeout_s=60)
    return differing(job, seed), {name for name, _, _ in held(job)} - set(report.loaded)


def check_stored(run: Path, seed: int) -> None:
    """The files hold the full tensors, whoever wrote them."""
    view = holdfast.open(run)
    truth = {name: full(seed, name, tensor) for name, tensor, _ in held(build(Cell("plain", (1,)), seed))}
    assert view.names() == sorted(truth)
    assert [name for name, whole in truth.items() if view[name].numpy().tobytes() != whole.tobytes()] == []


def check_saved(run: Path, source: Cell, seed: int) -> None:
    sizes = run_ranks(source.world_size, save, source, str(run), seed, timeout_s=100)
    assert {nbytes for nbytes, _ in sizes} == {sum(written for _, written in sizes)}
    check_stored(run, seed)


def check_loaded(run: Path, target: Cell, seed: int) -> None:
    found = run_ranks(target.world_size, load, target, str(run), seed, timeout_s=100)
    assert found == [([], set())] * target.world_size


def pair_id(value: object) -> str:
    return f"seed{value}" if isinstance(value, int) else str(value)


def case(source: Cell, target: Cell, seed: int) -> object:
    processes = source.world_size + target.world_size
    return pytest.param(source, target, seed, id=f"{source}-to-{target}-seed{seed}-{processes}processes")


@pytest.mark.parametrize(
    ("source", "target", "seed"), [case(source, target, seed) for seed, (source, target) in enumerate(HARD)]
)
@pytest.mark.few(6)
def test_any_parallelism_loads_any_other(tmp_path: Path, source: Cell, target: Cell, seed: int) -> None:
    check_saved(tmp_path / "run", source, seed)
    check_loaded(tmp_path / "run", target, seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("source", "seed"),
    [
        pytest.param(cell, 100 + i, id=f"{cell}-to-{len(CELLS) - 1}-others-seed{100 + i}")
        for i, cell in enumerate(CELLS)
    ],
)
def test_every_parallelism_loads_every_other(tmp_path: Path, source: Cell, seed: int) -> None:
    check_saved(tmp_path / "run", source, seed)
    for target in CELLS:
        if target != source:
            check_loaded(tmp_path / "run", target, seed)
            print(f"{source} -> {target}: seed {seed}, {source.world_size} + {target.world_size} processes")  # noqa: T201


def torch_cuts(cell: Cell) -> tuple[list[str], list[str], bool]:
    """Parameters that torch cut otherwise than `cut` says, kinds of placements, and whether a local part is empty."""
    torch.manual_seed(7)
    truth = {name: bits(parameter) for name, parameter in model_of(UNITS).named_parameters()}
    torch.manual_seed(7)
    shards = dict(spread(cell).named_parameters())
    kinds = {type(item).__name__ for p in shards.values() if isinstance(p, DTensor) for item in p.placements}
    empty = any(isinstance(p, DTensor) and p.numel() and not p.to_local().numel() for p in shards.values())
    return [name for name, shard in shards.items() if not holds(shard, truth[name])], sorted(kinds), empty


@pytest.mark.parametrize(
    ("cell", "kinds"),
    [
        (Cell("hsdp", (1, 4)), ["Replicate", "Shard"]),
        (Cell("tp", (4,)), ["Replicate", "Shard"]),
        (Cell("fsdp_tp", (2, 2)), ["Replicate", "Shard", "_StridedShard"]),
        (Cell("fsdp_tp", (1, 3)), ["Replicate", "Shard", "_StridedShard"]),
        (Cell("ep_fsdp", (2, 2)), ["Shard", "_StridedShard"]),
    ],
    ids=["hsdp", "tensor-parallel", "fsdp-over-tensor-parallel", "uneven-tensor-parallel", "fsdp-over-experts"],
)
def test_the_truth_is_cut_as_torch_cuts_uneven_empty_and_strided(cell: Cell, kinds: list[str]) -> None:
    found = run_ranks(cell.world_size, torch_cuts, cell)
    assert [(names, placements) for names, placements, _ in found] == [([], kinds)] * cell.world_size
    assert any(empty for _, _, empty in found)


class Tied(nn.Module):
    """The ends of a language model, which share a weight; a pipeline has each on a stage of its own."""

    def __init__(self, ends: set[str]) -> None:
        super().__init__()
        weight = nn.Parameter(torch.zeros(5, 3))
        for end in sorted(ends):
            self.add_module(end, nn.Embedding(5, 3) if end == "embed" else nn.Linear(3, 5, bias=False))
            self.get_submodule(end).register_parameter("weight", weight)


Ends = list[set[str]]
ENDS: Ends = [{"embed"}, {"head"}]


def tied(ends: Ends, seed: int | None) -> tuple[dict[str, object], list[torch.Tensor]]:
    """The state of this rank, and its tensors: weight, step and two moments, the same on all stages."""
    model = Tied(ends[dist.get_rank()])
    optimizer = AdamW(model.parameters(), lr=0.5)
    (weight,) = model.parameters()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    tensors = [weight, *optimizer.state[weight].values()]
    for number, tensor in enumerate(tensors):
        if seed is not None:
            write(tensor, full(seed, str(number), tensor))
    return {"model": model, "optimizer": optimizer}, tensors


def save_tied(run: str, ends: Ends) -> None:
    start_new_job()
    holdfast.save(run, tied(ends, 3)[0], 1, timeout_s=40)


def load_tied(run: str, ends: Ends) -> bool:
    state, tensors = tied(ends, None)
    holdfast.load(run, into=state, timeout_s=40, continues=True)
    return all(holds(tensor, full(3, str(number), tensor)) for number, tensor in enumerate(tensors))


@pytest.mark.parametrize("target", [ENDS, ENDS[::-1], [{"embed", "head"}]], ids=["stages", "swapped", "one"])
@pytest.mark.parametrize("source", [ENDS, [{"embed", "head"}]], ids=["stages", "one"])
@pytest.mark.few(2)
def test_a_weight_tied_across_stages_comes_back_under_both_names(tmp_path: Path, source: Ends, target: Ends) -> None:
    run = str(tmp_path / "run")
    run_ranks(len(source), save_tied, run, source)
    assert run_ranks(len(target), load_tied, run, target) == [True] * len(target)


def save_one_name_on_two_meshes(run: str, differ: bool) -> None:
    """Two stages that call their weights alike, each sharded over its own ranks."""
    start_new_job()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "shard"))
    weight = torch.arange(8.0) + (100 * mesh.get_local_rank("pp") if differ else 0)
    shard = distribute_tensor(weight, mesh["shard"], [Shard(0)], src_data_rank=None)
    holdfast.save(run, {"weight": shard}, 1, timeout_s=40)


def test_equal_copies_on_two_meshes_are_stored_once(tmp_path: Path) -> None:
    run_ranks(4, save_one_name_on_two_meshes, str(tmp_path / "run"), False)
    assert torch.equal(holdfast.open(tmp_path / "run")["weight"][...], torch.arange(8.0))


def test_tensors_of_two_meshes_that_differ_under_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(4, save_one_name_on_two_meshes, str(tmp_path / "run"), True)
    assert all(isinstance(error, StateError) for error in failed.value.exceptions)
    assert "Tensor 'weight" in str(failed.value)


def save_and_load_what_one_rank_holds(run: str) -> list[float]:
    start_new_job()
    rank = dist.get_rank()
    holdfast.save(run, {"weight": torch.arange(3.0)} if rank == 2 else {}, 1, timeout_s=40)
    weight = torch.zeros(3)
    holdfast.load(run, into={"weight": weight} if rank == 0 else {}, timeout_s=40)
    return weight.tolist()


def test_ranks_with_an_empty_state_take_part(tmp_path: Path) -> None:
    nothing = [0.0, 0.0, 0.0]
    assert run_ranks(3, save_and_load_what_one_rank_holds, str(tmp_path / "run")) == [[0.0, 1.0, 2.0], nothing, nothing]


def sharded_over(ranks: list[int], whole: torch.Tensor) -> DTensor:
    return distribute_tensor(whole, DeviceMesh("cpu", ranks), [Shard(0)], src_data_rank=None)


def save_over_some_ranks(run: str) -> None:
    start_new_job()
    holdfast.save(run, {"weight": sharded_over([0, 2], torch.arange(5))}, 1, timeout_s=40)


def load_over_other_ranks(run: str) -> list[int]:
    weight = sharded_over([1, 2, 3], torch.zeros(5, dtype=torch.int64))
    holdfast.load(run, into={"weight": weight}, timeout_s=40)
    return [int(number) for number in weight.to_local()]


def test_ranks_outside_a_tensors_mesh_hold_nothing_of_it(tmp_path: Path) -> None:
    run_ranks(3, save_over_some_ranks, str(tmp_path / "run"))
    assert run_ranks(4, load_over_other_ranks, str(tmp_path / "run")) == [[], [0, 1], [2, 3], [4]]
