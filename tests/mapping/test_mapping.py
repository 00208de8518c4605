"""The effect of each rule of a mapping, and the mappings that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import holdfast
from holdfast import IncompatibleError
from holdfast.mapping import Cast, Crop, Drop, Fuse, Pad, Rename, Rule, Split, Stack, Transpose, Unstack

State = dict[str, Any]


class Run:
    """A run with one checkpoint of a state, in a folder."""

    def __init__(self, folder: Path, state: State) -> None:
        self.path = folder / "run"
        holdfast.save(self.path, state, 1)

    def load(self, into: State, *rules: Rule, **options: Any) -> holdfast.LoadReport:
        return holdfast.load(self.path, into, mapping=rules, **options)

    def refused(self, into: State, *rules: Rule) -> IncompatibleError:
        with pytest.raises(IncompatibleError) as caught:
            self.load(into, *rules)
        assert all(bool((part == 0).all()) for part in tensors_of(into)), "a refused load changes nothing"
        return caught.value


def tensors_of(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    return [part for item in state.values() for part in tensors_of(item)] if isinstance(state, dict) else []


def numbered(*shape: int, first: int = 1) -> torch.Tensor:
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def zeros(*names: str, shape: Sequence[int] = (2, 3)) -> State:
    return {name: torch.zeros(*shape) for name in names}


# --- names -----------------------------------------------------------------------------------------------------------


def test_renaming_follows_fields_and_keeps_what_lies_below(tmp_path: Path) -> None:
    saved = {"net": {f"layers.{i}.ln.gamma": numbered(2, 3, first=10 * i) for i in range(3)}, "epoch": 7}
    into: State = {"model": zeros(*(f"blocks.{i}.norm.weight" for i in range(3))), "progress": {"epoch": 0}}
    rules = [
        Rename("net", "model"),
        Rename("model/layers.{i}.ln.gamma", "model/blocks.{i}.norm.weight"),
        Rename("epoch", "progress/epoch"),
    ]
    report = Run(tmp_path, saved).load(into, *rules)
    assert [into["model"][f"blocks.{i}.norm.weight"][0, 0].item() for i in range(3)] == [0, 10, 20]
    assert into["progress"]["epoch"] == 7
    assert report.loaded == ("model/blocks.0.norm.weight", "model/blocks.1.norm.weight", "model/blocks.2.norm.weight",
                             "progress/epoch")  # fmt: skip


def test_rules_apply_in_order_so_names_can_be_swapped(tmp_path: Path) -> None:
    run = Run(tmp_path, {"a": numbered(2, 3), "b": -numbered(2, 3)})
    into = zeros("a", "b")
    run.load(into, Rename("a", "c"), Rename("b", "a"), Rename("c", "b"))
    assert torch.equal(into["a"], -numbered(2, 3))
    assert torch.equal(into["b"], numbered(2, 3))


def test_two_containers_can_become_one(tmp_path: Path) -> None:
    run = Run(tmp_path, {"body": {"x": numbered(2, 3)}, "head": {"y": -numbered(2, 3)}})
    into: State = {"model": zeros("x", "y")}
    run.load(into, Rename("body", "model"), Rename("head", "model"))
    assert torch.equal(into["model"]["y"], -numbered(2, 3))


def test_a_module_loads_what_a_plain_dict_was_saved_as(tmp_path: Path) -> None:
    layer = nn.Linear(3, 2)
    run = Run(tmp_path, {"weights": {f"module.{name}": item for name, item in layer.state_dict().items()}})
    into = nn.Linear(3, 2)
    run.load({"model": into}, Rename("weights/module.{name}", "model/{name}"))
    assert torch.equal(into.weight, layer.weight)
    assert torch.equal(into.bias, layer.bias)


def test_what_is_dropped_need_not_be_in_the_live_state(tmp_path: Path) -> None:
    run = Run(tmp_path, {"model": {"x": numbered(2, 3), "ema.x": numbered(4)}, "rng": [1, {"a": 2}], "lr": 0.1})
    into: State = {"model": zeros("x")}
    report = run.load(into, Drop("**ema.*"), Drop("rng"), Drop("lr"))
    assert torch.equal(into["model"]["x"], numbered(2, 3))
    assert report.loaded == ("model/x",)


# --- ties ------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A vocabulary that is tied to the head, or not."""

    def __init__(self, size: int, *, tie: bool) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(size, 2), nn.Linear(2, size, bias=False)
        if tie:
            self.head.weight = self.emb.weight


