"""Optimizers and parameter groups through whole checkpoints: a job continues from the state that another saved.

The truth is what torch holds itself: every rank tells its optimizer's slots by parameter name, gathered by torch, and
after loading another job must tell the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

import holdfast
from holdfast.errors import IncompatibleError, StateError
from tests.support.models import bits, start_new_job
from tests.support.ranks import RanksFailedError, run_ranks

Parameters = Iterable[nn.Parameter]


class Factored(Optimizer):
    """Second moments of matrices as a row and a column vector, as Adafactor has them, and of a scalar's size."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                slots, grad = self.state[parameter], parameter.grad
                squares = grad.square() + 0.25
                if parameter.ndim < 2:
                    slots["all"] = squares + slots.get("all", 0.0)
                    parameter.sub_(group["lr"] * grad / slots["all"].sqrt())
                    continue
                row, column = whole_sums(squares.sum(1)), whole_sums(squares.sum(0, keepdim=True))
                slots["row"] = row + slots.get("row", 0.0)
                slots["column"] = column + slots.get("column", 0.0)
                parameter.sub_(group["lr"] * grad / (slots["row"].unsqueeze(1) * slots["column"]).sqrt())


def whole_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Sums over shards are partial until they are added up."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=[Replicate() if isinstance(p, Partial) else p for p in tensor.placements])


OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "adamw-foreach": lambda p: AdamW(p, lr=0.1, foreach=True, amsgrad=True),
    "adamw-fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "sgd-momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "lbfgs": lambda p: LBFGS(p, lr=0.1, max_iter=2, history_size=3),
    "adafactor": lambda p: Adafactor(p, lr=0.1),
    "factored": Factored,
}


def net(width: int) -> nn.Sequential:
    """Matrices, one of them square, that divide unevenly among two and three ranks, unless `width` is six."""
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


class Job(NamedTuple):
    model: nn.Module
    optimizer: Optimizer

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self, count: int = 1) -> None:
        """Steps that depend on nothing but the parameters."""

        def closure() -> float:
            self.optimizer.zero_grad()
            loss = self.model(torch.linspace(-1, 1, 15).reshape(3, 5)).square().sum()
            loss.backward()
            return float(loss.item())

        for _ in range(count):
            closure()
            self.optimizer.step(closure)


def build(kind: str, name: str) -> Job:
    """An optimizer that has not stepped, over a model that is plain, DDP, FSDP2 or sharded by columns."""
    model: nn.Module = net(6 if name == "lbfgs" else 7)  # LBFGS makes one flat vector, which torch must cut evenly
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model, mesh=mesh)
    return Job(model, OPTIMIZERS[name](model.parameters()))


def told(optimizer: Optimizer, names: dict[torch.Tensor, str]) -> dict[str, object]:
    """All slots by parameter name, gathered by torch, and the groups' hyper-parameters."""
    slots: dict[str, object] = {}
    for parameter, name in names.items():
        slots[name] = {key: told_value(value) for key, value in sorted(optimizer.state.get(parameter, {}).items())}
    groups = [{key: told_value(value) for key, value in group.items()} for group in bare(optimizer)]
    return {"slots": slots, "groups": groups}


