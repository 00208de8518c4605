"""The state of optimizers follows the parameters that a mapping renames, divides and joins."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Optimizer

import holdfast
from holdfast import IncompatibleError
from holdfast.mapping import Cast, Crop, Drop, Fuse, Pad, Rename, Rule, Split, Stack, Transpose, Unstack

State = dict[str, Any]
Make = Callable[[Sequence[nn.Parameter]], Optimizer]


class OwnSteps(AdamW):
    """An optimizer with steps of its own, which may need any slots."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def parameters(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> nn.ParameterDict:
    generator = torch.Generator().manual_seed(seed)
    return nn.ParameterDict(
        {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    )


def trained(model: nn.ParameterDict, make: Make, *, num_steps: int = 3) -> State:
    """A state after steps with gradients that depend on nothing but the parameters."""
    optimizer = make(list(model.values()))
    for _ in range(num_steps):
        for parameter in model.values():
            parameter.grad = parameter.detach().cos()
        optimizer.step(lambda: 1.0)
    return {"model": model, "optimizer": optimizer}


def adamw(group: Sequence[nn.Parameter]) -> Optimizer:
    return AdamW(group, lr=0.01)


def load(folder: Path, saved: State, into: State, *rules: Rule) -> holdfast.LoadReport:
    holdfast.save(folder / "run", saved, 1)
    return holdfast.load(folder / "run", into, mapping=rules)


def refused(folder: Path, saved: State, into: State, *rules: Rule) -> str:
    with pytest.raises(IncompatibleError) as caught:
        load(folder, saved, into, *rules)
    return str(caught.value)


def fresh(shapes: Mapping[str, tuple[int, ...]], make: Make = adamw) -> State:
    model = parameters(shapes, seed=9)
    return {"model": model, "optimizer": make(list(model.values()))}


def slots(state: State, name: str) -> dict[str, Any]:
    return dict(state["optimizer"].state[state["model"][name]])


def test_state_follows_renamed_parameters_modules_and_optimizers(tmp_path: Path) -> None:
    saved = trained(parameters({"a": (2, 3), "b": (3,)}), adamw)
    into = fresh({"x": (2, 3), "b": (3,)})
    rules = [Rename("net", "model"), Rename("model/a", "model/x"), Rename("opt", "optimizer")]
    load(tmp_path, {"net": saved["model"], "opt": saved["optimizer"]}, into, *rules)
    for old, new in (("a", "x"), ("b", "b")):
        assert torch.equal(into["model"][new], saved["model"][old])
        assert {key: value.tolist() for key, value in slots(into, new).items()} == {
            key: value.tolist() for key, value in slots(saved, old).items()
        }
    assert into["optimizer"].param_groups[0]["lr"] == 0.01


def test_moments_are_fused_split_and_transposed_as_their_parameters(tmp_path: Path) -> None:
    shapes = {"0_q": (8, 3), "0_k": (4, 3), "0_v": (4, 3), "0_norm": (3,)}
    saved = trained(parameters(shapes), adamw)
    fused = fresh({"0_qkv": (3, 16), "0_norm": (3,)})
    fuse = Fuse(["model/{l}_q", "model/{l}_k", "model/{l}_v"], "model/{l}_qkv", groups=2)
    load(tmp_path / "fused", saved, fused, fuse, Transpose("model/{l}_qkv"))
    for slot in ("exp_avg", "exp_avg_sq"):
        groups = [slots(saved, f"0_{x}")[slot].reshape(2, -1, 3) for x in "qkv"]
        assert torch.equal(slots(fused, "0_qkv")[slot], torch.cat(groups, 1).reshape(16, 3).T)
    assert slots(fused, "0_qkv")["step"] == 3
    again = fresh(shapes)
    split = Split("model/{l}_qkv", ["model/{l}_q", "model/{l}_k", "model/{l}_v"], shares=(2, 1, 1), groups=2)
    load(tmp_path / "split", fused, again, Transpose("model/{l}_qkv"), split)
    for name in shapes:
        assert torch.equal(again["model"][name], saved["model"][name])
        assert all(torch.equal(value, slots(saved, name)[key]) for key, value in slots(again, name).items())


def test_moments_are_stacked_unstacked_padded_and_cropped_as_their_parameters(tmp_path: Path) -> None:
    layers = {f"{i}_w": (2, 3) for i in range(3)}
    saved = trained(parameters(layers), adamw)
    stacked = fresh({"w": (3, 4, 3)})
    load(tmp_path / "a", saved, stacked, Stack("model/{i}_w", "model/w"), Pad("model/w", size=4, axis=1, fill="keep"))
    first, last = slots(stacked, "w")["exp_avg"][:, :2], slots(stacked, "w")["exp_avg"][:, 2:]
    assert torch.equal(first, torch.stack([slots(saved, name)["exp_avg"] for name in layers]))
    assert not last.any(), "new rows of moments that are built anew are 0, also where parameters keep theirs"
    assert torch.equal(stacked["model"]["w"][:, 2:], parameters({"w": (3, 4, 3)}, seed=9)["w"][:, 2:])
    again = fresh(layers)
    load(tmp_path / "b", stacked, again, Crop("model/w", size=2, axis=1), Unstack("model/w", "model/{i}_w"))
    assert all(torch.equal(slots(again, name)["exp_avg_sq"], slots(saved, name)["exp_avg_sq"]) for name in layers)


def test_rows_that_are_kept_are_kept_in_live_moments_too(tmp_path: Path) -> None:
    saved = trained(parameters({"w": (2, 3)}), adamw)
    into = trained(parameters({"w": (4, 3)}, seed=5), adamw)
    before = slots(into, "w")["exp_avg"].clone()
    load(tmp_path, saved, into, Pad("model/w", size=4, fill="keep"))
    assert torch.equal(slots(into, "w")["exp_avg"], torch.cat([slots(saved, "w")["exp_avg"], before[2:]]))


def test_training_goes_on_alike_after_a_fuse(tmp_path: Path) -> None:
    saved = trained(parameters({"a": (2, 3), "b": (2, 3)}), adamw)
    into = fresh({"ab": (4, 3)})
    load(tmp_path, saved, into, Fuse(["model/a", "model/b"], "model/ab"))
    for state in (saved, into):
        for parameter in state["model"].values():
            parameter.grad = parameter.detach().sin()
        state["optimizer"].step()
    assert torch.equal(into["model"]["ab"], torch.cat([saved["model"]["a"], saved["model"]["b"]]))


def test_dropping_a_parameter_or_a_slot_drops_its_state(tmp_path: Path) -> None:
    saved = trained(parameters({"a": (2, 3), "b": (3,)}), lambda group: OwnSteps(group, amsgrad=True))
    into = fresh({"b": (3,)}, lambda group: OwnSteps(group, amsgrad=True))
    rules = [Drop("model/a"), Drop("optimizer/state/**/max_exp_avg_sq")]
    assert "incompatible.needed_slots" in refused(tmp_path, saved, into, *rules)
    holdfast.load(tmp_path / "run", into, mapping=rules, strict=False)
    assert set(slots(into, "b")) == {"step", "exp_avg", "exp_avg_sq"}
    alone = {"model": parameters({"a": (2, 3), "b": (3,)})}
    assert holdfast.load(tmp_path / "run", alone, mapping=[Drop("optimizer")]).loaded == ("model/a", "model/b")


def test_a_cast_rule_gives_moments_another_dtype_but_never_steps(tmp_path: Path) -> None:
    saved = trained(parameters({"a": (2, 3)}), OwnSteps)
    into = fresh({"a": (2, 3)}, OwnSteps)
    report = load(tmp_path, saved, into, Cast("optimizer/**", "bfloat16"))
    assert torch.equal(slots(into, "a")["exp_avg"], slots(saved, "a")["exp_avg"].bfloat16())
    assert slots(into, "a")["step"].dtype is torch.float32
    assert report.cast == ("optimizer/state/model/a/exp_avg", "optimizer/state/model/a/exp_avg_sq")
    assert into["model"]["a"].dtype is torch.float32


def test_casting_parameters_leaves_their_moments(tmp_path: Path) -> None:
    saved = trained(parameters({"a": (2, 3)}), OwnSteps)
    model = parameters({"a": (2, 3)}).bfloat16()
    into = {"model": model, "optimizer": OwnSteps(list(model.values()))}
    assert load(tmp_path, saved, into, Cast("model", "bfloat16")).cast == ("model/a",)
    assert torch.equal(slots(into, "a")["exp_avg"], slots(saved, "a")["exp_avg"])


# --- what is refused -------------------------------------------------------------------------------------------------


def test_parameters_whose_steps_differ_do_not_become_one(tmp_path: Path) -> None:
    model = parameters({"a": (2, 3), "b": (2, 3)})
    saved = trained(model, adamw)
    saved["optimizer"].state[model["b"]]["step"] += 1
    text = refused(tmp_path, saved, fresh({"ab": (4, 3)}), Fuse(["model/a", "model/b"], "model/ab"))
    assert "incompatible.tied" in text
    assert "'optimizer/state/model/ab/step' and 'optimizer/state/model/b/step', which differ" in text


def test_parameters_of_different_groups_do_not_become_one(tmp_path: Path) -> None:
    model = parameters({"a": (2, 3), "b": (2, 3)})
    saved = trained(model, lambda group: AdamW(group[:1]))
    saved["optimizer"].add_param_group({"params": [model["b"]], "lr": 1.0})
    saved["optimizer"].state[model["b"]] = dict(slots(saved, "a"))
    text = refused(tmp_path, saved, fresh({"ab": (4, 3)}), Fuse(["model/a", "model/b"], "model/ab"))
    assert "incompatible.mapping" in text
    assert "group_of/model%2Fa" in text
    assert "differ" in text


def test_parameters_with_and_without_state_do_not_become_one(tmp_path: Path) -> None:
    model = parameters({"a": (2, 3), "b": (2, 3)})
    saved = trained(model, adamw)
    del saved["optimizer"].state[model["b"]]
    text = refused(tmp_path, saved, fresh({"ab": (4, 3)}), Fuse(["model/a", "model/b"], "model/ab"))
    assert "'model/a' and 'model/b' have different state in optimizer 'optimizer'" in text


def test_a_parameter_and_a_frozen_one_do_not_become_one(tmp_path: Path) -> None:
    saved = trained(parameters({"a": (2, 3), "b": (2, 3)}), lambda group: adamw(group[:1]))
    text = refused(tmp_path, saved, fresh({"ab": (4, 3)}), Fuse(["model/a", "model/b"], "model/ab"))
    assert "'model/a' is a parameter of optimizer 'optimizer', 'model/b' is not" in text


def test_state_of_another_shape_than_its_parameter_is_refused_by_name_until_it_is_dropped(tmp_path: Path) -> None:
    saved = trained(parameters({"a": (4, 6), "b": (4, 6)}), lambda group: Adafactor(group, lr=0.1))
    into = fresh({"ab": (8, 6)}, lambda group: Adafactor(group, lr=0.1))
    fuse = Fuse(["model/a", "model/b"], "model/ab")
    text = refused(tmp_path, saved, into, fuse)
    assert "optimizer state 'optimizer/state/model/a/col_var' has shape" in text
    assert "not its parameter's shape (4, 6)" in text
    renamed = fresh({"x": (4, 6), "b": (4, 6)}, lambda group: Adafactor(group, lr=0.1))
    load(tmp_path / "renamed", saved, renamed, Rename("model/a", "model/x"))
    assert torch.equal(slots(renamed, "x")["row_var"], slots(saved, "a")["row_var"])
    part = refused(tmp_path / "part", saved, into, Drop("optimizer/state/**/*_var"), fuse)
    assert "its steps need the slots col_var, row_var too" in part
    load(tmp_path / "dropped", saved, into, Drop("optimizer/state/**"), fuse)
    assert not slots(into, "ab")
    weights = {"model": parameters({"ab": (8, 6)}, seed=9)}
    holdfast.load(tmp_path / "run", weights, mapping=[Drop("optimizer"), fuse])
    assert torch.equal(weights["model"]["ab"], torch.cat([saved["model"]["a"], saved["model"]["b"]]))


def test_state_in_lists_follows_a_rename_and_is_refused_by_other_rules(tmp_path: Path) -> None:
    saved = trained(parameters({"a": (2, 3)}), lambda group: LBFGS(group, max_iter=2))
    into = fresh({"x": (2, 3)}, LBFGS)
    load(tmp_path, saved, into, Rename("model/a", "model/x"))
    mine, theirs = slots(into, "x"), slots(saved, "a")
    assert all(torch.equal(one, other) for one, other in zip(mine["old_dirs"], theirs["old_dirs"], strict=True))
    text = refused(tmp_path / "other", saved, into, Transpose("model/a"))
    assert "incompatible.mapping" in text
    assert "optimizer/state/model/a/" in text


def test_plain_values_in_state_stay_with_all_parts(tmp_path: Path) -> None:
    saved = trained(parameters({"ab": (4, 3)}), lambda group: SGD(group, lr=0.1, momentum=0.9))
    saved["optimizer"].state[saved["model"]["ab"]]["label"] = "x"
    into = fresh({"a": (2, 3), "b": (2, 3)}, lambda group: SGD(group, lr=0.1, momentum=0.9))
    load(tmp_path, saved, into, Split("model/ab", ["model/a", "model/b"]))
    assert [slots(into, name)["label"] for name in "ab"] == ["x", "x"]
    assert torch.equal(slots(into, "b")["momentum_buffer"], slots(saved, "ab")["momentum_buffer"][2:])
    joined = fresh({"ab": (4, 3)}, lambda group: SGD(group, lr=0.1, momentum=0.9))
    load(tmp_path / "joined", into, joined, Fuse(["model/a", "model/b"], "model/ab"))
    assert slots(joined, "ab")["label"] == "x"
    into["optimizer"].state[into["model"]["b"]]["label"] = "y"
    text = refused(tmp_path / "other", into, joined, Fuse(["model/a", "model/b"], "model/ab"))
    assert "'optimizer/state/model/a/label' and 'optimizer/state/model/b/label' differ" in text
