"""Mapped, selected and cast loading on several ranks, whatever layout they have."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.optim import AdamW

import holdfast
from holdfast import IncompatibleError
from holdfast.mapping import Fuse, Pad, Rename, Rule, Split, Stack, Transpose, Unstack
from tests.support.ranks import RanksFailedError, run_ranks

HEADS, KV_HEADS, SIZE, WIDTH, WORDS, PADDED = 6, 3, 2, 4, 5, 8


class Single(nn.Module):
    """A layer and a vocabulary as they are written apart."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.q = nn.Linear(WIDTH, HEADS * SIZE)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * SIZE) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 5, bias=False) for _ in range(2))


class Fused(nn.Module):
    """The same with what is used together in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(PADDED, WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * SIZE)
        self.gate_up = nn.Linear(WIDTH, 10, bias=False)


FUSE: list[Rule] = [
    Fuse(["model/q.{w}", "model/k.{w}", "model/v.{w}"], "model/qkv.{w}", groups=KV_HEADS),
    Fuse(["model/gate.weight", "model/up.weight"], "model/gate_up.weight"),
    Pad("model/emb.weight", size=PADDED, fill="zero"),
]
APART: list[Rule] = [
    Split("model/qkv.{w}", ["model/q.{w}", "model/k.{w}", "model/v.{w}"], shares=(2, 1, 1), groups=KV_HEADS),
    Split("model/gate_up.weight", ["model/gate.weight", "model/up.weight"]),
]


def trained(model: nn.Module) -> dict[str, Any]:
    """A state after steps with gradients that depend on nothing but the parameters."""
    optimizer = AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def state_of(model: nn.Module) -> dict[str, Any]:
    return {"model": model, "optimizer": AdamW(model.parameters())}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def gathered(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All tensors of a model and of its optimizer, whole."""
    named = dict(state["model"].named_parameters())
    found = {name: whole(parameter) for name, parameter in named.items()}
    for name, parameter in named.items():
        found |= {f"{name}/{slot}": whole(value) for slot, value in state["optimizer"].state[parameter].items()}
    return found


