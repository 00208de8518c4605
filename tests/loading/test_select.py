"""A load with `select` loads only the selected names; everything else in the live state stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

import holdfast
from holdfast import IncompatibleError, PerRank
from holdfast.mapping import Rename
from tests.support.bound import bits

State = dict[str, Any]


class Noted(nn.Linear):
    """A layer with extra state."""

    note: object = "new"

    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


def state(seed: int, *, num_steps: int = 0) -> State:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 3), Noted(3, 3), nn.Linear(3, 1))
    optimizer = AdamW(model.parameters(), lr=0.1 * (seed + 1))
    scheduler = StepLR(optimizer, 1)
    for _ in range(num_steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "rng": torch.Generator().manual_seed(seed),
        "progress": {"epoch": seed, "history": [seed, seed], "pair": (seed, torch.full((2,), seed))},
        "own": PerRank({"cursor": seed}),
    }


def leaves(state: State) -> dict[str, object]:
    """The leaves of a state, piece by piece, so that they can be compared."""
    model, optimizer = state["model"], state["optimizer"]
    found: dict[str, object] = {f"model/{name}": bits(item.detach()) for name, item in model.named_parameters()}
    found["model/1._extra_state"] = model[1].note
    for index, slots in enumerate(optimizer.state.values()):
        found |= {f"optimizer/{index}/{key}": bits(value) for key, value in slots.items()}
    found["optimizer/lr"] = optimizer.param_groups[0]["lr"]
    found["scheduler"] = repr(state["scheduler"].state_dict())
    found["rng"] = bits(state["rng"].get_state())
    progress = state["progress"]
    found |= {"progress/epoch": progress["epoch"], "progress/history": list(progress["history"])}
    found |= {"progress/pair/0": progress["pair"][0], "progress/pair/1": bits(progress["pair"][1])}
    found["own"] = dict(state["own"].value)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    saved = state(1, num_steps=2)
    saved["model"][1].note = "saved"
    holdfast.save(tmp_path / "run", saved, 2)
    return tmp_path / "run"


@pytest.fixture
def saved(run: Path) -> dict[str, object]:
    into = state(0, num_steps=1)
    holdfast.load(run, into)
    return leaves(into)


@pytest.mark.parametrize(
    ("select", "loaded"),
    [
        ("model", ["model/"]),
        ("model/0.*", ["model/0."]),
        ("model/*.bias", ["model/0.bias", "model/1.bias", "model/2.bias"]),
        ("**.bias", ["model/0.bias", "model/1.bias", "model/2.bias"]),
        ("model/1._extra_state", ["model/1._extra_state"]),
        (["model", "!model/1.*"], ["model/0.", "model/2."]),
        (["model/2.weight", "progress/epoch"], ["model/2.weight", "progress/epoch"]),
        ("optimizer", ["optimizer/"]),
        ("scheduler", ["scheduler"]),
        ("rng", ["rng"]),
        ("own", ["own"]),
        ("progress/history", ["progress/history"]),
        ("progress/pair/1", ["progress/pair/1"]),
        ("progress", ["progress/"]),
        ("!model", ["optimizer/", "scheduler", "rng", "progress/", "own"]),
        ("**", [""]),
    ],
    ids=str,
)
def test_what_globs_match_is_loaded_and_nothing_else(
    run: Path, saved: dict[str, object], select: str | list[str], loaded: list[str]
) -> None:
    into = state(0, num_steps=1)
    before = leaves(into)
    report = holdfast.load(run, into, select=select)
    assert (report.missing, report.unexpected) == ((), ())
    after = leaves(into)
    changed = {name for name in after if name.startswith(tuple(loaded))}
    expected = {name: (saved if name in changed else before)[name] for name in after}
    assert after == expected


def test_live_objects_that_are_not_selected_keep_their_identity_and_containers(run: Path) -> None:
    into = state(0)
    before = dict(into)
    pair, history = into["progress"]["pair"], into["progress"]["history"]
    holdfast.load(run, into, select="model/0.weight")
    assert all(into[key] is before[key] for key in into)
    assert into["progress"]["history"] is history
    assert into["progress"]["pair"][1] is pair[1]


def test_strictness_holds_inside_the_selection_alone(run: Path) -> None:
    into = state(0)
    into["model"] = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3))
    into["extra"] = 1
    report = holdfast.load(run, into, select=["model/0.*", "progress/epoch"])
    assert report.loaded == ("model/0.bias", "model/0.weight", "progress/epoch")
    with pytest.raises(IncompatibleError, match=r"incompatible\.names(?s:.*)model/2\.bias"):
        holdfast.load(run, into, select="model")
    with pytest.raises(IncompatibleError, match=r"incompatible\.names.*1 missing from the checkpoint: extra"):
        holdfast.load(run, into, select="extra")
    report = holdfast.load(run, into, select=["model", "extra"], strict=False)
    assert report.missing == ("extra",)
    assert report.unexpected == ("model/1._extra_state", "model/2.bias", "model/2.weight")


def test_what_differs_outside_the_selection_does_not_matter(run: Path) -> None:
    into: State = {
        "model": nn.Sequential(nn.Linear(2, 3), Noted(5, 5, dtype=torch.float64), nn.Linear(3, 1)),
        "optimizer": 3,
        "progress": [torch.zeros(1)],
        "rng": {"now": "a dict"},
    }
    assert holdfast.load(run, into, select=["model/0.*", "model/2.*"]).loaded == (
        "model/0.bias",
        "model/0.weight",
        "model/2.bias",
        "model/2.weight",
    )
    with pytest.raises(IncompatibleError, match=r"incompatible\.dtype"):
        holdfast.load(run, into, select="model")
    with pytest.raises(IncompatibleError, match=r"incompatible\.kind"):
        holdfast.load(run, into, select=["rng"])


@pytest.mark.parametrize(
    ("select", "hint"),
    [
        ("model/0.weigth", "did you mean 'model/0.weight'"),
        ("modle", "did you mean 'model'"),
        (["model", "nothing/like/it"], "'nothing/like/it'"),
        (["model", "!model/head.*"], "'!model/head.*'"),
        ("optimizer/state/model/0.weight", "'optimizer"),
        ("progress/history/0", "did you mean 'progress/history'"),
        ("scheduler/last_epoch", "scheduler"),
        ("own/%rank=0/cursor", "own"),
    ],
    ids=str,
)
def test_a_glob_that_matches_nothing_is_refused_with_what_is_near(
    run: Path, select: str | list[str], hint: str
) -> None:
    into = state(0)
    before = leaves(into)
    with pytest.raises(IncompatibleError) as caught:
        holdfast.load(run, into, select=select)
    assert caught.value.code == "incompatible.select"
    assert hint in str(caught.value)
    assert leaves(into) == before


def test_a_tied_tensor_is_loaded_under_any_of_its_names(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.arange(4.0))
    holdfast.save(tmp_path / "run", {"a": {"w": weight}, "b": {"w": weight}}, 1)
    for name in ("a", "b"):
        live = nn.Parameter(torch.zeros(4))
        report = holdfast.load(tmp_path / "run", {"a": {"w": live}, "b": {"w": live}}, select=name)
        assert torch.equal(live, weight)
        assert report.loaded == ("a/w",)


def test_an_optimizer_alone_is_loaded_for_parameters_that_are_not(tmp_path: Path, run: Path) -> None:
    into = state(0)
    weights = [bits(parameter.detach()) for parameter in into["model"].parameters()]
    holdfast.load(run, into, select="optimizer")
    assert [bits(parameter.detach()) for parameter in into["model"].parameters()] == weights
    assert [slots["step"].item() for slots in into["optimizer"].state.values()] == [2] * 6


def test_globs_are_those_of_the_names_after_a_mapping(run: Path) -> None:
    into = {"net": nn.Sequential(nn.Linear(2, 3)), "epoch": 0}
    rules = [Rename("model", "net"), Rename("progress/epoch", "epoch")]
    report = holdfast.load(run, into, select=["net/0.*", "epoch"], mapping=rules)
    assert report.loaded == ("epoch", "net/0.bias", "net/0.weight")
    assert into["epoch"] == 1


@pytest.mark.parametrize(("select", "error"), [([], ValueError), ("", ValueError), (3, TypeError), ([3], TypeError)])
def test_malformed_globs_are_refused_before_anything_is_read(select: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        holdfast.load("nowhere", {}, select=select)