def bare(optimizer: Optimizer) -> list[dict[str, object]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def told_value(value: object) -> object:
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        return str(whole.dtype), tuple(whole.shape), bits(whole).tobytes()
    return [told_value(item) for item in value] if isinstance(value, list) else value


def everything(job: Job) -> dict[str, object]:
    inner = job.model.module if isinstance(job.model, DistributedDataParallel) else job.model
    names = {parameter: name for name, parameter in inner.named_parameters()}
    tensors = {name: told_value(parameter.detach()) for parameter, name in names.items()}
    return {"model": tensors, **told(job.optimizer, cast("dict[torch.Tensor, str]", names))}


def trained(kind: str, name: str, run: str) -> dict[str, object]:
    start_new_job()
    job = build(kind, name)
    job.step(2)
    holdfast.save(run, job.state, 2, timeout_s=40)
    return everything(job)


def resumed(kind: str, name: str, run: str) -> tuple[dict[str, object], dict[str, object]]:
    """The state of a job that never stepped: after loading, and after one more step."""
    job = build(kind, name)
    holdfast.load(run, into=job.state, timeout_s=40)
    found = everything(job)
    job.step()
    return found, everything(job)


def gone_on(kind: str, name: str) -> dict[str, object]:
    """The state of a job that was never stopped."""
    job = build(kind, name)
    job.step(3)
    return everything(job)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_process_goes_on_as_if_it_had_not_stopped(tmp_path: Path, name: str) -> None:
    saved = trained("plain", name, str(tmp_path / "run"))
    assert resumed("plain", name, str(tmp_path / "run")) == (saved, gone_on("plain", name))


@pytest.mark.parametrize("name", ["adafactor", "lbfgs"])
def test_replicated_optimizers_come_back_on_more_ranks(tmp_path: Path, name: str) -> None:
    saved = run_ranks(2, trained, "ddp", name, str(tmp_path / "run"))
    assert saved[0] == saved[1]
    found = run_ranks(3, resumed, "ddp", name, str(tmp_path / "run"))
    assert [before for before, _ in found] == [saved[0]] * 3
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["adamw-foreach", "adamw-fused", "sgd-momentum", "lbfgs", "factored"])
@pytest.mark.few(2)
def test_sharded_optimizers_come_back_on_more_ranks_and_on_one(tmp_path: Path, name: str) -> None:
    run = str(tmp_path / "run")
    saved = run_ranks(2, trained, "fsdp", name, run)
    assert saved[0] == saved[1]
    found = run_ranks(3, resumed, "fsdp", name, run)
    assert [before for before, _ in found] == [saved[0]] * 3
    assert found[0] == found[1] == found[2]
    assert found[0][1] != saved[0]
    alone, _ = resumed("plain", name, run)
    assert alone == saved[0]


@pytest.mark.parametrize("name", ["factored", "lbfgs"])
def test_slots_of_a_plain_process_serve_a_sharded_job(tmp_path: Path, name: str) -> None:
    run = str(tmp_path / "run")
    saved = trained("plain", name, run)
    found = run_ranks(2, resumed, "fsdp", name, run)
    assert [before for before, _ in found] == [saved] * 2


# --- factors of sharded parameters -----------------------------------------------------------------------------------

#: Shape and placements of a parameter on a mesh of 2 x 2, a factor's shape, and how the factor is placed.
FACTORS: list[tuple[tuple[int, ...], list[Placement], tuple[int, ...], tuple[Placement, ...]]] = [
    ((5, 4), [Shard(0), Shard(1)], (5,), (Shard(0), Replicate())),
    ((5, 4), [Shard(0), Shard(1)], (4,), (Replicate(), Shard(0))),
    ((5, 4), [Shard(0), Shard(1)], (1, 4), (Replicate(), Shard(1))),
    ((5, 4), [Shard(0), Shard(0)], (5, 1), (Shard(0), Shard(0))),
    ((5, 4, 3), [Shard(2), Shard(1)], (5, 3), (Shard(1), Replicate())),
    ((4, 4), [Shard(0), Shard(1)], (4,), (Replicate(), Replicate())),  # a row's or a column's: nobody can tell
    ((5, 4), [Shard(0), Shard(1)], (20,), (Replicate(), Replicate())),
]


def save_factors(run: str) -> None:
    """Parameters and factors, counted up, from one plain process."""
    start_new_job()
    holdfast.save(run, factors(plain=True, content=1.0), 1, timeout_s=40)


def factors(*, plain: bool, content: float | None) -> dict[str, Any]:
    """The parameters of `FACTORS`; with `content` also the factors in their optimizer."""
    parameters = {}
    for index, (shape, placements, _, _) in enumerate(FACTORS):
        tensor = torch.zeros(shape)
        if not plain:
            tensor = distribute_tensor(tensor, init_device_mesh("cpu", (2, 2)), placements)
        parameters[f"p{index}"] = nn.Parameter(tensor)
    optimizer = SGD(parameters.values(), lr=0.1)
    if content is not None:
        for parameter, (_, _, shape, _) in zip(parameters.values(), FACTORS, strict=True):
            optimizer.state[parameter] = {"factor": torch.arange(torch.Size(shape).numel()).reshape(shape) + content}
    return {"parameters": parameters, "optimizer": optimizer}