def test_a_tied_tensor_stays_tied_when_a_rule_changes_it_under_all_its_names(tmp_path: Path) -> None:
    saved, into = Tied(3, tie=True), Tied(5, tie=True)
    before = into.emb.weight.detach().clone()
    Run(tmp_path, {"m": saved}).load({"m": into}, Pad("m/{x}.weight", size=5, fill="keep"))
    assert into.head.weight is into.emb.weight
    assert torch.equal(into.emb.weight, torch.cat([saved.emb.weight, before[3:]]))


def test_a_rule_for_one_name_of_a_tied_tensor_leaves_the_other_one(tmp_path: Path) -> None:
    saved = Tied(3, tie=True)
    run = Run(tmp_path, {"m": saved})
    for changed, kept in (("emb", "head"), ("head", "emb")):
        into = {f"{changed}.weight": torch.zeros(2, 2), f"{kept}.weight": torch.zeros(3, 2)}
        run.load({"m": into}, Crop(f"m/{changed}.weight", size=2))
        assert torch.equal(into[f"{changed}.weight"], saved.emb.weight[:2])
        assert torch.equal(into[f"{kept}.weight"], saved.emb.weight)


def test_a_tied_tensor_lives_on_when_one_of_its_names_is_dropped(tmp_path: Path) -> None:
    saved = Tied(3, tie=True)
    run = Run(tmp_path, {"m": saved})
    for kept, dropped in (("emb", "head"), ("head", "emb")):
        into = {f"{kept}.weight": torch.zeros(3, 2)}
        run.load({"m": into}, Drop(f"m/{dropped}.weight"))
        assert torch.equal(into[f"{kept}.weight"], saved.emb.weight)


