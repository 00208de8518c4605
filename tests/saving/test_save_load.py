"""Saving and loading in one plain process: whatever a training script holds comes back, bit for bit."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import holdfast
from holdfast import IncompatibleError
from tests.support.models import Net, bits, build, differing, filled, tensors, unwrapped


class Point(NamedTuple):
    x: float
    y: tuple[int, str]


class WithExtras(nn.Module):
    """A module with extra state, a buffer that is not saved, and one that is."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), float(calls)))
        self.register_buffer("cache", torch.full((2,), float(calls)), persistent=False)
        self.register_buffer("mean", torch.full((2,), float(calls), dtype=torch.float64))
        self.calls = calls

    def get_extra_state(self) -> dict[str, object]:
        return {"calls": self.calls, "histogram": torch.arange(self.calls)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]
        assert torch.equal(state["histogram"], torch.arange(self.calls))


class Training:
    """A small but whole training loop: dropout, data order and learning rate all go on from what was loaded."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1))
        self.optimizer = AdamW(self.model.parameters(), lr=0.02, weight_decay=0.1, amsgrad=True)
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=20)
        self.data = torch.Generator().manual_seed(7)
        self.progress: dict[str, object] = {"losses": []}

    @property
    def state(self) -> dict[str, object]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.data,
            "progress": self.progress,
        }

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            batch = torch.randn(5, 6, generator=self.data)
            loss = self.model(batch).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            cast("list[float]", self.progress["losses"]).append(loss.item())


def step_once(optimizer: Optimizer, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def same(ours: object, theirs: object) -> bool:
    """Whether two nested states are of the same types and bit for bit the same."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return (
            ours.dtype == theirs.dtype and ours.shape == theirs.shape and bits(ours).tobytes() == bits(theirs).tobytes()
        )
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return repr(ours) == repr(theirs)


def same_state(ours: Optimizer, theirs: Optimizer) -> bool:
    """Whether two optimizers hold the same slots of the same parameters, in whatever order, and the same groups."""
    mine, other = ours.state_dict(), theirs.state_dict()
    slots = {n: dict(sorted(s.items())) for n, s in sorted(mine["state"].items())}
    other_slots = {n: dict(sorted(s.items())) for n, s in sorted(other["state"].items())}
    return same(slots, other_slots) and same(mine["param_groups"], other["param_groups"])


