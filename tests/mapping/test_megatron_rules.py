"""Optimizers in the form that Megatron's have, and plain ones: rules lead from one to the other.

`make test-matrix` does this with Megatron itself. Here an adapter writes what Megatron's writes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import IncompatibleError
from holdfast.format.names import component, join
from holdfast.format.values import Open
from holdfast.frameworks import BindingSource, Finish, Sink, registry
from holdfast.mapping import FromMegatron, Fuse, Rename, Rule, Split, Stack, ToMegatron, Unstack

GROUPS = ("wd_mult=0.0,lr_mult=1.0", "wd_mult=1.0,lr_mult=1.0")
BIAS, WEIGHT = "model/layers.bias", "model/layers.weight"


class TheirOptimizer:
    """Master weights and moments of stacked layers, by the name of the weight. `hyper` are the keys of a group."""

    def __init__(self, hyper: dict[str, object], *, steps: int | None = 7) -> None:
        torch.manual_seed(1)
        self.slots = {
            name: {slot: torch.rand(shape) for slot in ("fp32", "exp_avg", "exp_avg_sq")}
            for name, shape in ((BIAS, (2, 3)), (WEIGHT, (2, 6, 3)))
        }
        self.hyper, self.steps = hyper, steps


class TheirAdapter:
    """Writes a `TheirOptimizer` as `MegatronOptimizerAdapter` writes one of Megatron, and fills its slots."""

    needs_names = True
    is_divisible = False
    spans_ranks = True

    def accepts(self, kind: type) -> bool:
        return kind is TheirOptimizer

    def describe(self, path: str, item: TheirOptimizer, sink: Sink) -> bool:
        sink.node(path, Open("optimizer"))
        for below in ("state", "param_groups", "group_of"):
            sink.node(join(path, below), Open("dict"))
        for (name, slots), group in zip(item.slots.items(), GROUPS, strict=True):
            for slot, tensor in slots.items():
                sink.tree(join(path, "state", name, slot), tensor)
            sink.tree(join(path, "group_of", component(name)), group)
            sink.tree(join(path, "param_groups", component(group)), {**item.hyper, "weight_decay": float(group[8:11])})
        sink.tree(join(path, "grad_scaler", "0"), {"scale": torch.ones(1), "growth_tracker": 3})
        if item.steps is not None:
            sink.tree(join(path, "step"), item.steps)
        return True

    def bind(self, path: str, item: TheirOptimizer, source: BindingSource) -> Finish:
        for name, slots in item.slots.items():
            for slot, tensor in slots.items():
                source.live(join(path, "state", name, slot), tensor)
        for name in source.stored_below(path):
            source.mark(name)
        return lambda: item


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_adapters", registry._adapters)
    holdfast.register_adapter(TheirAdapter())
    yield
    registry._adapter_of_type.cache_clear()


#: Groups as they are with torch's optimizers, and as they are with those of Apex.
TORCHS: dict[str, object] = {
    **{
        key: value
        for key, value in torch.optim.AdamW([torch.zeros(1)], lr=0.5).param_groups[0].items()
        if key != "params"
    },
    "eps": 0.25,
}
APEXES: dict[str, object] = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.25, "bias_correction": True}
THEIRS: dict[str, object] = {"wd_mult": 1.0, "lr_mult": 1.0, "default_config": {"lr": 3.0}, "max_lr": 0.5}

RULES: tuple[Rule, ...] = (
    FromMegatron(),
    Unstack("model/layers.{w}", "model/layers.{i}.{w}"),
    Split("model/layers.{i}.weight", ["model/layers.{i}.a", "model/layers.{i}.b"]),
    Rename("model/layers.{i}.bias", "model/layers.{i}.c"),
)


def saved(folder: Path, optimizer: TheirOptimizer) -> Path:
    model = {name.removeprefix("model/"): slots["fp32"].bfloat16() for name, slots in optimizer.slots.items()}
    holdfast.save(folder / "run", {"model": model, "optimizer": optimizer}, 7)
    return folder / "run"


def plain_state() -> dict[str, Any]:
    layers = {
        str(number): nn.ParameterDict({"a": torch.zeros(3, 3), "b": torch.zeros(3, 3), "c": torch.zeros(3)})
        for number in range(2)
    }
    model = nn.Module()
    model.layers = nn.ModuleDict(layers)
    named = list(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [parameter for name, parameter in named if not name.endswith("c")], "weight_decay": 0.5},
        {"params": [parameter for name, parameter in named if name.endswith("c")]},
    ]
    return {"model": model, "optimizer": torch.optim.AdamW(groups)}


@pytest.mark.parametrize("hyper", [TORCHS, APEXES], ids=["of torch", "of Apex"])
def test_master_weights_moments_steps_and_groups_become_those_of_a_plain_optimizer(
    tmp_path: Path, hyper: dict[str, object]
) -> None:
    theirs = TheirOptimizer(hyper | THEIRS)
    state = plain_state()
    holdfast.load(saved(tmp_path, theirs), into=state, mapping=RULES)
    for name, parameter in state["model"].named_parameters():
        _, layer, part = name.split(".")
        stacked = theirs.slots[BIAS if part == "c" else WEIGHT]
        for slot, whole in stacked.items():
            rows = {"a": slice(0, 3), "b": slice(3, 6), "c": slice(None)}[part]
            found = parameter if slot == "fp32" else state["optimizer"].state[parameter][slot]
            assert torch.equal(found, whole[int(layer)][rows]), (name, slot)
        assert state["optimizer"].state[parameter].keys() == {"step", "exp_avg", "exp_avg_sq"}
        step = state["optimizer"].state[parameter]["step"]
        assert torch.equal(step, torch.tensor(7.0))
        assert step.dtype == torch.float32
    matrices, vectors = state["optimizer"].param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (1.0, 0.0)
    assert (matrices["lr"], matrices["eps"], matrices["betas"]) == (0.5, 0.25, hyper["betas"])
    assert "wd_mult" not in matrices


def test_an_optimizer_before_its_first_step_has_no_state_that_the_next_step_would_miss_the_count_of(
    tmp_path: Path,
) -> None:
    theirs = TheirOptimizer(TORCHS, steps=None)
    state = plain_state()
    holdfast.load(saved(tmp_path, theirs), into=state, mapping=RULES)
    assert not any(state["optimizer"].state.values())
    for parameter in state["model"].parameters():
        parameter.grad = torch.ones_like(parameter)
    state["optimizer"].step()


def refused(run: Path, into: dict[str, Any], *rules: Rule) -> str:
    with pytest.raises(IncompatibleError) as caught:
        holdfast.load(run, into=into, mapping=rules)
    assert caught.value.code == "incompatible.mapping"
    return str(caught.value)


def test_a_rule_for_the_other_kind_of_optimizer_is_refused(tmp_path: Path) -> None:
    theirs = saved(tmp_path, TheirOptimizer(TORCHS))
    assert "was saved by a job of Megatron" in refused(theirs, plain_state(), ToMegatron())
    holdfast.save(tmp_path / "plain", plain_state(), 1)
    plain = tmp_path / "plain"
    assert "names no group for each parameter" in refused(plain, plain_state(), FromMegatron())
    assert "matches nothing" in refused(plain, plain_state(), FromMegatron("opt"))


def test_the_weights_of_a_plain_optimizer_are_master_weights_and_weights(tmp_path: Path) -> None:
    saved, theirs = plain_state(), TheirOptimizer(TORCHS)
    for parameter in saved["model"].parameters():
        parameter.grad = nn.init.normal_(torch.empty_like(parameter))
    saved["optimizer"].step()
    holdfast.save(tmp_path / "run", saved, 1)
    into = {"model": {name.removeprefix("model/"): slots["fp32"].bfloat16() for name, slots in theirs.slots.items()}}
    rules: list[Rule] = [
        ToMegatron(),
        Fuse(["model/layers.{i}.a", "model/layers.{i}.b"], "model/layers.{i}.weight"),
        Rename("model/layers.{i}.c", "model/layers.{i}.bias"),
        Stack("model/layers.{i}.{w}", "model/layers.{w}"),
    ]
    holdfast.load(tmp_path / "run", into=into | {"optimizer": theirs}, mapping=rules, cast="model")
    layers = [saved["model"].layers[str(number)] for number in range(2)]
    for name, parts in ((BIAS, "c"), (WEIGHT, "ab")):
        for slot, found in theirs.slots[name].items():
            expected = [torch.cat([value_of(saved, layer[part], slot) for part in parts]) for layer in layers]
            assert torch.equal(found, torch.stack(expected)), (name, slot)
        assert torch.equal(into["model"][name.removeprefix("model/")], theirs.slots[name]["fp32"].bfloat16())


def value_of(state: dict[str, Any], parameter: torch.Tensor, slot: str) -> torch.Tensor:
    """The master weight, or a moment."""
    found: torch.Tensor = parameter.detach() if slot == "fp32" else state["optimizer"].state[parameter][slot]
    return found


def test_weights_in_low_precision_are_no_master_weights(tmp_path: Path) -> None:
    saved = plain_state()
    saved["model"].bfloat16()
    holdfast.save(tmp_path / "run", saved, 1)
    assert "is not stored in float32" in refused(tmp_path / "run", plain_state(), ToMegatron())
    saved["model"].float()
    holdfast.save(tmp_path / "other", saved, 1)
    assert "has a master weight already" in refused(tmp_path / "other", plain_state(), ToMegatron(), ToMegatron())