# --- tensors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_groups", [1, 2, 4], ids="{} key-value heads".format)
def test_grouped_query_attention_is_fused_per_key_value_head_and_split_again(tmp_path: Path, num_groups: int) -> None:
    num_heads, size, width = 4, 2, 3
    q, k, v = (numbered(n * size, width, first=1000 * n) for n in (num_heads, num_groups, num_groups))
    v = -v
    groups = [torch.cat([part.reshape(num_groups, -1, width)[i] for part in (q, k, v)]) for i in range(num_groups)]
    fused = torch.cat(groups)
    names = ["{l}.q", "{l}.k", "{l}.v"]
    into: State = {"0.qkv": torch.zeros_like(fused)}
    run = Run(tmp_path / "single", {"0.q": q, "0.k": k, "0.v": v})
    run.load(into, Fuse(names, "{l}.qkv", groups=num_groups))
    assert torch.equal(into["0.qkv"], fused)
    apart = {"0.q": torch.zeros_like(q), "0.k": torch.zeros_like(k), "0.v": torch.zeros_like(v)}
    shares = (num_heads // num_groups, 1, 1)
    run = Run(tmp_path / "fused", {"0.qkv": fused})
    run.load(apart, Split("{l}.qkv", names, shares=shares, groups=num_groups))
    assert torch.equal(apart["0.q"], q)
    assert torch.equal(apart["0.k"], k)
    assert torch.equal(apart["0.v"], v)
    run.load(apart, Split("{l}.qkv", names, shares=(len(q), len(k), len(v)), groups=num_groups))
    assert torch.equal(apart["0.v"], v)


def test_gate_and_up_are_fused_and_split_along_any_axis(tmp_path: Path) -> None:
    gate, up = numbered(3, 4), -numbered(3, 4)
    for axis in (0, 1, -1):
        fused = torch.zeros_like(torch.cat([gate, up], axis))
        folder = tmp_path / str(axis)
        Run(folder, {"gate": gate, "up": up}).load({"both": fused}, Fuse(["gate", "up"], "both", axis=axis))
        assert torch.equal(fused, torch.cat([gate, up], axis))
        into = zeros("gate", "up", shape=(3, 4))
        Run(folder / "back", {"both": fused}).load(into, Split("both", ["gate", "up"], axis=axis))
        assert torch.equal(into["gate"], gate)
        assert torch.equal(into["up"], up)


def test_single_layers_become_stacked_ones_and_back(tmp_path: Path) -> None:
    layers = {
        f"l.{i}.{w}": numbered(2, 3, first=100 * i) * sign for i in range(3, 15) for w, sign in (("a", 1), ("b", -1))
    }
    for axis in (0, 1, 2, -1):
        into = {w: torch.zeros(torch.stack([torch.zeros(2, 3)] * 12, axis).shape) for w in "ab"}
        run = Run(tmp_path / f"single{axis}", dict(layers))
        run.load(into, Stack("l.{i}.{w}", "{w}", axis=axis, first=3))
        assert torch.equal(into["b"], torch.stack([layers[f"l.{i}.b"] for i in range(3, 15)], axis))
        single = zeros(*layers)
        Run(tmp_path / f"stacked{axis}", into).load(single, Unstack("{w}", "l.{i}.{w}", axis=axis, first=3))
        assert all(torch.equal(single[name], layers[name]) for name in layers)


def test_numbers_count_only_where_they_are_numbers(tmp_path: Path) -> None:
    run = Run(
        tmp_path, {"l.0": numbered(2, 3), "l.1": numbered(2, 3), "l.norm": numbered(2, 3), "l.02": numbered(2, 3)}
    )
    into = {"l": torch.zeros(2, 2, 3), **zeros("l.norm", "l.02")}
    run.load(into, Stack("l.{i}", "l"))
    assert torch.equal(into["l"], torch.stack([numbered(2, 3)] * 2))


def test_a_vocabulary_grows_by_rows_that_stay_or_are_zero_and_shrinks(tmp_path: Path) -> None:
    run = Run(tmp_path, {"emb": numbered(3, 2)})
    into = {"emb": torch.full((5, 2), 9.0)}
    run.load(into, Pad("emb", size=5, fill="keep"))
    assert torch.equal(into["emb"], torch.cat([numbered(3, 2), torch.full((2, 2), 9.0)]))
    run.load(into, Pad("emb", size=5, fill="zero"))
    assert torch.equal(into["emb"], torch.cat([numbered(3, 2), torch.zeros(2, 2)]))
    less = {"emb": torch.zeros(2, 2)}
    run.load(less, Crop("emb", size=2))
    assert torch.equal(less["emb"], numbered(3, 2)[:2])
    same = {"emb": torch.zeros(3, 2)}
    run.load(same, Pad("emb", size=3, fill="zero"), Crop("emb", size=3))
    assert torch.equal(same["emb"], numbered(3, 2))


def test_tensors_are_transposed_into_memory_of_any_strides(tmp_path: Path) -> None:
    stored = numbered(2, 3, 4)
    run = Run(tmp_path, {"w": stored})
    into = {"w": torch.zeros(4, 3, 2).permute(2, 1, 0).permute(1, 2, 0)}
    run.load(into, Transpose("w", axes=(1, 2, 0)))
    assert torch.equal(into["w"], stored.permute(1, 2, 0))


def test_rotary_halves_and_pairs_are_a_split_and_a_fuse(tmp_path: Path) -> None:
    num_heads, size = 3, 8
    pairs = numbered(num_heads * size, 2)
    halves = pairs.view(num_heads, size // 2, 2, 2).transpose(1, 2).reshape(num_heads * size, 2)
    into = {"q": torch.zeros_like(halves)}
    even_and_odd = Split("q", ["even", "odd"], groups=num_heads * size // 2)
    Run(tmp_path, {"q": pairs}).load(into, even_and_odd, Fuse(["even", "odd"], "q", groups=num_heads))
    assert torch.equal(into["q"], halves)


def test_a_large_tensor_is_fused_transposed_and_cast_in_blocks(tmp_path: Path) -> None:
    parts = [torch.randn(1500, 1000, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    run = Run(tmp_path, {str(i): part for i, part in enumerate(parts)})
    into = {"w": torch.zeros(1000, 4500, dtype=torch.bfloat16)}
    report = run.load(into, Fuse(["0", "1", "2"], "w", groups=5), Transpose("w"), cast="w")
    expected = torch.cat([part.reshape(5, 300, 1000) for part in parts], 1).reshape(4500, 1000)
    assert torch.equal(into["w"], expected.bfloat16().T)
    assert report.cast == ("w",)
    assert report.needed_nbytes == 4500 * 1000 * 4


def test_loading_with_rules_keeps_the_identity_of_live_tensors(tmp_path: Path) -> None:
    into = nn.Linear(2, 4)
    weight = into.weight
    Run(tmp_path, {"m": {"a": numbered(2, 2), "b": numbered(2, 2), "bias": numbered(4)}}).load(
        {"m": into}, Fuse(["m/a", "m/b"], "m/weight")
    )
    assert into.weight is weight
    assert torch.equal(weight.detach(), torch.cat([numbered(2, 2)] * 2))


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_cast_to_a_dtype_that_is_no_text_says_how_to_name_it() -> None:
    with pytest.raises(TypeError, match=r"'bfloat16'.*not by torch\.bfloat16"):
        Cast("model/q", torch.bfloat16)  # type: ignore[arg-type]


def test_a_pattern_that_matches_no_flat_name_was_asked_whether_it_meant_no_name_at_all(tmp_path: Path) -> None:
    torch.save({"norm.weight": numbered(2)}, tmp_path / "weights.pt")
    with pytest.raises(IncompatibleError, match="matches nothing that this kind of rule can change") as caught:
        holdfast.load(tmp_path / "weights.pt", {"model": nn.Linear(2, 2)}, mapping=[Rename("{x}", "model/{x}")])
    assert "did you mean ''" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (Rename("model/qq", "x"), ["'model/qq' matches nothing", "did you mean 'model/q'"]),
        (Rename("qq", "x"), ["'qq' matches nothing"]),
        (Rename("q", "x"), ["did you mean 'model/q'"]),
        (Rename("l.{i}.a", "l.{i}"), ["did you mean 'model/l.{i}.a'"]),
        (Drop("model/l"), ["did you mean 'model/l.{x:**}'"]),
        (Drop("**.qq"), ["matches nothing"]),
        (Cast("model/count", "bfloat16"), ["matches nothing"]),
        (Cast("model/count", "int32"), ["int64", "to int32 would change the kind"]),
        (Cast("model/q", "int64"), ["float32", "to int64 would change the kind"]),
        (Split("model/q", ["model/a", "model/b", "model/c"]), ["(4, 3)", "4 is not a multiple of 3"]),
        (Split("model/q", ["model/a", "model/b"], groups=4), ["4 is not a multiple of 8"]),
        (Split("model/q", ["model/a", "model/b"], axis=2), ["(4, 3) has no axis 2"]),
        (Split("model/q", ["model/k", "model/b"]), ["two entries would get the name 'model/k'"]),
        (Split("model/q", ["model/a", "model/lr"]), ["two entries would get the name 'model/lr'"]),
        (Fuse(["model/q", "model/k"], "model/qk", axis=1), ["(4, 3), (2, 3) differ in more than axis 1"]),
        (Fuse(["model/q", "model/k"], "model/qk", groups=4), ["cannot be divided into 4 groups"]),
        (Fuse(["model/q", "model/half"], "model/qk"), ["bfloat16, float32 differ", "Cast"]),
        (Fuse(["model/q", "model/z"], "model/qk"), ["'model/z' matches nothing"]),
        (
            Fuse(["model/l.{i}.a", "model/l.{i}.b"], "model/l.{i}.ab"),
            ["'model/l.1.ab'", "'model/l.{i}.b' matches nothing"],
        ),
        (Fuse(["model/q", "model/k"], "model/half"), ["two entries would get the name 'model/half'"]),
        (Stack("model/l.{i}.a", "model/l.a", first=1), ["the numbers 0, 1, not 1 to 2"]),
        (Stack("model/m.{i}", "model/m"), ["the numbers 0, 2, not 0 to 1"]),
        (Stack("model/n.{i}", "model/n"), ["shapes (1,), (2,) differ"]),
        (Stack("model/l.{i}.a", "model/l.a", axis=3), ["shape (1,) cannot be stacked along axis 3"]),
        (Unstack("model/q", "model/l.{i}.b"), ["two entries would get the name 'model/l.0.b'"]),
        (Transpose("model/q", axes=(0, 2, 1)), ["(0, 2, 1) are not the axes of shape (4, 3)"]),
        (Pad("model/q", size=3, fill="zero"), ["(4, 3) is not shorter than (3, 3)"]),
        (Crop("model/q", size=5), ["(4, 3) is not longer than (5, 3)"]),
        (Crop("model/q", size=1, axis=-3), ["no axis -3"]),
        (Rename("model/{x}", "model/same"), ["would get the same name 'model/same'"]),
        (Rename("model/q", "model/k"), ["'model/k', 'model/q' would get the same name 'model/k'"]),
        (Rename("model/lr", "model/k"), ["would get the same name 'model/k'"]),
    ],
    ids=repr,
)
def test_an_impossible_or_ambiguous_rule_is_refused_and_says_why(tmp_path: Path, rule: Rule, words: list[str]) -> None:
    model = {
        "q": numbered(4, 3), "k": numbered(2, 3), "half": numbered(4, 3).bfloat16(), "count": numbered(2).long(),
        "l.0.a": numbered(1), "l.1.a": numbered(1), "l.0.b": numbered(1), "m.0": numbered(1), "m.2": numbered(1),
        "n.0": numbered(1), "n.1": numbered(2), "lr": 0.1,
    }  # fmt: skip
    error = Run(tmp_path, {"model": model}).refused({"model": zeros("q", shape=(4, 3))}, rule)
    assert error.code == "incompatible.mapping"
    assert f"Rule 1, {rule!r}" in str(error)
    assert all(word in str(error) for word in words), str(error)


def test_a_rule_whose_names_a_rule_before_took_matches_nothing(tmp_path: Path) -> None:
    error = Run(tmp_path, {"a": numbered(2, 3)}).refused(zeros("c"), Rename("a", "b"), Rename("a", "c"))
    assert "Rule 2, Rename(names='a', to='c'): 'a' matches nothing" in str(error)


def test_what_a_mapping_gets_wrong_is_a_difference_to_the_live_state(tmp_path: Path) -> None:
    run = Run(tmp_path, {"a": numbered(2, 3), "b": numbered(2, 3)})
    error = run.refused(zeros("x", "b"), Rename("a", "y"))
    assert (error.code, error.tensor) == ("incompatible.names", "x")
    assert "1 missing from the checkpoint: x" in str(error)
    assert "y" in str(error)
    error = run.refused(zeros("w"), Fuse(["a", "b"], "w"))
    assert error.code == "incompatible.shape"
    assert "(2, 3) here, (4, 3) in the checkpoint" in str(error)


def test_parts_of_a_split_that_nobody_expects_are_unexpected(tmp_path: Path) -> None:
    run = Run(tmp_path, {"qkv": numbered(6, 1)})
    error = run.refused(zeros("q", "k", shape=(2, 1)), Split("qkv", ["q", "k", "v"]))
    assert error.code == "incompatible.names"
    assert "v" in str(error)
    report = run.load(zeros("q", "k", shape=(2, 1)), Split("qkv", ["q", "k", "v"]), Drop("v"))
    assert report.loaded == ("k", "q")


def test_what_is_no_rule_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, {"a": numbered(2, 3)})
    with pytest.raises(TypeError, match=r"is not a rule$"):
        run.load(zeros("a"), cast("Rule", ("a", "b")))
