"""Optimizers bound to a checkpoint: state by parameter name, in its stored dtype; hyper-parameters by group."""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import holdfast
from tests.support.bound import State, assert_restores, assert_same, load, mlp, refused, save, steps, train

OPTIMIZERS: dict[str, Callable[[Iterator[nn.Parameter]], Optimizer]] = {
    "sgd without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw with a tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), foreach=False),
    "adafactor": torch.optim.Adafactor,
    "nadam": torch.optim.NAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "lbfgs": lambda p: torch.optim.LBFGS(p, max_iter=3, history_size=2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_fresh_optimizer_gets_the_saved_state_and_goes_on_alike(
    make: Callable[[Iterator[nn.Parameter]], Optimizer],
) -> None:
    def state() -> State:
        model = mlp()
        return {"model": model, "optimizer": make(model.parameters())}

    assert_restores(state, train)


def test_fp32_state_of_bf16_parameters_stays_fp32() -> None:
    def state() -> State:
        model = mlp().bfloat16()
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    trained, fresh = state(), state()
    train(trained)
    optimizer = cast("Optimizer", trained["optimizer"])
    for slots in optimizer.state.values():
        slots["exp_avg"] = slots["exp_avg"].float() + 1e-6
    load(save(trained), fresh)
    assert_same(trained, fresh)
    assert {slots["exp_avg"].dtype for slots in cast("Optimizer", fresh["optimizer"]).state.values()} == {torch.float32}


def test_an_optimizer_that_has_state_keeps_its_objects_and_fitting_memory() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    steps(optimizer)
    saved = save({"m": model, "o": optimizer})
    steps(optimizer)
    weight = model.weight
    state, group, slots = optimizer.state, optimizer.param_groups[0], optimizer.state[weight]
    average = slots["exp_avg"]
    slots["exp_avg_sq"] = slots["exp_avg_sq"].double()
    slots["left over"] = 3
    load(saved, {"m": model, "o": optimizer})
    assert optimizer.state is state
    assert optimizer.param_groups[0] is group
    assert optimizer.state[weight] is slots
    assert slots["exp_avg"] is average
    assert slots["exp_avg_sq"].dtype is torch.float32
    assert slots.keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert slots["step"] == 2


#: The ways in which a live slot may not fit the stored one.
SPOILT: dict[str, Callable[[torch.Tensor], object]] = {
    "no tensor": lambda _: None,
    "dtype": torch.Tensor.double,
    "shape": lambda slot: torch.zeros(*slot.shape, 2),
}


@given(
    spoilt=st.dictionaries(
        st.tuples(st.integers(0, 5), st.sampled_from(["step", "exp_avg", "exp_avg_sq"])), st.sampled_from(list(SPOILT))
    ),
    lost=st.sets(st.integers(0, 5)),
    stateless=st.sets(st.integers(0, 5)),
)
def test_each_slot_that_fits_is_filled_in_place_whatever_the_others_are(
    spoilt: dict[tuple[int, str], str], lost: set[int], stateless: set[int]
) -> None:
    def trained() -> State:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        parameters = list(model.parameters())
        for number, parameter in enumerate(parameters):
            parameter.grad = None if number in stateless else torch.full_like(parameter, 0.5)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    saved, live = trained(), trained()
    optimizer = cast("Optimizer", live["optimizer"])
    parameters = optimizer.param_groups[0]["params"]
    for (number, key), how in spoilt.items():
        if number not in stateless:
            optimizer.state[parameters[number]][key] = SPOILT[how](optimizer.state[parameters[number]][key])
    for number in lost:
        optimizer.state.pop(parameters[number], None)
    before = {number: dict(optimizer.state.get(parameter, {})) for number, parameter in enumerate(parameters)}
    load(save(saved), live)
    assert_same(saved, live)
    for number, parameter in enumerate(parameters):
        slots = optimizer.state.get(parameter, {})
        assert list(slots) == ([] if number in stateless else ["step", "exp_avg", "exp_avg_sq"])
        kept = {key for key in before[number] if slots.get(key) is before[number][key]}
        assert kept == {key for key in before[number] if (number, key) not in spoilt}


def test_state_of_parameters_that_had_none_is_dropped() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    saved = save({"m": model, "o": optimizer})
    steps(optimizer)
    load(saved, {"m": model, "o": optimizer})
    assert not optimizer.state


def test_step_counters_stay_on_the_host_unless_a_kernel_reads_them() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    steps(optimizer)
    saved = save({"m": model, "o": optimizer})
    other = nn.Linear(2, 2)
    fresh = torch.optim.AdamW(other.parameters())
    load(saved, {"m": other, "o": fresh})
    assert fresh.state[other.weight]["step"].device.type == "cpu"


def test_nested_slots_without_a_parameters_shape_come_back() -> None:
    def state() -> State:
        weight = nn.Parameter(torch.ones(2, 3))
        return {"w": weight, "o": torch.optim.SGD([weight], lr=0.1, momentum=0.9)}

    trained, fresh = state(), state()
    train(trained)
    optimizer = cast("Optimizer", trained["o"])
    optimizer.state[cast("torch.Tensor", trained["w"])]["history"] = [torch.ones(5), (None, {3: torch.zeros(2, 3)}), []]
    cast("dict[object, object]", optimizer.state)["calls"] = {"total": torch.tensor(7), "n": 3}
    load(save(trained), fresh)
    assert_same(trained, fresh)
    assert cast("dict[object, dict[str, object]]", cast("Optimizer", fresh["o"]).state)["calls"]["n"] == 3


def test_hyper_parameters_follow_parameters_by_name_not_by_position() -> None:
    def state(*order: int) -> State:
        model = mlp()
        rates = [0.1, 0.2, 0.3]
        optimizer = torch.optim.AdamW(model[order[0]].parameters(), lr=rates[order[0]])
        for index in order[1:]:
            optimizer.add_param_group({"params": model[index].parameters(), "lr": rates[index]})
        return {"model": model, "optimizer": optimizer}

    trained, fresh = state(0, 1, 2), state(2, 0, 1)
    train(trained)
    cast("Optimizer", trained["optimizer"]).param_groups[0]["lr"] = 0.7
    load(save(trained), fresh)
    assert [group["lr"] for group in cast("Optimizer", fresh["optimizer"]).param_groups] == [0.3, 0.7, 0.2]


def split_groups(*rates: float) -> State:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([a], lr=rates[0]) if len(rates) > 1 else torch.optim.SGD([a, b], lr=rates[0])
    if len(rates) > 1:
        optimizer.add_param_group({"params": [b], "lr": rates[1]})
    return {"a": a, "b": b, "o": optimizer}


def test_one_saved_group_may_serve_two_live_ones_that_are_alike() -> None:
    assert refused(save(split_groups(0.1)), split_groups(0.5, 0.6)).code == "incompatible.groups"
    fresh = split_groups(0.5, 0.5)
    load(save(split_groups(0.1)), fresh)
    assert [group["lr"] for group in cast("Optimizer", fresh["o"]).param_groups] == [0.1, 0.1]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.tensor(0.5), torch.tensor(0.7)),
        (["a"], ["a", "b"]),
        ({"x": [1, 2]}, {"x": [1, 3]}),
        (np.ones(2), np.zeros(2)),
        ((0.9, torch.tensor(0.5)), (0.9, torch.tensor(0.6))),
    ],
    ids=["tensor", "list", "dict", "array", "tensor in a tuple"],
)
def test_groups_that_differ_in_more_than_plain_numbers_do_not_silently_become_alike(
    first: object, second: object
) -> None:
    def state(*values: object) -> State:
        params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
        split: list[dict[str, object]] = [{"params": [each]} for each in params]
        groups: list[dict[str, object]] = split if len(values) > 1 else [{"params": params}]
        for group, value in zip(groups, values, strict=True):
            group["extra"] = copy.deepcopy(value)
        return {"a": params[0], "b": params[1], "o": torch.optim.SGD(groups, lr=0.1)}

    saved = save(state(first))
    error = refused(saved, state(first, second))
    assert error.code == "incompatible.groups"
    assert "extra" in str(error)
    load(saved, state(first, first))


