"""State of an optimizer for parameters that had another shape or dtype, or were grouped otherwise, when it was saved.

torch checks none of it: fused steps write behind the end of a slot that is too short.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Optimizer

import holdfast
from holdfast import IncompatibleError
from tests.support.bound import assert_same


class Tagger(nn.Module):
    """A body, and a head with as many outputs as there are classes."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.head = nn.Linear(5, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


def of(num_classes: int, kind: Callable[..., Optimizer], *, seed: int = 0, **options: Any) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Tagger(num_classes)
    return {"model": model, "opt": kind(model.parameters(), **options)}


def step(state: dict[str, Any]) -> None:
    def closure() -> float:
        state["opt"].zero_grad()
        loss = state["model"](torch.ones(2, 6)).square().mean()
        loss.backward()
        return float(loss.detach())

    state["opt"].step(closure)


def saved(path: Path, kind: Callable[..., Optimizer], **options: Any) -> dict[str, Any]:
    state = of(3, kind, seed=1, **options)
    step(state)
    holdfast.save(path, state, 1)
    return state


KINDS = [
    pytest.param(AdamW, {}, id="adamw"),
    pytest.param(AdamW, {"fused": True}, id="fused"),
    pytest.param(SGD, {"lr": 0.1, "momentum": 0.5}, id="sgd"),
    pytest.param(Adafactor, {}, id="adafactor"),
    pytest.param(LBFGS, {}, id="lbfgs"),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_slots_of_a_head_with_other_classes_are_not_attached(
    kind: Callable[..., Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    saved(tmp_path / "run", kind, **options)
    into = of(40, kind, **options)
    before = into["model"].body.weight.detach().clone()
    with pytest.raises(IncompatibleError) as caught:
        holdfast.load(tmp_path / "run", into, select="!model/head.*")
    assert caught.value.code == "incompatible.slots"
    assert "strict=False" in str(caught.value)
    assert torch.equal(into["model"].body.weight, before)
    assert not into["opt"].state


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_load_that_is_not_strict_has_them_begin_anew(
    kind: Callable[..., Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    there = saved(tmp_path / "run", kind, **options)
    into = of(40, kind, **options)
    report = holdfast.load(tmp_path / "run", into, select="!model/head.*", strict=False)
    model, opt = into["model"], into["opt"]
    assert not opt.state.get(model.head.weight)
    if kind is not LBFGS:
        assert "opt/state/model/head.weight" in report.missing
        mine, theirs = opt.state[model.body.weight], there["opt"].state[there["model"].body.weight]
        assert_same({"slots": dict(sorted(mine.items()))}, {"slots": dict(sorted(theirs.items()))})
    for _ in range(2):
        step(into)


@pytest.mark.parametrize(("kind", "options"), KINDS[:3])
def test_so_it_is_where_the_parameters_were_not_saved(
    kind: Callable[..., Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    there = of(3, kind, seed=1, **options)
    step(there)
    holdfast.save(tmp_path / "run", there, 1, select="opt")
    into = of(40, kind, **options)
    with pytest.raises(IncompatibleError, match="strict=False") as caught:
        holdfast.load(tmp_path / "run", into, select="opt")
    assert caught.value.code == "incompatible.slots"


def test_slots_are_cast_with_their_parameter(tmp_path: Path) -> None:
    there = saved(tmp_path / "run", AdamW)
    into = of(3, AdamW)
    into["model"].to(torch.bfloat16)
    holdfast.load(tmp_path / "run", into, cast=True)
    slots = into["opt"].state[into["model"].body.weight]
    assert {key: value.dtype for key, value in slots.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    wanted = there["opt"].state[there["model"].body.weight]["exp_avg"].to(torch.bfloat16)
    assert torch.equal(slots["exp_avg"], wanted)
    for group in into["opt"].param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    into["opt"].step()


def test_slots_of_a_dtype_of_their_own_stay_when_the_parameter_is_cast(tmp_path: Path) -> None:
    there = of(3, AdamW, seed=1)
    there["model"].to(torch.bfloat16)
    parameter = there["model"].body.weight
    moments = {"exp_avg": torch.ones(5, 6), "exp_avg_sq": torch.ones(5, 6)}
    there["opt"].state[parameter] = {"step": torch.tensor(1.0), **moments}
    holdfast.save(tmp_path / "run", there, 1)
    into = of(3, AdamW)
    into["model"].to(torch.float16)
    holdfast.load(tmp_path / "run", into, cast=True)
    assert into["opt"].state[into["model"].body.weight]["exp_avg"].dtype is torch.float32


def in_groups(*decays: float) -> dict[str, Any]:
    model = Tagger(3)
    halves = [list(model.body.parameters()), list(model.head.parameters())]
    if len(decays) == 1:
        return {"model": model, "opt": AdamW(model.parameters(), weight_decay=decays[0])}
    groups = [{"params": half, "weight_decay": decay} for half, decay in zip(halves, decays, strict=True)]
    return {"model": model, "opt": AdamW(groups)}


def test_groups_that_are_new_do_not_lose_what_makes_them_differ(tmp_path: Path) -> None:
    there = in_groups(0.5)
    step(there)
    holdfast.save(tmp_path / "run", there, 1)
    into = in_groups(0.25, 0.0)
    with pytest.raises(IncompatibleError, match="weight_decay") as caught:
        holdfast.load(tmp_path / "run", into)
    assert caught.value.code == "incompatible.groups"
    assert [group["weight_decay"] for group in into["opt"].param_groups] == [0.25, 0.0]
    holdfast.load(tmp_path / "run", into, strict=False)
    assert [group["weight_decay"] for group in into["opt"].param_groups] == [0.5, 0.5]
    same = in_groups(0.125, 0.125)
    holdfast.load(tmp_path / "run", same)
    assert [group["weight_decay"] for group in same["opt"].param_groups] == [0.5, 0.5]
