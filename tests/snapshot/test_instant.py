"""The instant of a background save: all structure and all values, whatever the next lines of a loop do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, AdamW, Optimizer

import holdfast
from holdfast import Checkpointer, Memory
from holdfast.format import values
from holdfast.snapshot import capture as snapshot_module
from holdfast.snapshot.capture import Snapshot
from holdfast.state.flatten import FlatState, flatten
from tests.checkpointer.test_checkpointer import late_copies
from tests.state.test_registered_types import Quantised, quantised
from tests.support.bound import bits

State = dict[str, Any]

ITEMS = 5


def described(state: State) -> tuple[dict[str, bytes], bytes]:
    """All tensors of a state by name, bit for bit, and its table of values."""
    flat = flatten(state)
    return {name: bits(local.memory[0]) for name, local in flat.tensors.items()}, values.encode(flat.nodes)


def guarded(state: State) -> set[str]:
    """Names of the tensors that a save copies later, under the guard."""
    return flatten(state).tensors.keys() - Snapshot(state, rank=0, world_size=1)._at_once


class Soap(Optimizer):
    """Keeps lists of matrices for each parameter, as SOAP and Shampoo do."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                slots = self.state[parameter]
                if not slots:
                    slots["step"] = 0
                    slots["mean"] = torch.zeros_like(parameter)
                    slots["factors"] = [torch.zeros(extent, extent) for extent in parameter.shape]
                    slots["bases"] = {"left": (torch.eye(parameter.shape[0]),), "none": None}
                slots["step"] += 1
                slots["mean"].lerp_(parameter.grad, 0.5)
                for factor in slots["factors"]:
                    factor.add_(parameter.grad.sum())
                slots["bases"]["left"][0].mul_(0.9)
                parameter.sub_(group["lr"] * slots["mean"])