def test_saved_groups_merge_when_their_hyper_parameters_agree_and_clash_when_not() -> None:
    fresh = split_groups(0.5)
    binding = load(save(split_groups(0.1, 0.1)), fresh)
    assert cast("Optimizer", fresh["o"]).param_groups[0]["lr"] == 0.1
    assert binding.unexpected == []
    error = refused(save(split_groups(0.1, 0.2)), split_groups(0.5))
    assert error.code == "incompatible.groups"
    assert "lr" in str(error)


def test_slots_come_in_the_order_in_which_torch_makes_them() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    steps(optimizer)
    into = mlp()
    fresh = torch.optim.AdamW(into.parameters())
    load(save({"m": model, "o": optimizer}), {"m": into, "o": fresh})
    assert [list(slots) for slots in fresh.state.values()] == [list(slots) for slots in optimizer.state.values()]


def test_an_empty_group_gets_the_hyper_parameters_of_its_place() -> None:
    def state(rate: float) -> State:
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.AdamW([weight])
        optimizer.add_param_group({"params": [], "lr": rate})
        return {"w": weight, "o": optimizer}

    fresh = state(0.5)
    load(save(state(0.25)), fresh)
    assert cast("Optimizer", fresh["o"]).param_groups[1]["lr"] == 0.25


