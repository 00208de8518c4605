"""Optimizer state that has the elements of all parameters in a row: their order is stored, and compared in a load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, AdamW, Optimizer

import holdfast
from holdfast import IncompatibleError
from holdfast.frameworks import optimizer as adapter
from holdfast.mapping import Rename, Transpose
from tests.support.bound import bits


class SharedMomentum(Optimizer):
    """One flat momentum of all parameters, under a key that is no parameter."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        parameters = [each for group in self.param_groups for each in group["params"]]
        gradient = torch.cat([each.grad.reshape(-1) for each in parameters])
        kept: Any = self.state
        kept["momentum"] = gradient + 0.9 * kept.get("momentum", torch.zeros_like(gradient))
        for each, part in zip(parameters, kept["momentum"].split([each.numel() for each in parameters]), strict=True):
            each.sub_(self.param_groups[0]["lr"] * part.view_as(each))


def model(names: str = "abc") -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.Linear(3, 3, bias=False) for name in names})


def flat(state: dict[str, Any]) -> bytes:
    """The bits of a tensor of the state that has the elements of all parameters."""
    optimizer = state["optimizer"]
    kept = optimizer.state["momentum"] if "momentum" in optimizer.state else next(iter(optimizer.state.values()))["d"]
    return bits(kept)


def state(kind: type[Optimizer], order: str = "abc", *, num_steps: int = 0) -> dict[str, Any]:
    layers = model("".join(sorted({*"abc", *order})))
    build: Any = kind
    optimizer = build([layers[name].weight for name in order])

    def closure() -> float:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = layers["c"](layers["b"](layers["a"](torch.ones(1, 3)))).square().sum()
            loss.backward()
        return float(loss.item())

    for _ in range(num_steps):
        closure()
        optimizer.step(closure)
    return {"model": layers, "optimizer": optimizer}


@pytest.mark.parametrize("kind", [LBFGS, SharedMomentum])
@pytest.mark.parametrize("strict", [True, False])
def test_flat_state_of_parameters_in_another_order_after_the_first_is_refused(
    kind: type[Optimizer], strict: bool, tmp_path: Path
) -> None:
    holdfast.save(tmp_path / "run", state(kind, num_steps=2), 1)
    into = state(kind, "acb")
    before = [bits(each.detach()) for each in into["model"].parameters()]
    with pytest.raises(IncompatibleError, match=r"incompatible\.optimizer.*'model/c\.weight'.*was parameter 2"):
        holdfast.load(tmp_path / "run", into, strict=strict)
    assert [bits(each.detach()) for each in into["model"].parameters()] == before
    assert not into["optimizer"].state


@pytest.mark.parametrize("kind", [LBFGS, SharedMomentum])
@pytest.mark.parametrize(("saved", "live"), [("abc", "ab"), ("ab", "abc"), ("abc", "abz")])
def test_flat_state_of_other_parameters_is_refused_in_a_lenient_load_too(
    kind: type[Optimizer], saved: str, live: str, tmp_path: Path
) -> None:
    """Its next step failed: the sizes of its vectors did not fit."""
    holdfast.save(tmp_path / "run", state(kind, saved, num_steps=2), 1)
    into = state(kind, live)
    text = rf"has {len(live)} parameters here, 2 of them among the {len(saved)} parameters that it had"
    with pytest.raises(IncompatibleError, match=text) as caught:
        holdfast.load(tmp_path / "run", into, strict=False)
    assert caught.value.code == "incompatible.optimizer"
    assert not into["optimizer"].state
    holdfast.load(tmp_path / "run", into, strict=False, select="!optimizer")


@pytest.mark.parametrize("kind", [LBFGS, SharedMomentum])
def test_an_optimizer_of_other_parameters_that_had_no_flat_state_yet_loads(
    kind: type[Optimizer], tmp_path: Path
) -> None:
    saved, into = state(kind), state(kind, "ab")
    holdfast.save(tmp_path / "run", saved, 1)
    holdfast.load(tmp_path / "run", into, strict=False)
    assert bits(into["model"]["a"].weight) == bits(saved["model"]["a"].weight)
    assert not into["optimizer"].state


@pytest.mark.parametrize("kind", [LBFGS, SharedMomentum])
def test_flat_state_loads_in_its_own_order(kind: type[Optimizer], tmp_path: Path) -> None:
    trained, into = state(kind, "cab", num_steps=2), state(kind, "cab")
    report = holdfast.save(tmp_path / "run", trained, 1)
    holdfast.load(tmp_path / "run", into)
    assert holdfast.open(tmp_path / "run").value("optimizer/order/model%2Fc.weight") == 0
    assert report.num_tensors > 3
    assert flat(into) == flat(trained)


def test_a_checkpoint_without_the_order_of_flat_state_loads_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "describe_order", lambda *_: None)
    holdfast.save(tmp_path / "run", state(LBFGS, num_steps=1), 1)
    into = state(LBFGS, "acb")
    report = holdfast.load(tmp_path / "run", into)
    assert not report.missing
    assert len(into["optimizer"].state) == 1


def test_state_per_parameter_stores_no_order_and_loads_in_another(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", state(AdamW, num_steps=1), 1)
    assert not [name for name in holdfast.open(tmp_path / "run").names() if "/order" in name]
    holdfast.load(tmp_path / "run", state(AdamW, "bca"))


def test_the_order_of_flat_state_follows_a_rename_and_no_other_rule(tmp_path: Path) -> None:
    trained = state(LBFGS, num_steps=2)
    holdfast.save(tmp_path / "run", trained, 1)
    into = state(LBFGS)
    into["model"] = nn.ModuleDict({"x": into["model"]["b"], "a": into["model"]["a"], "c": into["model"]["c"]})
    holdfast.load(tmp_path / "run", into, mapping=[Rename("model/b.weight", "model/x.weight")])
    assert flat(into) == flat(trained)
    with pytest.raises(IncompatibleError, match=r"incompatible\.optimizer.*'model/b\.weight'"):
        holdfast.load(tmp_path / "run", state(LBFGS), mapping=[Transpose("model/b.weight")])