class EightBit(Optimizer):
    """Keeps tensors of a type that the user registered, as 8-bit optimizers do."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                slots = self.state[parameter]
                if not slots:
                    slots["mean"] = quantised(0)
                mean: Quantised = slots["mean"]
                mean.data8.add_(1)
                mean.scale.mul_(0.5)
                parameter.sub_(group["lr"] * parameter.grad)


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "lbfgs": lambda params: LBFGS(params, lr=0.1, max_iter=2, history_size=3),
    "soap": Soap,
    "eight-bit": EightBit,
    "adamw": AdamW,
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "sgd": lambda params: SGD(params, lr=0.1),
}


def new_state(kind: str) -> State:
    torch.manual_seed(5)
    module = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    return {"model": module, "optimizer": OPTIMIZERS[kind](module.parameters()), "seen": {"batches": 0}}


def train(state: State, count: int = 1) -> None:
    """Steps, each with its gradients set to None behind it."""

    def closure() -> float:
        state["optimizer"].zero_grad()
        loss = state["model"](torch.linspace(-1, 1, 4 * ITEMS).reshape(ITEMS, 4)).square().sum()
        loss.backward()
        return float(loss.item())

    for _ in range(count):
        state["seen"]["batches"] += ITEMS
        closure()
        state["optimizer"].step(closure)
        state["optimizer"].zero_grad()


def committed(run: str, step: int, into: State) -> tuple[dict[str, bytes], bytes]:
    """The content of a checkpoint, as `described` reports it after loading."""
    holdfast.load(f"{run}@step={step}", into)
    return described(into)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_with_nested_slots_get_their_checkpoints(run: str, memory: Memory, kind: str) -> None:
    state, then = new_state(kind), {}
    with Checkpointer(run, state, memory=memory) as checkpointer:
        for step in range(4):
            train(state)
            then[step] = described(state)
            checkpointer.save(step)
            train(state)
        checkpointer.wait()
    for step, wanted in then.items():
        assert committed(run, step, new_state(kind)) == wanted


@pytest.mark.parametrize("kind", ["lbfgs", "soap", "eight-bit"])
def test_a_step_that_waits_is_all_that_nested_slots_need(run: str, memory: Memory, kind: str) -> None:
    state = new_state(kind)
    train(state)
    with Checkpointer(run, state, memory=memory) as checkpointer:
        checkpointer.save(0).durable.wait(60)
        wanted = described(state)
        with late_copies():
            handle = checkpointer.save(1)
            train(state)
            assert checkpointer._tier is not None
            assert checkpointer._tier.stager.guard.waited_s > 0.1
        handle.durable.wait(60)
    assert committed(run, 1, new_state(kind)) == wanted


def test_slots_are_guarded_however_they_are_nested_and_frozen_parameters_with_theirs_are_not() -> None:
    state = new_state("soap")
    train(state)
    names = guarded(state)
    assert names == flatten(state).tensors.keys()
    assert "optimizer/state/model/0.weight/factors/1" in names
    assert "optimizer/state/model/0.weight/bases/left/0" in names
    state["model"][0].weight.requires_grad_(False)
    assert guarded(state) == {name for name in names if "model/0.weight" not in name}
    state = new_state("eight-bit")
    train(state)
    assert "optimizer/state/model/0.bias/mean/%plane=scale" in guarded(state)


def test_without_a_gradient_or_slots_a_parameter_is_copied_at_once() -> None:
    state = new_state("sgd")
    assert not guarded(state)
    state["model"](torch.ones(1, 4)).sum().backward()
    assert guarded(state) == flatten(state).tensors.keys()
    state["optimizer"].zero_grad()
    assert not guarded(state)
    state = new_state("adamw")
    train(state)
    assert guarded(state) == flatten(state).tensors.keys()
    state["optimizer"].param_groups[0]["capturable"] = True
    assert not guarded(state)


@contextmanager
def late_names() -> Iterator[None]:
    """Name the objects that a save leaves to the background only a while after the save."""
    flat = Snapshot.flat

    def late(snapshot: Snapshot) -> FlatState:
        time.sleep(0.3)
        return flat(snapshot)

    with patch.object(Snapshot, "flat", late):
        yield


def add_group(state: State) -> None:
    state["model"].append(nn.Linear(4, 4))
    state["optimizer"].add_param_group({"params": state["model"][-1].parameters(), "lr": 0.5})


def clear_state(state: State) -> None:
    state["optimizer"].state.clear()


def replace_slots(state: State) -> None:
    for slots in state["optimizer"].state.values():
        for key, slot in slots.items():
            slots[key] = torch.zeros_like(slot) if isinstance(slot, torch.Tensor) else slot
        slots["other"] = torch.zeros(3)


def load_older_state(state: State) -> None:
    other = two_groups("adamw")
    train(other, 3)
    state["optimizer"].load_state_dict(other["optimizer"].state_dict())


def delete_group(state: State) -> None:
    del state["optimizer"].param_groups[1]
    state["optimizer"].state.clear()


def regroup(state: State) -> None:
    first, second = state["optimizer"].param_groups
    first["params"], second["params"] = second["params"], first["params"]
    first["lr"], second["betas"] = 7.0, (0.1, 0.2)


def change_values(state: State) -> None:
    state["seen"]["batches"] = -1
    state["seen"]["more"] = [1, 2]


def drop_gradients(state: State) -> None:
    state["optimizer"].zero_grad()


CHANGES = [
    add_group, clear_state, replace_slots, load_older_state, delete_group, regroup, change_values, drop_gradients,
]  # fmt: skip


def two_groups(kind: str) -> State:
    state = new_state(kind)
    first, second = list(state["model"][0].parameters()), list(state["model"][2].parameters())
    optimizer = OPTIMIZERS[kind](first)
    optimizer.add_param_group({"params": second, "lr": 0.25})
    return state | {"optimizer": optimizer}


@pytest.mark.parametrize(
    ("change", "kind"),
    # torch casts what it loads, and does not know the slots of the optimizer like SOAP
    [each for each in product(CHANGES, ["adamw", "soap"]) if each != (load_older_state, "soap")],
    ids=lambda each: each if isinstance(each, str) else cast("Callable[..., None]", each).__name__,
)
@pytest.mark.few(7)
def test_structure_that_changes_right_after_save_is_saved_as_it_was(
    run: str,
    memory: Memory,
    change: Callable[[State], None],
    kind: str,
) -> None:
    state = two_groups(kind)
    train(state)
    with Checkpointer(run, state, memory=memory) as checkpointer:
        checkpointer.save(0).durable.wait(60)
        train(state)
        state["model"](torch.ones(1, 4)).sum().backward()
        wanted = described(state)
        with late_names(), late_copies():
            handle = checkpointer.save(1)
            change(state)
            state["optimizer"].step()
            handle.durable.wait(60)
    assert committed(run, 1, two_groups(kind)) == wanted


def in_place(parameter: torch.Tensor) -> None:
    with torch.no_grad():
        parameter.mul_(0.9).add_(1)


def other_memory(parameter: torch.Tensor) -> None:
    parameter.data = parameter.data * 0.9 + 1


def behind_torchs_back(parameter: torch.Tensor) -> None:
    parameter.data.mul_(0.9).add_(1)


@pytest.mark.parametrize("update", [in_place, other_memory, behind_torchs_back])
@pytest.mark.parametrize("aside_nbytes", [64 << 20, 0], ids=["before the state was copied", "copied first"])
@pytest.mark.few(3)
def test_frozen_parameters_in_an_optimizers_groups_may_change_at_any_time(
    run: str,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    update: Callable[[torch.Tensor], None],
    aside_nbytes: int,
) -> None:
    """A momentum encoder, a teacher, a codebook: `optim.X(model.parameters())` holds them all."""
    monkeypatch.setattr(snapshot_module, "_ASIDE_NBYTES", aside_nbytes)

    def made() -> State:
        torch.manual_seed(3)
        model = nn.ModuleDict({"student": nn.Linear(4, 4), "teacher": nn.Linear(4, 4)})
        model["teacher"].requires_grad_(False)
        return {"model": model, "optimizer": AdamW(model.parameters(), weight_decay=0.1)}

    state, then = made(), {}
    model = state["model"]
    with Checkpointer(run, state, memory=memory) as checkpointer:
        for step in range(2):
            model["student"](torch.ones(2, 4)).square().sum().backward()
            state["optimizer"].step()
            state["optimizer"].zero_grad()
            then[step] = described(state)
            with late_copies():
                handle = checkpointer.save(step)
                for parameter in model["teacher"].parameters():
                    update(parameter)
                handle.staged.wait(60)
        checkpointer.wait()
    for step, wanted in then.items():
        assert committed(run, step, made()) == wanted


def test_a_parameter_that_is_frozen_after_training_is_copied_at_once_with_its_slots(
    run: str,
    memory: Memory,
) -> None:
    state = new_state("adamw")
    train(state, 2)
    frozen = state["model"][0].weight.requires_grad_(False)
    with Checkpointer(run, state, memory=memory) as checkpointer:
        checkpointer.save(0).durable.wait(60)
        wanted = described(state)
        with late_copies():
            handle = checkpointer.save(1)
            frozen.data.zero_()
            for slot in state["optimizer"].state[frozen].values():
                slot.data.zero_()
            handle.durable.wait(60)
    assert committed(run, 1, new_state("adamw")) == wanted


def test_what_cannot_be_named_is_refused_before_save_returns(run: str, memory: Memory) -> None:
    state = new_state("adamw")
    train(state)
    with Checkpointer(run, state, memory=memory) as checkpointer:
        checkpointer.save(0).durable.wait(60)
        state["optimizer"].add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(holdfast.StateError, match="has no name"):
            checkpointer.save(1)