@pytest.mark.parametrize("num_steps", [0, 1], ids=["into-a-fresh-optimizer", "into-one-that-has-stepped"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_job_comes_back_bit_for_bit(tmp_path: Path, seed: int, num_steps: int) -> None:
    holdfast.save(tmp_path / "run", filled("plain", seed).state, 40)
    job = build("plain", num_steps=num_steps)
    assert differing(job, seed)
    report = holdfast.load(tmp_path / "run", into=job.state)
    assert differing(job, seed) == []
    names = {name for name, _, _ in tensors(job)}
    assert report.step == 40
    assert report.missing == report.unexpected == ()
    assert names <= set(report.loaded)
    assert {"progress/epoch", "progress/seen/1/0", "scheduler/last_epoch"} <= set(report.loaded)
    assert sum(job_tensor.nbytes for _, job_tensor, _ in tensors(job)) == report.needed_nbytes


def test_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path) -> None:
    uninterrupted = Training()
    first = Training()
    first.model.load_state_dict(uninterrupted.model.state_dict())
    uninterrupted.run(9)
    first.run(4)
    holdfast.save(tmp_path / "run", first.state, 4)
    first.run(3)  # is lost
    second = Training()
    holdfast.load(tmp_path / "run", into=second.state)
    second.run(5)
    assert same(second.model.state_dict(), uninterrupted.model.state_dict())
    assert same_state(second.optimizer, uninterrupted.optimizer)
    assert same(second.scheduler.state_dict(), uninterrupted.scheduler.state_dict())
    assert second.progress == uninterrupted.progress
    assert torch.equal(second.data.get_state(), uninterrupted.data.get_state())


def test_the_job_that_saved_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    quiet, saving = Training(), Training()
    saving.model.load_state_dict(quiet.model.state_dict())
    for step in range(3):
        quiet.run(1)
        saving.run(1)
        holdfast.save(tmp_path / "run", saving.state, step)
    assert same(saving.model.state_dict(), quiet.model.state_dict())
    assert same_state(saving.optimizer, quiet.optimizer)


def test_tensors_keep_their_identity_and_tuples_are_rebuilt(tmp_path: Path) -> None:
    saved = {"job": filled("plain", 3).state, "pair": (torch.arange(4), [5, 6])}
    holdfast.save(tmp_path / "run", saved, 1)
    job = build("plain")
    ours = torch.zeros(4, dtype=torch.int64)
    numbers = [0]
    into: dict[str, Any] = {"job": job.state, "pair": (ours, numbers)}
    before = {name: (tensor, tensor.data_ptr()) for name, tensor, _ in tensors(job)}
    seen, model, scheduler = job.progress["seen"], job.model, job.scheduler
    report = holdfast.load(tmp_path / "run", into=into)
    after = {name: (tensor, tensor.data_ptr()) for name, tensor, _ in tensors(job)}
    assert all(after[name][0] is before[name][0] and after[name][1] == before[name][1] for name in before)
    assert report.state is into
    assert into["job"]["model"] is model
    assert into["job"]["scheduler"] is scheduler
    assert into["job"]["progress"] is job.progress
    assert job.progress["seen"] is seen
    assert into["pair"][0] is ours
    assert into["pair"][1] is numbers
    assert same((ours, numbers), saved["pair"])
    assert all(p in set(job.model.parameters()) for group in job.optimizer.param_groups for p in group["params"])


def two_models(seed: int) -> dict[str, Any]:
    """A generator and a discriminator; the second optimizer also trains the first layer of the generator."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    discriminator = nn.Linear(2, 1)
    first = AdamW(generator[1].parameters(), lr=0.1 * seed)
    second = SGD([*discriminator.parameters(), *generator[0].parameters()], lr=0.2 * seed, momentum=0.9)
    state = {"g": generator, "d": discriminator, "optimizers": {"g": first, "d": second}}
    step_once(first, seed)
    step_once(second, seed)
    return state


def test_optimizers_find_their_parameters_by_identity_in_any_model(tmp_path: Path) -> None:
    saved, into = two_models(1), two_models(2)
    holdfast.save(tmp_path / "run", saved, 1)
    holdfast.load(tmp_path / "run", into=into)
    for name in ("g", "d"):
        assert same(into[name].state_dict(), saved[name].state_dict())
        assert same_state(into["optimizers"][name], saved["optimizers"][name])
    names = holdfast.open(tmp_path / "run").names()
    assert "optimizers/d/state/g/0.weight/momentum_buffer" in names
    assert "optimizers/g/state/g/1.weight/exp_avg" in names


def tied(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.ModuleDict({"embed": nn.Embedding(7, 3), "head": nn.Linear(3, 7, bias=False)})
    cast("nn.Linear", model["head"]).weight = cast("nn.Embedding", model["embed"]).weight
    optimizer = AdamW(model.parameters(), lr=0.1)
    step_once(optimizer, seed)
    return {"model": model, "optimizer": optimizer}


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    saved, into = tied(1), tied(2)
    report = holdfast.save(tmp_path / "run", saved, 1)
    holdfast.load(tmp_path / "run", into=into)
    assert same(into["model"].state_dict(), saved["model"].state_dict())
    assert same_state(into["optimizer"], saved["optimizer"])
    assert into["model"]["head"].weight is into["model"]["embed"].weight
    view = holdfast.open(tmp_path / "run")
    assert report.num_tensors == len(view.names()) == 4
    assert view.aliases == {"model/head.weight": "model/embed.weight"}


def test_tied_weights_cannot_be_filled_from_two_different_ones(tmp_path: Path) -> None:
    untied = tied(1)
    untied["model"]["head"].weight = nn.Parameter(torch.zeros(7, 3))
    untied["optimizer"] = AdamW(untied["model"].parameters())
    holdfast.save(tmp_path / "run", untied, 1)
    with pytest.raises(IncompatibleError, match="one tensor here, but stored separately") as raised:
        holdfast.load(tmp_path / "run", into=tied(2))
    assert raised.value.code == "incompatible.tied"


def mixed_precision(seed: int, *, num_steps: int) -> dict[str, Any]:
    """bf16 weights whose optimizer state is fp32, as a training loop with its own master state keeps it."""
    torch.manual_seed(seed)
    model = nn.Linear(5, 3).to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=0.1, foreach=False)
    for _ in range(num_steps):
        step_once(optimizer, seed)
        for parameter, slots in optimizer.state.items():
            for slot in ("exp_avg", "exp_avg_sq"):
                slots[slot] = torch.randn(parameter.shape)  # has bits that bf16 has not
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("num_steps", [0, 1])
def test_state_of_another_dtype_than_its_parameter_is_not_cast(tmp_path: Path, num_steps: int) -> None:
    saved, into = mixed_precision(1, num_steps=1), mixed_precision(2, num_steps=num_steps)
    holdfast.save(tmp_path / "run", saved, 1)
    holdfast.load(tmp_path / "run", into=into)
    assert same(into["model"].state_dict(), saved["model"].state_dict())
    assert same_state(into["optimizer"], saved["optimizer"])
    assert into["optimizer"].state[into["model"].weight]["exp_avg"].dtype == torch.float32


def partly_frozen(seed: int) -> dict[str, Any]:
    """One parameter frozen and unknown to the optimizer, one frozen in a group: it never gets state."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    optimizer = AdamW([*model[1].parameters(), *model[2].parameters()], lr=0.1)
    step_once(optimizer, seed)
    return {"model": model, "optimizer": optimizer}


def test_frozen_parameters_come_back_and_stay_without_state(tmp_path: Path) -> None:
    saved, into = partly_frozen(1), partly_frozen(2)
    holdfast.save(tmp_path / "run", saved, 1)
    holdfast.load(tmp_path / "run", into=into)
    assert same(into["model"].state_dict(), saved["model"].state_dict())
    assert same_state(into["optimizer"], saved["optimizer"])
    assert into["model"][1].weight not in into["optimizer"].state
    assert not into["model"][0].weight.requires_grad


@pytest.mark.parametrize("num_steps", [0, 2])
def test_momentum_comes_back(tmp_path: Path, num_steps: int) -> None:
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    saved, into = SGD(model.parameters(), lr=0.1, momentum=0.9), SGD(other.parameters(), lr=0.1, momentum=0.9)
    step_once(saved, 1)
    for seed in range(num_steps):
        step_once(into, seed)
    holdfast.save(tmp_path / "run", {"model": model, "optimizer": saved}, 1)
    holdfast.load(tmp_path / "run", into={"model": other, "optimizer": into})
    assert same_state(into, saved)
    step_once(saved, 5)
    step_once(into, 5)
    assert same(other.state_dict(), model.state_dict())


def test_a_checkpoint_from_before_the_first_step_takes_live_state_away(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", build("plain", num_steps=0, seed=1).state, 0)
    job = build("plain", num_steps=3)
    assert job.optimizer.state
    holdfast.load(tmp_path / "run", into=job.state)
    assert not job.optimizer.state
    assert job.optimizer.param_groups[1]["lr"] == 1.5
    job.optimizer.zero_grad()
    step_once(job.optimizer, 1)
    assert len(job.optimizer.state) == len(list(job.model.parameters()))


def test_hyper_parameters_come_back_for_each_group(tmp_path: Path) -> None:
    job = build("plain")
    first, second = job.optimizer.param_groups
    first.update(lr=0.125, betas=(0.25, 0.75), weight_decay=0.0, note="decayed")
    second.update(lr=torch.tensor(0.0625), eps=1e-3)
    holdfast.save(tmp_path / "run", job.state, 1)
    other = build("plain", seed=4)
    other.optimizer.param_groups[0]["note"] = ""
    other.optimizer.param_groups[1]["lr"] = torch.tensor(9.0)
    holdfast.load(tmp_path / "run", into=other.state)
    assert same_state(other.optimizer, job.optimizer)
    assert other.optimizer.param_groups[0]["betas"] == (0.25, 0.75)
    assert other.optimizer.param_groups[1]["lr"].item() == 0.0625


def test_groups_may_be_cut_differently_when_their_hyper_parameters_agree(tmp_path: Path) -> None:
    model, other = nn.Linear(4, 2), nn.Linear(4, 2)
    saved = AdamW(model.parameters(), lr=0.5)
    step_once(saved, 1)
    holdfast.save(tmp_path / "run", {"model": model, "optimizer": saved}, 1)
    groups: list[dict[str, Any]] = [{"params": [other.bias]}, {"params": [other.weight]}]
    into = AdamW(groups, lr=0.1)
    holdfast.load(tmp_path / "run", into={"model": other, "optimizer": into})
    assert [group["lr"] for group in into.param_groups] == [0.5, 0.5]
    for name in ("weight", "bias"):
        ours, theirs = into.state[getattr(other, name)], saved.state[getattr(model, name)]
        assert same(dict(sorted(ours.items())), dict(sorted(theirs.items())))


def test_values_of_all_types_come_back_as_what_they_were(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "none": None,
        "flags": [True, False],
        "ints": [0, -1, 2**63, -(2**200)],
        "floats": [0.1, -0.0, math.inf, -math.inf, math.nan],
        "complex": 1 - 2j,
        "text": "a/b%@ \u00e9",
        "bytes": b"\0\xff",
        "tuple": (1, (2, [3, ()])),
        "keys": {1: "int", "1": "str", None: 0, 1.5: "float", False: "bool", b"x": "bytes", "": "empty", "a/b": 1},
        "ordered": OrderedDict(z=1, a=2),
        "counter": Counter("banana"),
        "point": Point(0.5, (3, "y")),
        "numpy": [np.float32(0.1), np.int8(-3), np.bool_(True), np.datetime64("2024-02-29")],
        "torch": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 0])],
        "empty": {"dict": {}, "list": [], "tuple": ()},
        "deep": {"tensors": [{"a": torch.tensor([1.5, -2.5])}, (torch.tensor(7, dtype=torch.uint8),)]},
    }
    holdfast.save(tmp_path / "run", values, 1)
    blank: dict[str, Any] = {
        name: type(value)() if isinstance(value, dict | list) else None for name, value in values.items()
    }
    blank.update(
        text="",
        bytes=b"",
        complex=0j,
        tuple=(),
        point=Point(0.0, (0, "")),
        keys=dict.fromkeys(values["keys"]),
        ordered=OrderedDict(z=0, a=0),
        empty={"dict": {}, "list": [0], "tuple": ()},
        deep={"tensors": [{"a": torch.zeros(2)}, (torch.tensor(0, dtype=torch.uint8),)]},
    )
    report = holdfast.load(tmp_path / "run", into=blank)
    assert report.state is blank
    for name, value in values.items():
        assert same(blank[name], value), name


