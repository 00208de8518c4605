"""State of one class of optimizer for an optimizer of another: refused before anything is changed, both named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Adamax, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

import holdfast
from holdfast import IncompatibleError
from holdfast.mapping import Drop
from tests.support.bound import State, assert_same, bits
from tests.support.ranks import run_ranks

#: Makes a checkpoint look as those of versions that did not record the class.
UNRECORDED = [Drop("optimizer/class")]


class Renamed(AdamW):
    """As users derive optimizers: the state of its base under another name."""


def of_class(kind: Callable[..., Optimizer], seed: int = 0, **options: object) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    return {"model": model, "optimizer": kind(model.parameters(), lr=0.1 + seed, **options)}


def train(state: dict[str, Any]) -> None:
    for _ in range(2):
        state["optimizer"].zero_grad()
        state["model"](torch.ones(2, 4)).square().mean().backward()
        state["optimizer"].step()


def saved(path: Path, kind: Callable[..., Optimizer], **options: object) -> dict[str, Any]:
    state = of_class(kind, 1, **options)
    train(state)
    holdfast.save(path, state, 2)
    return state


def refused(path: Path, into: State, **options: Any) -> IncompatibleError:
    """The error of a load, which left `into` as it was."""
    model, optimizer = into["model"], into["optimizer"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, Optimizer)
    before = [bits(parameter.detach()) for parameter in model.parameters()], repr(optimizer.state_dict())
    with pytest.raises(IncompatibleError) as caught:
        holdfast.load(path, into, **options)
    assert caught.value.code == "incompatible.optimizer_class"
    assert before == ([bits(parameter.detach()) for parameter in model.parameters()], repr(optimizer.state_dict()))
    return caught.value


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("here", "there"), [(SGD, AdamW), (AdamW, SGD), (Adamax, Adam), (Adam, Adamax)])
def test_adamw_state_is_not_attached_to_sgd(
    here: type[Optimizer], there: type[Optimizer], strict: bool, tmp_path: Path
) -> None:
    saved(tmp_path / "run", there)
    error = refused(tmp_path / "run", of_class(here), strict=strict)
    assert f"of class {here.__name__} here" in str(error)
    assert f"of class {there.__name__} in the checkpoint" in str(error)


def test_the_precision_of_the_slots_of_another_class_was_taken_silently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An 8-bit optimizer of bitsandbytes trained on with slots of 32 bits, and nothing said so."""
    saved(tmp_path / "run", Adam)
    report = holdfast.load(tmp_path / "run", of_class(AdamW), strict=False)
    assert "optimizer/class" in report.missing
    assert (
        "optimizer 'optimizer' is of class AdamW here, and gets the state of Adam, with slots of float32" in caplog.text
    )
    caplog.clear()
    holdfast.load(tmp_path / "run", of_class(Adam), strict=False)
    assert caplog.text == ""


def test_the_error_says_what_each_of_the_two_has(tmp_path: Path) -> None:
    saved(tmp_path / "run", AdamW)
    error = refused(tmp_path / "run", of_class(SGD), strict=False)
    assert "slots exp_avg, exp_avg_sq, step" in str(error)
    assert "only here: dampening, momentum, nesterov" in str(error)
    assert 'select="!optimizer"' in str(error)
    into = of_class(SGD)
    assert holdfast.load(tmp_path / "run", into, select="!optimizer").loaded == ("model/bias", "model/weight")
    assert not into["optimizer"].state


@pytest.mark.parametrize("strict", [True, False])
def test_without_a_recorded_class_the_slots_are_named(strict: bool, tmp_path: Path) -> None:
    saved(tmp_path / "run", AdamW)
    error = refused(tmp_path / "run", of_class(SGD), strict=strict, mapping=UNRECORDED)
    assert "of class SGD here, but of another class in the checkpoint" in str(error)
    assert "exp_avg, exp_avg_sq, step" in str(error)


def test_slots_tell_classes_apart_that_have_the_same_hyper_parameters(tmp_path: Path) -> None:
    saved(tmp_path / "run", Adam)
    into = of_class(Adamax)
    train(into)
    for mapping in ([], UNRECORDED):
        error = refused(tmp_path / "run", into, strict=False, mapping=mapping)
        assert "slots only in the checkpoint: exp_avg_sq; only here: exp_inf" in str(error)


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_without_a_recorded_class_loads_as_before(strict: bool, tmp_path: Path) -> None:
    state, into = saved(tmp_path / "run", AdamW), of_class(AdamW)
    report = holdfast.load(tmp_path / "run", into, strict=strict, mapping=UNRECORDED)
    assert report.missing == report.unexpected == ()
    assert_same(state, into)


@pytest.mark.parametrize(("here", "there"), [(AdamW, Adam), (Adam, AdamW), (Renamed, AdamW), (AdamW, Renamed)])
def test_classes_that_share_their_state_exchange_it_when_that_is_said(
    here: type[Optimizer], there: type[Optimizer], tmp_path: Path
) -> None:
    state, into = saved(tmp_path / "run", there), of_class(here)
    error = refused(tmp_path / "run", into)
    assert f"load its state into {here.__name__} with strict=False" in str(error)
    report = holdfast.load(tmp_path / "run", into, strict=False)
    assert report.missing == ("optimizer/class",)
    assert "optimizer/class" in report.unexpected
    for mine, theirs in zip(into["model"].parameters(), state["model"].parameters(), strict=True):
        slots, others = into["optimizer"].state[mine], state["optimizer"].state[theirs]
        assert {key: bits(slots[key]) for key in slots} == {key: bits(others[key]) for key in others}
    assert into["optimizer"].param_groups[0]["lr"] == 1.1


def test_adamw_stays_adamw_with_the_moments_of_adam(tmp_path: Path) -> None:
    saved(tmp_path / "run", Adam)
    into = of_class(AdamW)
    flag = into["optimizer"].param_groups[0].get("decoupled_weight_decay")
    holdfast.load(tmp_path / "run", into, strict=False)
    assert into["optimizer"].param_groups[0].get("decoupled_weight_decay") is flag


def test_what_schedulers_options_and_versions_add_is_no_other_class(tmp_path: Path) -> None:
    state = of_class(AdamW, 1, amsgrad=True)
    LambdaLR(state["optimizer"], lambda epoch: 1.0)
    state["optimizer"].param_groups[0]["name"] = "all"
    train(state)
    holdfast.save(tmp_path / "run", state, 2)
    for mapping in ([], UNRECORDED):
        into = of_class(AdamW)
        train(into)
        older = Drop("optimizer/param_groups/*/fused")
        report = holdfast.load(tmp_path / "run", into, strict=False, mapping=[*mapping, older])
        assert report.missing == ("optimizer/param_groups/0/fused",)
        assert "max_exp_avg_sq" in into["optimizer"].state[into["model"].weight]


def _load_into_sgd(path: Path) -> str:
    return str(refused(path, of_class(SGD), strict=False))


def test_all_ranks_refuse_another_class_together(tmp_path: Path) -> None:
    saved(tmp_path / "run", AdamW)
    assert all("of class AdamW in the checkpoint" in text for text in run_ranks(2, _load_into_sgd, tmp_path / "run"))
