"""Slots that the next step of an optimizer needs, and that a load would leave out: the load is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import SGD, Adadelta, Adafactor, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop

import holdfast
from holdfast import IncompatibleError
from holdfast.frameworks.first_steps import NeededSlots
from holdfast.mapping import Cast, Drop, Rename, Rule
from tests.support.ranks import run_ranks

State = dict[str, Any]


class Derived(Adam):
    """As users derive optimizers: with the steps of torch."""


class OwnSteps(Adam):
    """An optimizer whose steps may do anything."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def trained(kind: Callable[..., Optimizer], *, seed: int = 0, steps: int = 2, **options: Any) -> State:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    state: State = {"model": model, "optimizer": kind(model.parameters(), lr=0.1, **options)}
    for _ in range(steps):
        step(state)
    return state


def step(state: State) -> None:
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


CASES: list[Any] = [
    pytest.param(AdamW, "step", {}, id="AdamW"),
    pytest.param(AdamW, "max_exp_avg_sq", {"amsgrad": True}, id="amsgrad"),
    pytest.param(Derived, "exp_avg", {}, id="subclass"),
    pytest.param(Adamax, "exp_inf", {}, id="Adamax"),
    pytest.param(NAdam, "mu_product", {}, id="NAdam"),
    pytest.param(RMSprop, "grad_avg", {"centered": True}, id="RMSprop"),
    pytest.param(Adadelta, "acc_delta", {}, id="Adadelta"),
    pytest.param(Adagrad, "step", {}, id="Adagrad"),
    pytest.param(Adafactor, "row_var", {}, id="Adafactor"),
]


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh", "stepped"])
@pytest.mark.parametrize(("kind", "slot", "options"), CASES)
def test_a_rule_that_drops_step_does_not_lead_to_a_keyerror_in_the_next_step(
    tmp_path: Path, kind: Callable[..., Optimizer], slot: str, options: dict[str, Any], steps: int
) -> None:
    holdfast.save(tmp_path / "run", trained(kind, **options), 0)
    into = trained(kind, seed=1, steps=steps, **options)
    before = repr(into["optimizer"].state_dict())
    for strict in (True, False):
        with pytest.raises(IncompatibleError, match=rf"its steps need the slots {slot} too, beside ") as caught:
            holdfast.load(tmp_path / "run", into, mapping=[Drop(f"optimizer/state/**/{slot}")], strict=strict)
        assert caught.value.code == "incompatible.needed_slots"
        assert repr(into["optimizer"].state_dict()) == before
    if kind is not Adagrad:  # Adagrad makes its slots when it is built, and none in a step
        holdfast.load(tmp_path / "run", into, mapping=[Drop("optimizer/state/**")])
        assert not any(into["optimizer"].state.values())
        step(into)


@pytest.mark.parametrize(
    ("stored", "live"), [({"amsgrad": True}, {}), ({}, {"amsgrad": True}), ({}, {"foreach": True})], ids=repr
)
def test_options_of_the_checkpoint_tell_which_slots_are_needed(
    tmp_path: Path, stored: dict[str, Any], live: dict[str, Any]
) -> None:
    holdfast.save(tmp_path / "run", trained(AdamW, **stored), 0)
    for steps in (0, 1):
        into = trained(AdamW, seed=1, steps=steps, **live)
        holdfast.load(tmp_path / "run", into)
        step(into)


