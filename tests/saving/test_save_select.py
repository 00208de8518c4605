"""A save with `select` saves only the selected names, and reads nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

import holdfast
from holdfast import Checkpointer, IncompatibleError, Memory, PerRank, StateError
from tests.support.bound import bits
from tests.support.keepers import end_keepers
from tests.support.ranks import run_ranks

State = dict[str, Any]


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(3, 3)
        self.adapter = nn.Linear(3, 3)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.base(x) + self.adapter(x))


def state(seed: int, *, num_steps: int = 0) -> State:
    torch.manual_seed(seed)
    model = nn.Sequential(Adapted(), Adapted())
    optimizer = AdamW([item for item in model.parameters() if item.requires_grad], lr=0.1 * (1 + seed))
    for _ in range(num_steps):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "progress": {"epoch": seed, "seen": [seed, seed]},
        "counts": Counter(a=seed),
        "own": PerRank({"cursor": seed}),
        "unsavable": object(),
    }


ADAPTERS = ("model/**adapter*", "optimizer")


def names(path: Path) -> list[str]:
    return holdfast.open(path).names()


def test_only_adapters_are_saved_and_loaded_into_another_base(tmp_path: Path) -> None:
    trained, into = state(1, num_steps=2), state(2)
    base = {name: bits(item.detach()) for name, item in into["model"].named_parameters() if "base" in name}
    report = holdfast.save(tmp_path / "run", trained, 1, select=ADAPTERS)
    assert report.num_tensors == 4 + 3 * 4
    assert not [name for name in names(tmp_path / "run") if "base" in name]
    holdfast.load(tmp_path / "run", into, select=ADAPTERS)
    for (name, mine), (_, theirs) in zip(
        trained["model"].named_parameters(), into["model"].named_parameters(), strict=True
    ):
        expected = base[name] if "base" in name else bits(mine.detach())
        assert bits(theirs.detach()) == expected, name
    assert into["optimizer"].param_groups[0]["lr"] == 0.2
    assert len(into["optimizer"].state) == 4
    assert into["progress"]["epoch"] == 2


def test_all_but_what_is_behind_a_mark_is_saved(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", state(1), 1, select=["!unsavable", "!model/**base*", "!progress/seen"])
    view = holdfast.open(tmp_path / "run")
    assert view.value("progress") == {"epoch": 1}
    assert view.value("counts") == Counter(a=1)
    assert view.value("own") == [{"cursor": 1}]
    assert [name for name in view.names() if name.startswith("model/")] == sorted(
        f"model/{number}.adapter.{part}" for number in range(2) for part in ("weight", "bias")
    )


def test_a_selection_without_some_weights_that_its_optimizer_trains_is_refused_by_name(tmp_path: Path) -> None:
    trained = state(1, num_steps=1)
    trained["model"][1].base.bias.requires_grad_(requires_grad=True)
    trained["optimizer"].add_param_group({"params": [trained["model"][1].base.bias]})
    refused = r"state\.select_weights.*1 of the 5 weights .* not selected: model/1\.base\.bias\."
    with pytest.raises(StateError, match=refused):
        holdfast.save(tmp_path / "run", trained, 1, select=ADAPTERS)
    checkpointer = Checkpointer(tmp_path / "run", trained, memory=None, select=ADAPTERS)
    with checkpointer, pytest.raises(StateError, match=refused):
        checkpointer.save(1)
    trained["model"][1].base.bias.requires_grad_(requires_grad=False)
    holdfast.save(tmp_path / "run", trained, 1, select=ADAPTERS)


def test_an_optimizer_alone_names_its_state_after_parameters_that_are_not_saved(tmp_path: Path) -> None:
    trained, into = state(1, num_steps=1), state(2)
    holdfast.save(tmp_path / "run", trained, 1, select="optimizer")
    assert "optimizer/state/model/0.adapter.weight/exp_avg" in names(tmp_path / "run")
    holdfast.load(tmp_path / "run", into, select="optimizer")
    assert len(into["optimizer"].state) == 4


def test_tied_parameters_are_saved_under_the_name_that_is_selected(tmp_path: Path) -> None:
    def tied() -> State:
        model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)})
        model["b"].weight = model["a"].weight
        optimizer = AdamW(model.parameters())
        model["a"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    trained, into = tied(), tied()
    holdfast.save(tmp_path / "run", trained, 1, select=["model/b.**", "optimizer"])
    assert "model/b.weight" in names(tmp_path / "run")
    holdfast.load(tmp_path / "run", into, select=["model/b.**", "optimizer"])
    for mine, theirs in zip(trained["optimizer"].state.values(), into["optimizer"].state.values(), strict=True):
        assert bits(mine["exp_avg"]) == bits(theirs["exp_avg"])


@pytest.mark.parametrize("select", [("model", "!model"), ("!**",), ("model/0.*", "!model/*")])
def test_a_selection_that_leaves_nothing_commits_no_empty_checkpoint(select: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match=r"incompatible\.select.* matches nothing"):
        holdfast.save(tmp_path / "run", state(0), 0, select=select)
    holdfast.save(tmp_path / "run", state(0), 1, select="model")
    with pytest.raises(IncompatibleError, match=r"incompatible\.select.* matches nothing"):
        holdfast.load(tmp_path / "run", state(1), select=select)
    assert holdfast.open(tmp_path / "run").step == 1


def test_entries_of_a_list_are_selected_together(tmp_path: Path) -> None:
    listed: State = {"layers": [nn.Linear(1, 1), nn.Linear(1, 1)], "pair": (1, torch.ones(2)), "x": 1}
    holdfast.save(tmp_path / "bias", listed, 1, select="layers/**bias")
    assert names(tmp_path / "bias") == ["layers/0/bias", "layers/1/bias"]
    holdfast.load(tmp_path / "bias", listed, select="layers/**bias")
    for select in ("layers/1", "pair/0"):
        with pytest.raises(StateError) as caught:
            holdfast.save(tmp_path / "run", listed, 1, select=select)
        assert caught.value.code == "state.select"


def test_a_glob_that_matches_nothing_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match=r"'modle'.*'model'") as caught:
        holdfast.save(tmp_path / "run", state(1), 1, select=["modle", "optimizer"])
    assert caught.value.code == "incompatible.select"
    assert not (tmp_path / "run").exists()


def _stage(path: Path) -> list[str]:
    """Each rank has a part of the model of its own."""
    rank = dist.get_rank()
    parts = {f"stage{rank}": nn.Linear(2, 2), "step": 1}
    holdfast.save(path, parts, 1, select=["stage1/weight", "step"])
    with pytest.raises(IncompatibleError):
        holdfast.save(path, parts, 2, select=["stage1", "stage2"])
    return names(path)


def test_a_glob_may_match_on_another_rank(tmp_path: Path) -> None:
    assert run_ranks(2, _stage, tmp_path / "run") == [["stage1/weight"]] * 2


def test_modules_that_hide_state_are_left_alone_where_nothing_of_them_is_selected(tmp_path: Path) -> None:
    class Packed(nn.Linear):
        def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
            raise AssertionError(prefix)

    def model() -> State:
        return {"model": nn.ModuleDict({"base": Packed(2, 2), "adapter": nn.Linear(2, 2)})}

    trained, into = model(), model()
    with pytest.raises(StateError) as caught:
        holdfast.save(tmp_path / "run", trained, 1, select="model/base.weight")
    assert caught.value.code == "state.module_hooks"
    holdfast.save(tmp_path / "run", trained, 1, select="model/adapter.*")
    holdfast.load(tmp_path / "run", into, select="model/adapter.*")
    assert bits(into["model"]["adapter"].weight.detach()) == bits(trained["model"]["adapter"].weight.detach())


def test_tensors_of_unknown_kinds_may_stay_where_nothing_of_them_is_selected(tmp_path: Path) -> None:
    def mixed(fill: float) -> State:
        module = nn.Module()
        module.weight = nn.Parameter(torch.ones(2))
        module.lazy = nn.UninitializedParameter()
        return {"module": module, "sparse": torch.eye(2).to_sparse(), "plain": torch.full((2,), fill)}

    into = mixed(0)
    holdfast.save(tmp_path / "run", mixed(1), 1, select=["plain", "module/weight"])
    holdfast.load(tmp_path / "run", into, select=["plain", "module/weight"])
    assert into["plain"].tolist() == [1, 1]


@pytest.fixture(params=["memory", "storage"])
def node(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Memory | None]:
    """A folder for snapshots; its keepers end with the test."""
    (tmp_path / "node").mkdir()
    yield Memory(node_dir=tmp_path / "node") if request.param == "memory" else None
    end_keepers(tmp_path / "node")


def test_a_checkpointer_saves_and_restores_what_is_selected(node: Memory | None, tmp_path: Path) -> None:
    trained, into = state(1, num_steps=1), state(2)
    with Checkpointer(tmp_path / "run", trained, memory=node, select=ADAPTERS) as checkpointer:
        checkpointer.save(5)
    with Checkpointer(tmp_path / "run", into, memory=node, select=ADAPTERS) as checkpointer:
        assert checkpointer.restore().next_step == 6
        checkpointer.save(6)
    assert bits(into["model"][0].adapter.weight.detach()) == bits(trained["model"][0].adapter.weight.detach())
    assert bits(into["model"][0].base.weight.detach()) != bits(trained["model"][0].base.weight.detach())
    assert not [name for name in names(tmp_path / "run") if "base" in name]


def test_a_module_instead_of_a_dict_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="Linear") as caught:
        Checkpointer(tmp_path / "run", nn.Linear(1, 1))  # type: ignore[arg-type]
    assert caught.value.code == "state.root"
    assert '{"model": model}' in caught.value.action
