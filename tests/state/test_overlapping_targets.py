"""A load or transfer refuses targets that share memory: they would contain whichever bytes came last."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import StateError
from tests.support.models import start_new_job

State = dict[str, torch.Tensor]


def expanded() -> State:
    return {"rows": torch.zeros(1, 4).expand(3, 4)}


def sliding() -> State:
    return {"windows": torch.zeros(8).as_strided((6, 3), (1, 1))}


def two_shapes() -> State:
    memory = torch.zeros(12)
    return {"flat": memory, "matrix": memory.view(3, 4)}


def transposed() -> State:
    memory = torch.zeros(3, 3)
    return {"one": memory, "other": memory.t()}


def shifted() -> State:
    memory = torch.zeros(10)
    return {"head": memory[:6], "tail": memory[5:]}


def crossing() -> State:
    memory = torch.zeros(4, 4)
    return {"row": memory[2], "column": memory[:, 2]}


def two_dtypes() -> State:
    memory = torch.zeros(4)
    return {"bits": memory.view(torch.int32), "numbers": memory}


def fused() -> State:
    """Neighbours, and columns between each other's: nothing in common."""
    memory, rows = torch.zeros(5, 6), torch.zeros(9)
    return {"k": memory[:, :2], "q": memory[:, 2:3], "v": memory[:, 3:], "low": rows[:4], "high": rows[4:]}


def tied() -> State:
    memory = torch.zeros(4)
    return {"one": memory, "other": memory, "once": torch.zeros(4).expand(1, 4), "nothing": torch.zeros(0).expand(3, 0)}


OVERLAPPING = [expanded, sliding, two_shapes, transposed, shifted, crossing, two_dtypes]


def apart(state: State) -> State:
    """The same tensors in memory of their own, of random numbers."""
    made = {name: torch.rand(tensor.shape).to(tensor.dtype) for name, tensor in state.items()}
    if "other" in made and made["other"].shape == made["one"].shape:
        made["other"] = made["one"]
    return made


@pytest.mark.parametrize("make", OVERLAPPING, ids=lambda make: make.__name__)
def test_targets_that_share_memory_are_refused_before_anything_is_changed(tmp_path: Path, make: object) -> None:
    assert callable(make)
    start_new_job()
    live: State = make()
    holdfast.save(tmp_path / "run", {"state": {name: tensor + 1 for name, tensor in live.items()}}, 1)
    for verb in (
        lambda: holdfast.load(tmp_path / "run", {"state": live}),
        lambda: holdfast.transfer({"state": {name: tensor + 1 for name, tensor in live.items()}}, {"state": live}),
    ):
        with pytest.raises(StateError, match="'state/") as refused:
            verb()
        assert (refused.value.code, bool(refused.value.action)) == ("state.overlap", True)
        assert not any(tensor.any() for tensor in live.values())


@pytest.mark.parametrize("make", [fused, tied], ids=lambda make: make.__name__)
def test_views_that_share_no_element_and_ties_are_filled(tmp_path: Path, make: object) -> None:
    assert callable(make)
    start_new_job()
    live: State = make()
    truth = apart(live)
    holdfast.save(tmp_path / "run", truth, 1)
    holdfast.load(tmp_path / "run", live)
    assert [name for name in truth if not torch.equal(truth[name], live[name])] == []


def test_what_is_not_selected_may_share_memory(tmp_path: Path) -> None:
    start_new_job()
    live = two_shapes()
    holdfast.save(tmp_path / "run", apart(live), 1)
    holdfast.load(tmp_path / "run", live, select="flat")
    assert live["flat"].any()


def test_a_slot_that_is_the_parameter_itself_is_filled_with_it(tmp_path: Path) -> None:
    def build() -> tuple[nn.Linear, torch.optim.SGD]:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for parameter in model.parameters():
            optimizer.state[parameter] = {"master": parameter.data}
        return model, optimizer

    start_new_job()
    model, optimizer = build()
    holdfast.save(tmp_path / "run", {"model": model, "optimizer": optimizer}, 1)
    loaded, fresh = build()
    holdfast.load(tmp_path / "run", {"model": loaded, "optimizer": fresh})
    assert torch.equal(loaded.weight, model.weight)
    assert torch.equal(fresh.state[loaded.weight]["master"], model.weight)