def test_slots_that_a_step_makes_anew_may_be_dropped(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", trained(SGD, momentum=0.9), 0)
    into = trained(SGD, seed=1, momentum=0.9)
    holdfast.load(tmp_path / "run", into, mapping=[Drop("optimizer/state/**/momentum_buffer")])
    step(into)
    buffers = [into["optimizer"].state[each]["momentum_buffer"] for each in into["model"].parameters()]
    assert all(torch.equal(buffer, torch.ones_like(buffer)) for buffer in buffers)  # that of a first step


def test_an_adagrad_without_its_slots_is_refused(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", trained(Adagrad), 0)
    with pytest.raises(IncompatibleError, match=r"need the slots step, sum too, beside none in the checkpoint"):
        holdfast.load(tmp_path / "run", trained(Adagrad, seed=1), mapping=[Drop("optimizer/state/**")])


@pytest.mark.parametrize("strict", [True, False])
def test_an_adagrad_with_a_group_that_was_added_later_takes_its_own_checkpoint(tmp_path: Path, strict: bool) -> None:
    """Such a group has no slots, in torch either, and needs none while it is frozen: its resume was refused."""

    def grown() -> State:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model[0].requires_grad_(requires_grad=False)
        optimizer = Adagrad(model[1].parameters(), lr=0.1)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        return {"model": model, "optimizer": optimizer}

    saved, into = grown(), grown()
    saved["model"](torch.ones(1, 3)).sum().backward()
    saved["optimizer"].step()
    holdfast.save(tmp_path / "run", saved, 0)
    holdfast.load(tmp_path / "run", into, strict=strict)
    assert repr(into["optimizer"].state_dict()) == repr(saved["optimizer"].state_dict())
    into["model"](torch.ones(1, 3)).sum().backward()
    into["optimizer"].step()


def test_nothing_is_known_about_steps_of_a_users_own() -> None:
    parameter = nn.Parameter(torch.ones(2))
    held = [(parameter, ["sum"])]
    known = {kind: NeededSlots(kind([parameter])).lacking({"params": []}, held) for kind in (OwnSteps, Adagrad)}
    assert known == {OwnSteps: [frozenset()], Adagrad: [{"step"}]}


def test_a_rule_that_drops_a_part_of_the_slots_of_an_own_class_is_refused_unless_the_load_is_lenient(
    tmp_path: Path,
) -> None:
    """Its next step raised a KeyError."""
    holdfast.save(tmp_path / "run", trained(OwnSteps), 0)
    into = trained(OwnSteps, seed=1, steps=0)
    rules = [Drop("optimizer/state/**/step")]
    with pytest.raises(IncompatibleError, match=r"a rule drops its slots step beside exp_avg, exp_avg_sq") as caught:
        holdfast.load(tmp_path / "run", into, mapping=rules)
    assert caught.value.code == "incompatible.needed_slots"
    assert "pass strict=False" in caught.value.action
    assert not into["optimizer"].state
    holdfast.load(tmp_path / "run", into, mapping=[Drop("optimizer/state/**")])
    step(into)
    holdfast.load(tmp_path / "run", into, mapping=rules, strict=False)
    assert [sorted(slots) for slots in into["optimizer"].state.values()] == [["exp_avg", "exp_avg_sq"]] * 2


def test_dropped_slots_are_known_by_the_names_that_later_rules_give(tmp_path: Path) -> None:
    saved = trained(OwnSteps)
    holdfast.save(tmp_path / "run", {"net": saved["model"], "adam": saved["optimizer"]}, 0)
    rules: list[Rule] = [Drop("adam/state/**/exp_avg"), Rename("net", "model"), Rename("adam", "optimizer")]
    for into in (trained(OwnSteps, seed=1), trained(OwnSteps, seed=1, steps=0)):
        with pytest.raises(IncompatibleError, match=r"a rule drops its slots exp_avg beside exp_avg_sq, step"):
            holdfast.load(tmp_path / "run", into, mapping=rules)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(("kind", "options"), [(AdamW, {}), (AdamW, {"amsgrad": True}), (NAdam, {}), (Derived, {})])
def test_slots_in_a_dtype_that_the_next_step_does_not_take_are_refused(
    tmp_path: Path, kind: Callable[..., Optimizer], options: dict[str, Any], strict: bool
) -> None:
    holdfast.save(tmp_path / "run", trained(kind, **options), 0)
    into = trained(kind, seed=1, steps=0, **options)
    with pytest.raises(IncompatibleError, match="its next step fails, because a cast leaves its slots") as caught:
        holdfast.load(tmp_path / "run", into, mapping=[Cast("optimizer/state/**", "float64")], strict=strict)
    assert caught.value.code == "incompatible.slot_dtype"
    assert not into["optimizer"].state


def test_slots_in_another_dtype_are_taken_where_steps_take_them(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "sgd", trained(SGD, momentum=0.9), 0)
    into = trained(SGD, seed=1, steps=0, momentum=0.9)
    holdfast.load(tmp_path / "sgd", into, mapping=[Cast("optimizer/state/**", "float64")])
    step(into)
    assert {slots["momentum_buffer"].dtype for slots in into["optimizer"].state.values()} == {torch.float64}


@pytest.mark.parametrize("steps", [0, 1])
def test_a_rule_casts_a_model_and_all_its_slots(tmp_path: Path, steps: int) -> None:
    holdfast.save(tmp_path / "run", trained(AdamW), 0)
    into = trained(AdamW, seed=1, steps=0)
    into["model"].double()
    for _ in range(steps):
        step(into)
    with pytest.raises(IncompatibleError, match=r"incompatible\.(slot_)?dtype"):
        holdfast.load(tmp_path / "run", into, mapping=[Cast("model", "float64")])
    holdfast.load(tmp_path / "run", into, mapping=[Cast("model", "float64"), Cast("optimizer/state/**", "float64")])
    step(into)
    holdfast.load(tmp_path / "run", into, cast=True)
    step(into)


def drop_in_flat_memory(run: str) -> str:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Linear(3, 2), device_id=torch.device("cpu"))
    state: State = {"model": model, "optimizer": AdamW(model.parameters(), lr=0.1)}
    with pytest.raises(IncompatibleError) as caught:
        holdfast.load(run, state, mapping=[Drop("optimizer/state/model/bias/step")])
    return caught.value.code


@pytest.mark.filterwarnings("ignore")
def test_a_rule_that_drops_step_is_refused_for_flat_parameters_too(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", trained(AdamW), 0)
    assert run_ranks(1, drop_in_flat_memory, str(tmp_path / "run")) == ["incompatible.needed_slots"]