def test_hyper_parameters_on_one_side_only_are_named() -> None:
    model = mlp()
    plain, scheduled = torch.optim.SGD(model.parameters()), torch.optim.SGD(model.parameters())
    LambdaLR(scheduled, lambda epoch: 0.9**epoch)
    assert "o/param_groups/0/initial_lr" in str(refused(save({"m": model, "o": scheduled}), {"m": model, "o": plain}))
    assert "o/param_groups/0/initial_lr" in str(refused(save({"m": model, "o": plain}), {"m": model, "o": scheduled}))


def test_two_models_with_the_same_fqns_and_two_optimizers_come_back_each_to_its_own() -> None:
    def state() -> State:
        a, b = mlp(), mlp()
        return {
            "gen": a,
            "disc": b,
            "opt": {"gen": torch.optim.Adam(a.parameters()), "disc": torch.optim.SGD(b.parameters(), momentum=0.5)},
        }

    def run(state: State) -> None:
        steps(*cast("dict[str, Optimizer]", state["opt"]).values())

    assert_restores(state, run)


def test_frozen_parameters_and_parameters_without_gradients_come_back() -> None:
    def state() -> State:
        model = mlp()
        model[0].requires_grad_(False)
        return {"m": model, "o": torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)}

    assert_restores(state, train)


def test_floats_in_optimizer_groups_keep_every_bit() -> None:
    weight = nn.Parameter(torch.ones(1))
    odd = struct.unpack("<d", struct.pack("<Q", 0x3FB999999999999B))[0]
    fresh = torch.optim.SGD([weight], lr=0.5)
    load(save({"w": weight, "o": torch.optim.SGD([weight], lr=odd)}), {"w": weight, "o": fresh})
    assert struct.pack("<d", fresh.param_groups[0]["lr"]) == struct.pack("<d", odd)


def test_groups_in_another_order_are_refused_where_a_scheduler_has_their_rates_by_index() -> None:
    def training(order: tuple[int, int], rates: tuple[float, float]) -> State:
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight], "lr": rates[0]}, {"params": [model.bias], "lr": rates[1]}]
        optimizer = torch.optim.SGD([groups[index] for index in order])
        return {"m": model, "o": optimizer, "s": torch.optim.lr_scheduler.StepLR(optimizer, 3)}

    saved = save(training((0, 1), (0.1, 0.01)))
    error = refused(saved, training((1, 0), (0.1, 0.01)))
    assert error.code == "incompatible.groups"
    assert "the index of the group" in str(error)
    load(saved, training((0, 1), (0.5, 0.05)))
    load(save(training((0, 1), (0.1, 0.1))), training((1, 0), (0.1, 0.1)))