TENSORS = {
    "bool": torch.tensor([True, False, True]),
    "int8": torch.tensor([-128, 127], dtype=torch.int8),
    "uint16": torch.tensor([65535, 1], dtype=torch.uint16),
    "int64": torch.tensor([[-(2**63), 2**63 - 1]]),
    "negative-scalar": torch.tensor(-7, dtype=torch.int32),
    "float16": torch.tensor([1.5, -0.0, math.nan], dtype=torch.float16),
    "bfloat16": torch.tensor([[3.0], [-1e30]], dtype=torch.bfloat16),
    "float8": torch.tensor([0.5, -448.0]).to(torch.float8_e4m3fn),
    "float64-scalar": torch.tensor(-math.pi, dtype=torch.float64),
    "complex64": torch.tensor([1 + 2j, -3j]),
    "complex128-scalar": torch.tensor(-1 + 2j, dtype=torch.complex128),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "strided": torch.arange(24, dtype=torch.int16).reshape(4, 6)[::2, 1::2],
    "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_of_all_dtypes_and_strides_come_back(tmp_path: Path, name: str) -> None:
    tensor = TENSORS[name]
    holdfast.save(tmp_path / "run", {"tensor": tensor, "list": [tensor.clone()]}, 1)
    rows = torch.zeros(tensor.shape, dtype=tensor.dtype)
    columns = torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).permute(list(range(tensor.ndim))[::-1])
    holdfast.load(tmp_path / "run", into={"tensor": columns, "list": [rows]})
    assert same(rows, tensor)
    assert same(columns, tensor)


def test_extra_state_comes_back_and_passing_buffers_are_left_alone(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": nn.ModuleList([WithExtras(3), WithExtras(4)])}, 1)
    into = nn.ModuleList([WithExtras(0), WithExtras(1)])
    holdfast.load(tmp_path / "run", into={"model": into})
    first, second = cast("list[WithExtras]", list(into))
    assert (first.calls, second.calls) == (3, 4)
    assert cast("torch.Tensor", first.mean).tolist() == [3.0, 3.0]
    assert cast("torch.Tensor", second.cache).tolist() == [1.0, 1.0]


def test_a_model_from_meta_that_was_given_memory_is_filled(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": (saved := Net())}, 1)
    with torch.device("meta"):
        model = Net()
    holdfast.load(tmp_path / "run", into={"model": model.to_empty(device="cpu")})
    assert same(unwrapped(model).state_dict(), saved.state_dict())