def loaded_factors(run: str) -> list[tuple[tuple[Placement, ...], list[float]]]:
    """The placements and the content of the factors, loaded into a job that had none."""
    state = factors(plain=False, content=None)
    holdfast.load(run, into=state, timeout_s=40)
    found = [state["optimizer"].state[parameter]["factor"] for parameter in state["parameters"].values()]
    assert all(isinstance(factor, DTensor) for factor in found)
    return [(factor.placements, factor.full_tensor().flatten().tolist()) for factor in found]


def test_factors_are_sharded_along_the_axes_that_they_share_with_their_parameter(tmp_path: Path) -> None:
    save_factors(str(tmp_path / "run"))
    expected = [(placements, [1.0 + n for n in range(torch.Size(s).numel())]) for _, _, s, placements in FACTORS]
    assert run_ranks(4, loaded_factors, str(tmp_path / "run")) == [expected] * 4


# --- parameter groups over ranks -------------------------------------------------------------------------------------

Group = tuple[tuple[int, ...], dict[str, Any]]


def stage(groups: Sequence[Group], *, num_steps: int) -> Job:
    """A rank's layers, by group, with what drives each group."""
    layers = sorted(index for indexes, _ in groups for index in indexes)
    torch.manual_seed(sum(layers))
    model = nn.ModuleDict({f"layer{index}": nn.Linear(3, 2 + index) for index in layers})
    params = [
        {"params": [p for index in indexes for p in model[f"layer{index}"].parameters()], **hyper}
        for indexes, hyper in groups
    ]
    optimizer = AdamW(params, lr=0.5)
    for _ in range(num_steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().cos()
        optimizer.step()
    return Job(model, optimizer)


def save_stage(run: str, division: Sequence[Sequence[Group]]) -> dict[str, object]:
    start_new_job()
    job = stage(division[dist.get_rank() if dist.is_initialized() else 0], num_steps=2)
    holdfast.save(run, job.state, 2, timeout_s=40)
    return everything(job)


def load_stage(run: str, division: Sequence[Sequence[Group]]) -> dict[str, object]:
    job = stage(division[dist.get_rank() if dist.is_initialized() else 0], num_steps=0)
    report = holdfast.load(run, into=job.state, timeout_s=40)
    assert report.missing == report.unexpected == ()
    return everything(job)


def on_stages(
    task: Callable[[str, tuple[Sequence[Group], ...]], dict[str, object]], run: Path | str, *division: Sequence[Group]
) -> list[dict[str, object]]:
    """Save or load as a pipeline; each rank has its stage of the division."""
    return run_ranks(len(division), task, str(run), division)


def parts(told: Iterable[dict[str, object]], part: str) -> dict[str, object]:
    """The reports of ranks about different parameters, merged."""
    united: dict[str, object] = {}
    for rank in told:
        united.update(cast("dict[str, object]", rank[part]))
    return united


def rates(told: dict[str, object]) -> list[tuple[object, object]]:
    return [(group["lr"], group["weight_decay"]) for group in cast("list[dict[str, object]]", told["groups"])]


FAST = {"lr": 0.125, "weight_decay": 0.5, "betas": (0.5, 0.75)}
SLOW = {"lr": 0.0625, "weight_decay": 0.0}
OTHER = {"lr": 9.0}

#: The second stage has no parameter for the first group, the first stage has no third group.
STAGES: tuple[Sequence[Group], ...] = (((0,), FAST), ((1,), SLOW)), (((), FAST), ((2,), SLOW), ((3,), FAST))


def test_groups_of_pipeline_stages_unite_and_load_on_any_other_division(tmp_path: Path) -> None:
    saved = on_stages(save_stage, tmp_path / "run", *STAGES)
    fast, slow = (0.125, 0.5), (0.0625, 0.0)
    alone = load_stage(str(tmp_path / "run"), [[((0,), OTHER), ((1, 2), OTHER), ((3,), OTHER)]])
    assert rates(alone) == [fast, slow, fast]
    three = on_stages(
        load_stage, tmp_path / "run", [((0,), OTHER)], [((), OTHER), ((1, 2), OTHER)], [((), OTHER), ((3,), OTHER)]
    )
    assert [rates(rank) for rank in three] == [[fast], [fast, slow], [fast, fast]]
    for found in ([alone], three):
        assert parts(found, "slots") == parts(saved, "slots")
        assert parts(found, "model") == parts(saved, "model")


def test_other_groupings_load_by_name_when_hyper_parameters_agree(tmp_path: Path) -> None:
    saved = on_stages(save_stage, tmp_path / "run", *STAGES)
    joined = load_stage(str(tmp_path / "run"), [[((1,), {}), ((3, 0), {}), ((2,), {})]])
    assert rates(joined) == [(0.0625, 0.0), (0.125, 0.5), (0.0625, 0.0)]
    assert parts([joined], "slots") == parts(saved, "slots")
    with pytest.raises(RanksFailedError) as caught:
        on_stages(load_stage, tmp_path / "run", [((0, 1), {})], [((2,), {}), ((3,), {})])
    for error in caught.value.by_rank.values():
        assert isinstance(error, IncompatibleError)
        assert error.code == "incompatible.groups"
        assert "Group 0" in str(error)
        assert "lr" in str(error)


@pytest.mark.parametrize(
    ("first", "second", "path"),
    [
        ({"lr": 0.25}, {"lr": 0.125}, "optimizer/param_groups/1/lr"),
        ({"betas": (0.5, 0.75)}, {}, "optimizer/param_groups/1/betas/0"),
        ({"lr": torch.tensor(0.25), "foreach": False}, {"lr": 0.25, "foreach": False}, "optimizer/param_groups/1/lr"),
        ({"warmup": 3}, {}, "optimizer/param_groups/1"),
        ({}, {"warmup": 3}, "optimizer/param_groups/1"),
    ],
    ids=["value", "part", "kind", "key-on-the-first", "key-on-the-second"],
)
def test_a_group_that_is_driven_differently_on_two_ranks_is_refused(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], path: str
) -> None:
    with pytest.raises(RanksFailedError) as caught:
        on_stages(save_stage, tmp_path / "run", [((0,), FAST), ((1,), first)], [((2,), FAST), ((3,), second)])
    assert set(caught.value.by_rank) == {0, 1}
    for error in caught.value.by_rank.values():
        assert isinstance(error, StateError)
        assert (error.code, error.path) == ("state.diverged", path)
        assert "rank 0" in str(error)
        assert "rank 1" in str(error)


