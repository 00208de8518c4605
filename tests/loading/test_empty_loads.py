"""A load that would leave every tensor as it is, because names are misspelt, is no success."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import holdfast
from holdfast import IncompatibleError
from tests.support.ranks import run_ranks


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = nn.Linear(2, 2)
    holdfast.save(tmp_path / "run", {"model": model, "optimizer": AdamW(model.parameters()), "step": 7}, 7)
    return tmp_path / "run"


def misspelt() -> dict[str, object]:
    model = nn.Linear(2, 2)
    return {"modle": model, "optimizer": AdamW(model.parameters()), "step": 0}


def test_a_load_without_strict_that_matches_no_tensor_is_refused(run: Path) -> None:
    into = misspelt()
    with pytest.raises(IncompatibleError, match=r"modle/{bias, weight}") as caught:
        holdfast.load(run, into, strict=False)
    assert caught.value.code == "incompatible.nothing"
    assert into["step"] == 0
    with pytest.raises(IncompatibleError):
        holdfast.load(run, {"stpe": 0}, strict=False)


def test_a_load_that_is_meant_to_be_empty_is_none_of_ours(run: Path) -> None:
    into = misspelt()
    report = holdfast.load(run, into, strict=False, allow_empty=True)
    assert into["step"] == 7
    assert "modle/weight" in report.missing


def test_a_load_of_some_tensors_or_of_values_alone_is_as_it_was(run: Path) -> None:
    into = {"model": nn.Linear(2, 2), "ema": nn.Linear(2, 2)}
    assert holdfast.load(run, into, strict=False).missing == ("ema/bias", "ema/weight")
    values: dict[str, object] = {"step": 0, "epoch": 1}
    assert holdfast.load(run, values, strict=False).missing == ("epoch",)


def _load_a_stage(path: Path) -> str:
    """Only rank 1 has something that the checkpoint has."""
    name = ("modle", "model")[dist.get_rank()]
    return str(holdfast.load(path, {name: nn.Linear(2, 2)}, strict=False).loaded)


def test_what_another_rank_loads_counts(run: Path) -> None:
    assert run_ranks(2, _load_a_stage, run) == ["()", "('model/bias', 'model/weight')"]


def test_tensors_alone_are_asked_for_tensors(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"weights": {"a": torch.ones(1)}}, 1)
    with pytest.raises(IncompatibleError) as caught:
        holdfast.load(tmp_path / "run", {"weights": {"b": torch.ones(1)}}, strict=False)
    assert caught.value.code == "incompatible.nothing"