def fused_by_hand(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for slot in ("", "/exp_avg", "/exp_avg_sq"):
        for w in ("weight", "bias"):
            groups = [
                part.reshape(KV_HEADS, -1, *part.shape[1:]) for part in (tensors[f"{x}.{w}{slot}"] for x in "qkv")
            ]
            joined = torch.cat(groups, 1)
            found[f"qkv.{w}{slot}"] = joined.reshape(-1, *joined.shape[2:])
        found[f"gate_up.weight{slot}"] = torch.cat([tensors[f"{x}.weight{slot}"] for x in ("gate", "up")])
        emb = tensors[f"emb.weight{slot}"]
        found[f"emb.weight{slot}"] = torch.cat([emb, torch.zeros(PADDED - WORDS, WIDTH)])
    return found | {
        f"{name}/step": tensors["q.weight/step"] for name in ("qkv.weight", "qkv.bias", "gate_up.weight", "emb.weight")
    }


def differing(mine: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    names = mine.keys() | expected.keys()
    return sorted(name for name in names if name not in mine or not torch.equal(mine[name], expected[name]))


def load_fused(run: str, expected: dict[str, torch.Tensor], sharded: str) -> tuple[list[str], list[str]]:
    model = Fused()
    if sharded == "fsdp over tp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        parallelize_module(model, mesh["tp"], {"qkv": ColwiseParallel(), "gate_up": ColwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
    elif sharded == "fsdp":
        for layer in (model.emb, model.qkv):
            fully_shard(layer)
        fully_shard(model)
    state = state_of(model)
    report = holdfast.load(run, state, mapping=FUSE)
    return differing(gathered(state), expected), [*report.missing, *report.unexpected]


@pytest.mark.parametrize(
    ("num_ranks", "sharded"), [(1, "fsdp"), (2, "fsdp"), (3, "fsdp"), (2, "plain"), (4, "fsdp over tp")]
)
def test_what_one_process_wrote_apart_is_fused_in_any_layout(tmp_path: Path, num_ranks: int, sharded: str) -> None:
    torch.manual_seed(0)
    saved = trained(Single())
    holdfast.save(tmp_path / "run", saved, 1)
    expected = fused_by_hand(gathered(saved))
    assert run_ranks(num_ranks, load_fused, str(tmp_path / "run"), expected, sharded) == [([], [])] * num_ranks


def load_fused_into_flat_memory(run: str, again: str) -> None:
    warnings.simplefilter("ignore")  # FSDP1 is deprecated, and says so
    model = FullyShardedDataParallel(Fused(), use_orig_params=False, device_id=torch.device("cpu"))
    state = state_of(model)
    holdfast.load(run, state, mapping=FUSE)
    holdfast.save(again, state, 1)


def test_all_fused_weights_of_one_flat_parameter_have_one_count_of_steps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = trained(Single())
    holdfast.save(tmp_path / "run", saved, 1)
    run_ranks(2, load_fused_into_flat_memory, str(tmp_path / "run"), str(tmp_path / "again"))
    view = holdfast.open(tmp_path / "again")
    expected = fused_by_hand(gathered(saved))
    stored = {name.replace("optimizer/state/", "").removeprefix("model/"): view[name][...] for name in view.names()}
    (one,) = [name for name in stored if name.endswith("/step")]  # a flat parameter has one count, of many names
    stored |= {name: stored[one] for name in expected if name.endswith("/step")}
    assert differing(stored, expected) == []


def test_an_unequal_count_of_steps_among_what_is_fused_is_refused_in_flat_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    saved = trained(Single())
    saved["optimizer"].state[saved["model"].up.weight]["step"] += 1
    holdfast.save(tmp_path / "run", saved, 1)
    with pytest.raises(RanksFailedError, match=r"incompatible\.tied"):
        run_ranks(2, load_fused_into_flat_memory, str(tmp_path / "run"), str(tmp_path / "again"))


def save_fused(run: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    model = Fused()
    fully_shard(model.qkv)
    fully_shard(model)
    state = trained(model)
    holdfast.save(run, state, 1)
    return gathered(state)


def test_what_three_ranks_wrote_fused_is_split_in_one_process(tmp_path: Path) -> None:
    stored = run_ranks(3, save_fused, str(tmp_path / "run"))[0]
    into = state_of(Single())
    into["model"].emb = nn.Embedding(PADDED, WIDTH)
    into["optimizer"] = AdamW(into["model"].parameters())
    holdfast.load(tmp_path / "run", into, mapping=APART)
    padded = gathered(into)
    padded |= {name: one[:WORDS] for name, one in padded.items() if name.startswith("emb.weight") and one.dim()}
    expected = stored | {name: torch.cat([one[:WORDS], torch.zeros(3, WIDTH)]) for name, one in stored.items()
                         if name.startswith("emb.weight") and one.dim()}  # fmt: skip
    assert differing(fused_by_hand(padded), expected) == []


Case = tuple[tuple[int, ...], list[Placement]]

MESHES: list[Case] = [
    ((4,), [Shard(0)]),
    ((4,), [Shard(1)]),
    ((2, 2), [Shard(1), Shard(0)]),
    ((2, 2), [Replicate(), Shard(2)]),
]


def load_sharded(run: str, case: int, rules: list[Rule], expected: dict[str, torch.Tensor]) -> list[str]:
    shape, placements = MESHES[case]
    mesh = init_device_mesh("cpu", shape)
    into = {name: distribute_tensor(torch.full_like(one, -1), mesh, placements) for name, one in expected.items()}
    holdfast.load(run, into, mapping=rules)
    found = []
    for name, one in expected.items():
        # The truth, divided by torch, is what a rank must hold.
        local = distribute_tensor(one, mesh, placements).to_local()
        if not torch.equal(into[name].to_local(), local):
            found.append(name)
    return found


@pytest.mark.parametrize("case", range(len(MESHES)), ids=[str(mesh) for mesh in MESHES])
def test_stacked_and_transposed_tensors_are_sharded_in_any_way(tmp_path: Path, case: int) -> None:
    layers = {f"l.{i}.w": torch.arange(30).reshape(5, 6) + 100 * i for i in range(3)}
    layers["cube"] = torch.arange(90).reshape(3, 5, 6)
    holdfast.save(tmp_path / "run", layers, 1)
    stacked = torch.stack([layers[f"l.{i}.w"] for i in range(3)])
    rules: list[Rule] = [
        Stack("l.{i}.w", "w", axis=2),
        Transpose("w", axes=(1, 0, 2)),
        Pad("w", size=8, axis=1, fill="zero"),
        Unstack("cube", "part.{i}", axis=1),
        Stack("part.{i}", "cube", axis=-1),
    ]
    expected = {
        "w": torch.cat([stacked.permute(2, 1, 0), torch.zeros(6, 3, 3, dtype=torch.int64)], 1),
        "cube": layers["cube"].permute(0, 2, 1),
    }
    assert run_ranks(4, load_sharded, str(tmp_path / "run"), case, rules, expected) == [[]] * 4


def keep_padding(run: str) -> list[bool]:
    mesh = init_device_mesh("cpu", (3,))
    live = torch.arange(100.0, 116.0).reshape(8, 2)
    into = distribute_tensor(live.clone(), mesh, [Shard(0)])
    holdfast.load(run, {"w": into}, mapping=[Pad("w", size=8, fill="keep")])
    return [torch.equal(into.full_tensor(), torch.cat([torch.arange(8.0).reshape(4, 2), live[4:]]))]


def test_rows_of_padding_stay_on_the_ranks_that_hold_them(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": torch.arange(8.0).reshape(4, 2)}, 1)
    assert run_ranks(3, keep_padding, str(tmp_path / "run")) == [[True]] * 3


def cast_shards(run: str, saved: torch.Tensor) -> tuple[bool, tuple[str, ...]]:
    mesh = init_device_mesh("cpu", (2,))
    into = distribute_tensor(torch.zeros(7, 3, dtype=torch.bfloat16), mesh, [Shard(1)])
    report = holdfast.load(run, {"w": into}, cast="w")
    return torch.equal(into.full_tensor(), saved.bfloat16()), report.cast


def test_shards_are_cast_on_every_rank(tmp_path: Path) -> None:
    saved = torch.randn(7, 3)
    holdfast.save(tmp_path / "run", {"w": saved}, 1)
    assert run_ranks(2, cast_shards, str(tmp_path / "run"), saved) == [(True, ("w",))] * 2


def load_stage(run: str, select: list[str], cast_globs: list[str]) -> tuple[tuple[str, ...], list[float]]:
    """Each rank holds one of two stages."""
    rank = dist.get_rank()
    stage = {f"{rank}.w": torch.zeros(2, dtype=torch.bfloat16), f"{rank}.b": torch.zeros(2, dtype=torch.bfloat16)}
    report = holdfast.load(run, {"model": stage}, select=select, cast=cast_globs)
    return report.loaded, [one[0].item() for one in stage.values()]


def test_a_glob_may_match_on_one_rank_alone(tmp_path: Path) -> None:
    stages = {f"{rank}.{x}": torch.full((2,), rank + 1.0) for rank in range(2) for x in "wb"}
    holdfast.save(tmp_path / "run", {"model": stages}, 1)
    run = str(tmp_path / "run")
    assert run_ranks(2, load_stage, run, ["model/1.w"], ["model"]) == [((), [0, 0]), (("model/1.w",), [2, 0])]
    assert run_ranks(2, load_stage, run, ["model/*.b"], ["model/0.*", "model/1.*"]) == [
        (("model/0.b",), [0, 1]),
        (("model/1.b",), [0, 2]),
    ]


@pytest.mark.parametrize(
    ("select", "globs", "code"), [("model/1.ww", "model", "select"), ("model", "model/1.ww", "cast")]
)
def test_a_glob_that_matches_on_no_rank_is_refused_on_all(tmp_path: Path, select: str, globs: str, code: str) -> None:
    stages = {f"{rank}.{x}": torch.ones(2) for rank in range(2) for x in "wb"}
    holdfast.save(tmp_path / "run", {"model": stages}, 1)
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, load_stage, str(tmp_path / "run"), [select], ["model", globs])
    errors = cast("dict[int, IncompatibleError]", caught.value.by_rank)
    assert [errors[rank].code for rank in range(2)] == [f"incompatible.{code}"] * 2
    assert all("did you mean 'model" in str(errors[rank]) for rank in range(2))


def load_wrongly(run: str) -> None:
    holdfast.load(run, {"w": torch.zeros(2)}, mapping=[Rename("nothing", "w")])


def test_a_rule_that_does_not_fit_is_refused_on_all_ranks(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"w": torch.ones(2)}, 1)
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(2, load_wrongly, str(tmp_path / "run"))
    errors = cast("dict[int, IncompatibleError]", caught.value.by_rank)
    assert [errors[rank].code for rank in range(2)] == ["incompatible.mapping"] * 2