def test_rates_that_are_tensors_are_compared_too(tmp_path: Path) -> None:
    first, same, other, into = ({"lr": torch.tensor(rate), "foreach": False} for rate in (0.25, 0.25, 0.5, 0.75))
    alike = on_stages(save_stage, tmp_path / "alike", [((0,), first)], [((1,), same)])
    found = load_stage(str(tmp_path / "alike"), [[((0, 1), into)]])
    assert rates(found) == rates(alike[0]) == rates(alike[1])
    with pytest.raises(RanksFailedError, match="optimizer/param_groups/0/lr"):
        on_stages(save_stage, tmp_path / "differing", [((0,), first)], [((1,), other)])


def test_a_parameter_in_another_group_on_another_rank_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError) as caught:
        on_stages(save_stage, tmp_path / "run", [((0,), FAST), ((1,), SLOW)], [((), FAST), ((0, 1), SLOW)])
    for error in caught.value.by_rank.values():
        assert isinstance(error, StateError)
        assert error.code == "state.diverged"
        assert "layer0" in str(error)


def test_an_empty_group_that_the_checkpoint_lacks_is_driven_as_all_others_or_missing(tmp_path: Path) -> None:
    alike, mixed = str(tmp_path / "alike"), str(tmp_path / "mixed")
    save_stage(alike, [[((0,), FAST), ((1,), FAST)]])
    assert rates(load_stage(alike, [[((0, 1), {}), ((), {}), ((), SLOW)]])) == [(0.125, 0.5)] * 3
    save_stage(mixed, [[((0,), FAST), ((1,), SLOW)]])
    with pytest.raises(IncompatibleError, match=r"missing.*optimizer/param_groups/2/.*\blr\b"):
        load_stage(mixed, [[((0,), {}), ((1,), {}), ((), SLOW)]])


