"""The slots that an optimizer will make in its first step are known before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from holdfast import PerRank
from holdfast.frameworks import first_steps
from holdfast.state import expected_state as expected_state_module
from holdfast.state.expected_state import expected_state
from holdfast.state.flatten import flatten

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda found: torch.optim.SGD(found, lr=0.1),
    "SGD with momentum": lambda found: torch.optim.SGD(found, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": torch.optim.Adam,
    "Adam with amsgrad": lambda found: torch.optim.Adam(found, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW, fused": lambda found: torch.optim.AdamW(found, fused=True),
    "AdamW, foreach": lambda found: torch.optim.AdamW(found, foreach=True),
    "AdamW, rate in a tensor": lambda found: torch.optim.AdamW(found, lr=torch.tensor(0.1), foreach=False),
    "Adafactor": torch.optim.Adafactor,
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": torch.optim.Adagrad,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda found: torch.optim.RMSprop(found, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
}


class Doubled(torch.optim.AdamW):
    """A user's own optimizer, whose step must not run except in training."""

    num_steps = 0

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        Doubled.num_steps += 1
        super().step(closure)
        return None


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).to(torch.float32)


def train(state: dict[str, object]) -> None:
    module, optimizer = state["model"], state["optimizer"]
    assert isinstance(module, nn.Module)
    assert isinstance(optimizer, Optimizer)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def layouts(state: dict[str, object], *, predicted: bool) -> dict[str, object]:
    found = flatten(expected_state(state) if predicted else state, meta=predicted)
    return {name: tensor.layout for name, tensor in found.tensors.items()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_slots_of_the_first_step_are_predicted_by_name_shape_and_dtype(kind: str) -> None:
    module = model()
    state: dict[str, object] = {"model": module, "optimizer": OPTIMIZERS[kind](module.parameters())}
    predicted = layouts(state, predicted=True)
    train(state)
    assert predicted == layouts(state, predicted=False)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("kind", ["AdamW", "SGD with momentum"])
def test_slots_are_predicted_with_the_placements_of_their_parameters(kind: str) -> None:
    module = model().to(torch.bfloat16)
    fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
    state: dict[str, object] = {"model": module, "optimizer": OPTIMIZERS[kind](module.parameters())}
    predicted = layouts(state, predicted=True)
    train(state)
    assert predicted == layouts(state, predicted=False)


def test_a_prediction_changes_nothing_and_calls_no_hook() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a hook of the user's was called"))
    state: dict[str, object] = {"model": module, "nested": [{"optimizer": optimizer}]}
    before = [parameter.clone() for parameter in module.parameters()]
    assert len(layouts(state, predicted=True)) > len(layouts(state, predicted=False))
    assert not optimizer.state
    assert all(map(torch.equal, before, module.parameters()))
    assert all(parameter.grad is None for parameter in module.parameters())


def test_slots_that_exist_are_kept_and_frozen_parameters_get_none() -> None:
    module = model()
    state: dict[str, object] = {"model": module, "optimizer": torch.optim.AdamW(module.parameters())}
    for parameter in list(module.parameters())[:2]:
        parameter.requires_grad_(False)
    predicted = layouts(state, predicted=True)
    assert not [name for name in predicted if "state/model%2F0." in name or "state/model/0." in name]
    train(state)
    assert expected_state(state)["optimizer"] is state["optimizer"]


@pytest.mark.parametrize("kind", [Doubled, torch.optim.LBFGS])
def test_optimizers_whose_step_may_do_anything_are_left_alone(kind: Callable[..., Optimizer]) -> None:
    module = model()
    optimizer = kind(module.parameters())
    assert expected_state({"optimizer": optimizer})["optimizer"] is optimizer
    assert Doubled.num_steps == 0


class Loader:
    """As data loaders that start processes when they are asked for their state."""

    def state_dict(self) -> dict[str, object]:
        raise AssertionError("the state of a loader was asked for")

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise NotImplementedError


def test_objects_with_a_state_of_their_own_are_not_asked_for_it() -> None:
    state: dict[str, object] = {"loader": Loader(), "mine": PerRank(Loader()), "several": [Loader()]}
    assert not flatten(expected_state(state), meta=True).tensors


def test_thousands_of_groups_that_differ_in_their_rate_take_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # 4,000 groups of one parameter each took 3.4 s.
    steps = []
    after_a_step = first_steps.slots_after_a_step

    def counted(*arguments: Any) -> Any:
        steps.append(arguments)
        return after_a_step(*arguments)

    monkeypatch.setattr(expected_state_module, "slots_after_a_step", counted)
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": 0.1 + number} for number in range(20)]
    groups += [{"params": [nn.Parameter(torch.ones(2))], "momentum": 0.9 / (number + 1)} for number in range(20)]
    expected = expected_state({"optimizer": torch.optim.SGD(groups, lr=0.1)})["optimizer"]
    assert isinstance(expected, torch.optim.SGD)
    assert len(steps) == 2
    assert [len(expected.state[group["params"][0]]) for group in expected.param_groups] == [0] * 20 + [1] * 20
