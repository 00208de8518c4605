"""Tensors bound to a checkpoint: tied ones, sharded and wrapped ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import IncompatibleError
from holdfast.state.flatten import flatten
from tests.support.bound import State, assert_restores, assert_same, bits, bound, load, mlp, refused, save, steps, train


def lm(*, tied: bool) -> State:
    model = nn.ModuleDict({"emb": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    if tied:
        model["head"].weight = model["emb"].weight
    return {"m": model, "o": torch.optim.Adam(model.parameters())}


def test_tied_parameters_stay_tied_and_are_filled_once() -> None:
    assert_restores(lambda: lm(tied=True), train)
    saved = save(lm(tied=True))
    names = [target.name for target in bound(saved, lm(tied=True)).targets]
    assert names == ["m/emb.weight"]


def test_untied_parameters_are_both_served_from_the_tied_one() -> None:
    trained, fresh = lm(tied=True), lm(tied=False)
    train(trained)
    binding = load(save(trained), fresh)
    assert binding.missing == []
    sources = {(target.name, target.source) for target in binding.targets}
    assert {("m/emb.weight", "m/emb.weight"), ("m/head.weight", "m/emb.weight")} <= sources
    tensors = flatten(fresh).tensors
    for name in ("m/{}.weight", "o/state/m/{}.weight/exp_avg"):
        assert bits(tensors[name.format("emb")].memory[0]) == bits(tensors[name.format("head")].memory[0])


class Stages(NamedTuple):
    """Embedding and head as two pipeline stages keep them: each its own copy of one weight, trained alike."""

    model: nn.ModuleDict
    emb: torch.Tensor
    head: torch.Tensor
    optimizer: torch.optim.Adam

    @property
    def state(self) -> State:
        return {"m": self.model, "o": self.optimizer}


def stages(*, rates: tuple[float, float] = (0.1, 0.1)) -> Stages:
    emb, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = nn.Parameter(emb.weight.detach().clone())
    groups = [{"params": [end.weight], "lr": rate} for end, rate in zip((emb, head), rates, strict=True)]
    optimizer = torch.optim.Adam(groups)
    steps(optimizer)
    return Stages(nn.ModuleDict({"emb": emb, "head": head}), emb.weight, head.weight, optimizer)


def test_equal_copies_that_were_stored_separately_fill_one_tied_parameter() -> None:
    trained, fresh = stages(), lm(tied=True)
    for copy in (trained.emb, trained.head):
        copy.data.view(torch.int32)[0, 0] = 0x7FC01234  # a NaN that is equal bit for bit
    binding = load(save(trained.state), fresh)
    assert (binding.missing, binding.unexpected) == ([], [])
    assert {"m/emb.weight", "m/head.weight", "o/state/m/head.weight/exp_avg"} <= set(binding.loaded)
    loaded, expected = flatten(fresh), flatten(trained.state)
    assert loaded.aliases == {"m/head.weight": "m/emb.weight"}
    for name, local in loaded.tensors.items():
        assert bits(local.memory[0]) == bits(expected.tensors[name].memory[0]), name


def test_copies_that_differ_are_refused_before_any_value_is_put_in_place() -> None:
    trained, fresh = stages(), lm(tied=True)
    trained.head.data[4, 2] += 1
    into: State = {**fresh, "progress": [1]}
    with pytest.raises(IncompatibleError, match=r"'m/emb\.weight' and 'm/head\.weight', which differ") as caught:
        load(save({**trained.state, "progress": [2]}), into)
    assert (caught.value.code, caught.value.tensor) == ("incompatible.tied", "m/emb.weight")
    assert into["progress"] == [1]
    assert not cast("Optimizer", fresh["o"]).state


def test_optimizer_state_of_separate_copies_must_be_equal_too() -> None:
    trained = stages()
    trained.optimizer.state[trained.head]["exp_avg"][0, 0] += 1
    with pytest.raises(IncompatibleError, match=r"'o/state/m/emb\.weight/exp_avg' and .*, which differ") as caught:
        load(save(trained.state), lm(tied=True))
    assert caught.value.code == "incompatible.tied"


def test_values_and_nested_tensors_in_the_state_of_separate_copies_must_be_equal_too() -> None:
    trained, fresh = stages(), lm(tied=True)
    for copy in (trained.emb, trained.head):
        trained.optimizer.state[copy]["seen"] = [float("nan"), torch.ones(2)]
    binding = load(save(trained.state), fresh)
    assert "o/state/m/head.weight/seen/1" in binding.loaded
    trained.optimizer.state[trained.head]["seen"][0] = 1.0
    error = refused(save(trained.state), lm(tied=True))
    assert error.code == "incompatible.tied"
    assert "'o/state/m/emb.weight/seen/0': one value here, but stored separately" in str(error)
    trained.optimizer.state[trained.head]["seen"] = [float("nan"), torch.zeros(2)]
    with pytest.raises(IncompatibleError, match=r"'o/state/m/head\.weight/seen/1', which differ"):
        load(save(trained.state), lm(tied=True))


def test_hyper_parameters_of_separate_copies_must_be_equal_too() -> None:
    assert refused(save(stages(rates=(0.1, 0.2)).state), lm(tied=True)).code == "incompatible.groups"


def test_copies_of_different_shapes_or_dtypes_are_refused() -> None:
    live = torch.zeros(2)
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.int32)):
        error = refused(save({"a": torch.zeros(2), "b": other}), {"a": live, "b": live})
        assert error.code == "incompatible.tied"
        assert "'a' and 'b', which differ in dtype or shape" in str(error)


def sharded(module: nn.Module) -> nn.Module:
    fully_shard(module)
    return module


@pytest.mark.usefixtures("world_of_one")
def test_fsdp2_state_comes_back_as_dtensors_in_its_saved_dtype() -> None:
    def state() -> State:
        model = mlp()
        fully_shard(model)
        return {"m": model, "o": torch.optim.AdamW(model.parameters(), foreach=False)}

    _, fresh = assert_restores(state, train)
    weight = next(iter(cast("nn.Module", fresh["m"]).parameters()))
    average = cast("Optimizer", fresh["o"]).state[weight]["exp_avg"]
    assert isinstance(weight, DTensor)
    assert isinstance(average, DTensor)
    assert average.placements == weight.placements
    assert type(cast("Optimizer", fresh["o"]).state[weight]["step"]) is torch.Tensor


@pytest.mark.usefixtures("world_of_one")
def test_state_moves_between_plain_ddp_compiled_and_fsdp2_modules() -> None:
    def state(wrap: Callable[[nn.Module], nn.Module]) -> State:
        model = wrap(mlp())
        return {"m": model, "o": torch.optim.AdamW(model.parameters())}

    wraps: list[Callable[[nn.Module], nn.Module]] = [
        nn.parallel.DistributedDataParallel,
        lambda model: cast("nn.Module", torch.compile(model, backend="eager")),
        sharded,
        lambda model: model,
    ]
    origin = state(lambda model: model)
    train(origin)
    previous = origin
    for wrap in wraps:
        following = state(wrap)
        load(save(previous), following)
        previous = following
    assert_same(origin, previous)


def test_a_modules_tensors_load_into_a_plain_dict_of_tensors_and_back() -> None:
    model, other = mlp(), mlp()
    tensors = {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()}
    load(save({"m": model}), {"m": tensors})
    load(save({"m": tensors}), {"m": other})
    assert_same({"m": model}, {"m": other})
