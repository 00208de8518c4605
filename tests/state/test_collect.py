"""Live tensors as layouts and memory: a repeated walk finds the same as a first one, and keeps no object alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from itertools import product

import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from holdfast.errors import StateError
from holdfast.frameworks import NamedTensor
from holdfast.state.collect import TensorCollector
from holdfast.state.flatten import FlatState, flatten
from holdfast.state.local_placements import same_placements

State = dict[str, object]


def described(flat: FlatState) -> object:
    """All that is known of a state, memory by its address."""
    tensors = {
        name: (local.layout, [(part.data_ptr(), part.shape, part.stride(), part.dtype) for part in local.memory])
        for name, local in flat.tensors.items()
    }
    return tensors, flat.aliases, flat.nodes


def new_state() -> State:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    shared = torch.arange(6.0)
    return {
        "model": model,
        "optimizer": optimizer,
        "a": shared,
        "b": shared,
        "c": torch.zeros(2, 3),
        "d": torch.empty(0),
    }


def tensor(state: State, name: str) -> torch.Tensor:
    found = state[name]
    assert isinstance(found, torch.Tensor)
    return found


def weight(state: State) -> torch.Tensor:
    model = state["model"]
    assert isinstance(model, nn.Module)
    return next(model.parameters())


def replace(state: State) -> None:
    state["c"] = torch.zeros(2, 3)


def set_data(state: State) -> None:
    tensor(state, "c").data = torch.zeros(3)


def set_data_of_parameter(state: State) -> None:
    parameter = weight(state)
    parameter.data = parameter.data.clone()


def change_dtype(state: State) -> None:
    tensor(state, "c").data = tensor(state, "c").data.to(torch.float64)


def transpose(state: State) -> None:
    tensor(state, "c").transpose_(0, -1)


def untie(state: State) -> None:
    state["b"] = torch.arange(6.0)


def tie(state: State) -> None:
    state["c"] = state["a"]


def tie_to_parameter(state: State) -> None:
    state["a_weight"] = weight(state)


def tie_slot_to_tensor(state: State) -> None:
    optimizer = state["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.state[weight(state)]["exp_avg"] = tensor(state, "a")


def tie_empty_tensors(state: State) -> None:
    state["e"] = state["d"]


def add(state: State) -> None:
    state["new"] = torch.zeros(1)


def remove(state: State) -> None:
    state.pop("b", None)


def freeze(state: State) -> None:
    weight(state).requires_grad_(not weight(state).requires_grad)


def change_nothing(state: State) -> None:
    assert state


CHANGES: list[Callable[[State], None]] = [
    replace,
    set_data,
    set_data_of_parameter,
    change_dtype,
    transpose,
    untie,
    tie,
    tie_to_parameter,
    tie_slot_to_tensor,
    tie_empty_tensors,
    add,
    remove,
    freeze,
    change_nothing,
]


def test_a_slot_that_is_a_sharded_parameter_stays_tied_when_other_slots_change() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        parameter = nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        optimizer = torch.optim.SGD([parameter])
        optimizer.state[parameter] = {"anchor": parameter}
        state: State = {"w": parameter, "optimizer": optimizer}
        first = flatten(state)
        optimizer.state[parameter]["more"] = torch.zeros(1)
        later = flatten(state, last=first.remembered)
    finally:
        dist.destroy_process_group()
    assert first.aliases == later.aliases == {"optimizer/state/w/anchor": "w"}


@given(st.lists(st.sampled_from(CHANGES), max_size=5))
def test_a_later_walk_finds_what_a_first_one_would(changes: list[Callable[[State], None]]) -> None:
    state = new_state()
    walked = flatten(state)
    for change in changes:
        change(state)
        walked = flatten(state, last=walked.remembered)
        assert described(walked) == described(flatten(state))
        assert all(not part.requires_grad for local in walked.tensors.values() for part in local.memory)


def test_what_a_walk_remembers_keeps_no_memory_alive() -> None:
    state = new_state()
    remembered = flatten(state).remembered
    alive = [weakref.ref(tensor(state, "a")), weakref.ref(weight(state))]
    assert remembered
    del state
    gc.collect()
    assert [reference() for reference in alive] == [None, None]


def test_tensors_of_one_kind_share_the_parts_of_their_layouts(world_of_one: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    state: State = {
        "a": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]),
        "b": distribute_tensor(torch.zeros(4, 3), init_device_mesh("cpu", (1,)), [Shard(0)]),
        "c": distribute_tensor(torch.zeros(4, 3), mesh, [Shard(1)]),
        "d": torch.zeros(4, 3),
        "e": torch.zeros(4, 3, dtype=torch.int64),
        "f": torch.zeros(12),
    }
    layouts = {name: local.layout for name, local in flatten(state).tensors.items()}
    assert [layouts[name].dtype for name in "abcdef"] == ["float32"] * 4 + ["int64", "float32"]
    assert [layouts[name].shape for name in "abcdef"] == [(4, 3)] * 5 + [(12,)]
    assert len({id(layouts[name].shape) for name in "abcde"}) == 1
    assert layouts["a"].spec == layouts["b"].spec
    assert layouts["a"].spec != layouts["c"].spec
    assert layouts["d"].spec is layouts["e"].spec is layouts["f"].spec


def test_the_first_name_stands_for_all_tensors_of_a_shape_that_no_manifest_can_hold() -> None:
    collector = TensorCollector(meta=True)
    too_long = {"b": torch.float32, "a": torch.float64, "c": torch.float32}
    with pytest.raises(StateError, match="axes too long") as caught:
        collector.add(
            NamedTensor(name, torch.empty(4 if name == "0" else 1 << 57, dtype=dtype, device="meta"), "compare")
            for name, dtype in {**too_long, "0": torch.float64}.items()
        )
    assert caught.value.tensor == "a"


def test_a_walk_that_remembers_nothing_finds_the_same() -> None:
    entries = [
        NamedTensor(name, each, "compare") for name, each in new_state().items() if isinstance(each, torch.Tensor)
    ]
    forgetful, plain = TensorCollector(meta=True, remembers=False), TensorCollector(meta=True)
    for collector in (forgetful, plain):
        collector.add(entries[:2])
        collector.add(entries[1:])
    assert [local.layout for local in forgetful.found] == [local.layout for local in plain.found]
    assert forgetful.aliases == plain.aliases == {"b": "a"}


def test_placements_of_many_tensors_are_compared_pair_by_pair(world_of_one: None) -> None:
    mesh, other_mesh = init_device_mesh("cpu", (1,)), init_device_mesh("cpu", (1, 1))
    plain = torch.zeros(4, 4)
    places: list[list[Placement]] = [[Shard(0)], [Shard(1)], [Replicate()]]
    sharded: list[torch.Tensor] = [distribute_tensor(plain, mesh, place) for place in places]
    sharded += [torch.zeros_like(each) for each in sharded]
    on_two_axes: list[Placement] = [Shard(0), Replicate()]
    kinds = [*places, *places, on_two_axes, None, None]
    tensors = [*sharded, distribute_tensor(plain, other_mesh, on_two_axes), plain, plain.clone()]
    pairs = list(product(range(len(tensors)), repeat=2))
    found = same_placements([tensors[a] for a, _ in pairs], [tensors[b] for _, b in pairs])
    assert found == [kinds[a] == kinds[b] for a, b in pairs]
    assert same_placements([plain, sharded[0]], [None, None]) == [True, True]
    assert same_placements([plain], [distribute_tensor(torch.zeros(4), mesh, [Shard(0)])]) == [True]