def cyclic(optimizer: Optimizer, order: Sequence[int]) -> LRScheduler:
    return CyclicLR(optimizer, 0.1, [(0.2, 0.9)[index] for index in order])


def plateau(optimizer: Optimizer, order: Sequence[int]) -> LRScheduler:
    return ReduceLROnPlateau(optimizer, min_lr=[(0.01, 0.05)[index] for index in order])


def chained(optimizer: Optimizer, order: Sequence[int]) -> LRScheduler:
    return ChainedScheduler([StepLR(optimizer, 3), cyclic(optimizer, order)])


def sequential(optimizer: Optimizer, order: Sequence[int]) -> LRScheduler:
    """Has lists of as many entries as there are groups, of which none is by group."""
    return SequentialLR(optimizer, [StepLR(optimizer, 3), StepLR(optimizer, 2)], [5])


def one_cycle(optimizer: Optimizer, order: Sequence[int]) -> LRScheduler:
    """Has one, too, and keeps the limits in the groups."""
    return OneCycleLR(optimizer, 0.2, total_steps=9)


Schedule = Callable[[Optimizer, Sequence[int]], LRScheduler]


def scheduled(schedule: Schedule, order: Sequence[int], *, number: int = 2) -> State:
    model = nn.Linear(2, 2)
    params = [model.weight, model.bias]
    groups = [{"params": [params[index]]} for index in order] if number == 2 else [{"params": params}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return {"m": model, "o": optimizer, "s": schedule(optimizer, order[:number])}


@pytest.mark.parametrize("schedule", [cyclic, plateau, chained])
def test_groups_in_another_order_do_not_exchange_the_limits_of_a_scheduler(schedule: Schedule) -> None:
    saved = save(scheduled(schedule, (0, 1)))
    error = refused(saved, scheduled(schedule, (1, 0)))
    assert error.code == "incompatible.groups"
    assert "a list by group" in str(error)
    load(saved, scheduled(schedule, (0, 1)))


def test_a_load_that_is_not_strict_takes_over_the_limits_of_a_scheduler_by_index(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", scheduled(cyclic, (0, 1)), 1)
    fresh = scheduled(cyclic, (1, 0))
    holdfast.load(tmp_path / "run", fresh, strict=False)
    assert cast("CyclicLR", fresh["s"]).max_lrs == [0.2, 0.9]


@pytest.mark.parametrize("schedule", [sequential, one_cycle])
def test_groups_in_another_order_are_no_matter_where_a_scheduler_has_no_list_by_group(schedule: Schedule) -> None:
    source, fresh = scheduled(schedule, (0, 1)), scheduled(schedule, (1, 0))
    cast("LRScheduler", source["s"]).last_epoch = 3
    load(save(source), fresh)
    assert cast("LRScheduler", fresh["s"]).last_epoch == 3


def test_groups_in_another_order_are_no_matter_where_another_optimizer_has_the_scheduler() -> None:
    def state(order: tuple[int, int]) -> State:
        model = nn.Linear(2, 2)
        groups = [{"params": [[model.weight, model.bias][index]]} for index in order]
        return scheduled(cyclic, (0, 1)) | {"n": model, "p": torch.optim.SGD(groups, lr=0.1)}

    source, fresh = state((0, 1)), state((1, 0))
    load(save(source), fresh)
    assert torch.equal(cast("nn.Linear", fresh["n"]).weight, cast("nn.Linear", source["n"]).weight)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("schedule", [cyclic, plateau])
def test_another_number_of_groups_is_refused_where_a_scheduler_has_a_list_by_group(
    schedule: Schedule, number: int
) -> None:
    def same_limits(optimizer: Optimizer, order: Sequence[int]) -> LRScheduler:
        return schedule(optimizer, [0] * len(order))

    saved = save(scheduled(same_limits, (0, 1), number=number))
    error = refused(saved, scheduled(same_limits, (0, 1), number=3 - number))
    assert error.code == "incompatible.groups"
    assert f"{number} when it was saved" in str(error)
