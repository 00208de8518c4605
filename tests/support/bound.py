"""States that are saved to memory and bound again, without files, for the tests of `holdfast.state.bind`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from holdfast.errors import IncompatibleError
from holdfast.format import values
from holdfast.mapping.parts import StoredTensor
from holdfast.state.bind import bind
from holdfast.state.binding import Binding
from holdfast.state.flatten import flatten

State = dict[str, object]


class Saved(NamedTuple):
    """A checkpoint held in memory: the tensors' bytes and what a manifest would say."""

    tensors: dict[str, torch.Tensor]
    stored: dict[str, StoredTensor]
    aliases: dict[str, str]
    nodes: bytes


def save(state: State) -> Saved:
    flat = flatten(state)
    return Saved(
        {name: local.memory[0].clone() for name, local in flat.tensors.items()},
        {name: StoredTensor(local.layout.dtype, local.layout.shape) for name, local in flat.tensors.items()},
        dict(flat.aliases),
        values.encode(flat.nodes),
    )


def bound(saved: Saved, into: State, *, strict: bool = True) -> Binding:
    return bind(into, saved.stored, saved.aliases, values.decode(saved.nodes), strict=strict)


def load(saved: Saved, into: State, *, strict: bool = True) -> Binding:
    binding = bound(saved, into, strict=strict)
    for target in binding.targets:
        target.local.memory[0].copy_(saved.tensors[target.source])
    assert binding.finish() is into
    return binding


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def assert_same(a: State, b: State) -> None:
    """Both states are the same, bit for bit: the same names, dtypes, shapes, placements, memory and values."""
    x, y = flatten(a), flatten(b)
    assert [local.layout for local in x.tensors.values()] == [local.layout for local in y.tensors.values()]
    assert x.aliases == y.aliases
    assert values.encode(x.nodes) == values.encode(y.nodes)
    for name, local in x.tensors.items():
        assert bits(local.memory[0]) == bits(y.tensors[name].memory[0]), name


def assert_restores(make: Callable[[], State], train: Callable[[State], None]) -> tuple[State, State]:
    """A trained state, saved and loaded into a fresh one, is the trained state, and goes on training alike."""
    trained, fresh = make(), make()
    train(trained)
    load(save(trained), fresh)
    assert_same(trained, fresh)
    train(trained)
    train(fresh)
    assert_same(trained, fresh)
    return trained, fresh


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))


def steps(*optimizers: Optimizer, count: int = 2) -> None:
    """Optimizer steps with gradients that depend on nothing but the parameters."""
    for optimizer in optimizers:

        def closure(optimizer: Optimizer = optimizer) -> float:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = parameter.detach().float().cos().to(parameter.dtype)
            return 1.0

        for _ in range(count):
            closure()
            optimizer.step(closure)


def train(state: State) -> None:
    for item in list(state.values()):
        if isinstance(item, Optimizer):
            steps(item)


def refused(saved: Saved, into: State) -> IncompatibleError:
    with pytest.raises(IncompatibleError) as caught:
        bound(saved, into)
    return caught.value


class Loader:
    """A data loader's state: nested, with tensors, in whatever shape it has when it is saved."""

    def __init__(self, state: object = None) -> None:
        self.state = state

    def state_dict(self) -> object:
        return self.state

    def load_state_dict(self, state: object) -> None:
        self.state = state