def save_scheduled(run: str, num_groups: int) -> list[float]:
    """Stages whose groups are alike in number share one scheduler's state."""
    start_new_job()
    job, scheduler = scheduled(num_groups)
    for _ in range(3):
        job.optimizer.step()
        scheduler.step()
    holdfast.save(run, {**job.state, "scheduler": scheduler}, 3, timeout_s=40)
    return [group["lr"] for group in job.optimizer.param_groups]


def load_scheduled(run: str, num_groups: int) -> list[float]:
    job, scheduler = scheduled(num_groups)
    holdfast.load(run, into={**job.state, "scheduler": scheduler}, timeout_s=40)
    assert scheduler.last_epoch == 3
    return cast("list[float]", scheduler.get_last_lr())


def scheduled(num_groups: int) -> tuple[Job, StepLR]:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = [index for index in range(6) if index * world_size // 6 == rank]
    groups = [
        (tuple(index for index in mine if index % num_groups == group), {"lr": 2.0**group})
        for group in range(num_groups)
    ]
    job = stage(groups, num_steps=0)
    return job, StepLR(job.optimizer, step_size=2, gamma=0.5)


def test_a_scheduler_over_stages_goes_on_with_other_stages(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert run_ranks(2, save_scheduled, run, 2) == [[0.5, 1.0]] * 2
    assert run_ranks(3, load_scheduled, run, 2) == [[0.5, 1.0]] * 3
    assert load_scheduled(run, 2) == [0.5, 1.0]


def test_lbfgs_state_of_another_first_parameter_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    cast("Any", optimizer).step(lambda: _loss_of(model, optimizer))
    holdfast.save(tmp_path / "run", {"model": model, "optimizer": optimizer}, 1)
    other = torch.optim.LBFGS([model.bias, model.weight])
    with pytest.raises(holdfast.IncompatibleError, match=r"incompatible\.optimizer.*'model/weight'.*'model/bias'"):
        holdfast.load(tmp_path / "run", {"model": model, "optimizer": other})


def _loss_of(model: torch.nn.Linear, optimizer: torch.optim.Optimizer) -> float:
    optimizer.zero_grad()
    loss = model(torch.ones(1, 3)).square().sum()
    loss.backward()
    return float(loss.item())


@pytest.mark.parametrize("kind", [AdamW, torch.optim.SparseAdam])
def test_a_count_of_steps_that_was_saved_as_a_number_goes_on_as_the_optimizer_counts(
    run: str, kind: type[AdamW | torch.optim.SparseAdam]
) -> None:
    """torch's Adam forgot what it added to a number: its next step, and all later ones, were its fifth."""

    def job(step: int | torch.Tensor) -> tuple[nn.Embedding, Optimizer]:
        model = nn.Embedding(3, 2, sparse=kind is torch.optim.SparseAdam)
        optimizer = kind(model.parameters())
        slots = {slot: torch.ones(3, 2) for slot in ("exp_avg", "exp_avg_sq")}
        optimizer.state[model.weight] = {"step": step, **slots}
        return model, optimizer

    model, optimizer = job(4)
    holdfast.save(run, {"model": model, "optimizer": optimizer}, 0)
    model, optimizer = job(0 if kind is torch.optim.SparseAdam else torch.tensor(0.0))
    holdfast.load(run, {"model": model, "optimizer": optimizer})
    for count in (5, 6):
        model(torch.tensor([0, 2])).sum().backward()
        optimizer.step()
        assert optimizer.state[model.weight]["step"] == count
    assert isinstance(optimizer.state[model.weight]["step"], torch.Tensor) == (kind is AdamW)
