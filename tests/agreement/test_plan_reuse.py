"""Later saves: no plan is exchanged, changes are noticed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import StateError
from tests.agreement import loopback
from tests.agreement.loopback import NO_RIGHT
from tests.support import nursery
from tests.support.ranks import run_ranks


def test_later_saves_exchange_no_plan(tmp_path: Path) -> None:
    """Counted by the kernel, on the loopback of a network namespace of the ranks' own."""
    counter = nursery.start(loopback.main, tmp_path / "counts", err=tmp_path / "err")
    status = counter.wait(110)
    if NO_RIGHT in counter.err:
        pytest.skip(counter.err.strip())
    assert status == 0, counter.err
    first, *later = json.loads((tmp_path / "counts").read_text())
    assert first > 30_000  # the names of 3,000 tensors
    assert max(later) < 16_000  # a few messages with their acknowledgements, whatever the number of tensors


def _save_with_a_new_tensor_on_one_rank(folder: str) -> list[dict[str, list[float]]]:
    rank = dist.get_rank()
    state: dict[str, object] = {"common": torch.arange(4.0)}
    holdfast.save(f"{folder}/run", state, 1)
    holdfast.save(f"{folder}/run", state, 2)
    if rank == 1:
        state["late"] = torch.full((3,), 7.0)
    holdfast.save(f"{folder}/run", state, 3)
    state["common"] = torch.arange(5.0)
    holdfast.save(f"{folder}/run", state, 4)
    return [
        {name: view[name][...].tolist() for name in view.names()}
        for view in (holdfast.open(f"{folder}/run@step={step}") for step in (2, 3, 4))
    ]


def test_a_layout_that_changes_on_one_rank_is_planned_anew_on_all(tmp_path: Path) -> None:
    common, late = list(map(float, range(4))), [7.0] * 3
    for found in run_ranks(2, _save_with_a_new_tensor_on_one_rank, str(tmp_path)):
        assert found == [
            {"common": common},
            {"common": common, "late": late},
            {"common": [*common, 4.0], "late": late},
        ]


def _save_growing_values(folder: str) -> list[object]:
    for step in range(3):
        holdfast.save(f"{folder}/run", {"w": torch.ones(2), "log": "x" * 5000 * step}, step)
    return [holdfast.open(f"{folder}/run@step={step}").value("log") for step in range(3)]


def test_values_that_outgrow_their_room_get_more(tmp_path: Path) -> None:
    for found in run_ranks(2, _save_growing_values, str(tmp_path)):
        assert found == ["", "x" * 5000, "x" * 10000]


def _save_in_roles(folder: str) -> dict[str, list[float]]:
    """Ranks 0 and 2 are actors, ranks 1 and 3 critics: two groups, two runs, at the same time."""
    rank = dist.get_rank()
    actors, critics = dist.new_group([0, 2]), dist.new_group([1, 3])
    role, group = ("actor", actors) if rank in (0, 2) else ("critic", critics)
    mine = {"shared": torch.full((2,), float(rank % 2)), f"own-{rank}": torch.full((1,), float(rank))}
    for step in range(2):
        holdfast.save(f"{folder}/{role}", mine, step, group=group)
    mine = {name: torch.zeros_like(tensor) for name, tensor in mine.items()}
    holdfast.load(f"{folder}/{role}", mine, group=group)
    return {name: tensor.tolist() for name, tensor in mine.items()}


def test_groups_of_ranks_save_into_runs_of_their_own(tmp_path: Path) -> None:
    found = run_ranks(4, _save_in_roles, str(tmp_path))
    assert found == [{"shared": [float(r % 2)] * 2, f"own-{r}": [float(r)]} for r in range(4)]


def _call_from_outside(folder: str) -> str | None:
    group = dist.new_group([0])
    try:
        holdfast.save(f"{folder}/run", {"w": torch.ones(1)}, 0, group=group)
    except (holdfast.ConfigurationError, ValueError, TypeError) as error:
        return getattr(error, "code", str(error))
    return None


def test_a_rank_outside_the_group_is_told(tmp_path: Path) -> None:
    inside, outside = run_ranks(2, _call_from_outside, str(tmp_path))
    assert inside is None
    assert outside == "config.not_in_group"


def _save_dicts_with_other_keys(folder: str) -> dict[str, object]:
    """Dicts that hold a tensor on some rank: ranks hold different parts of them."""
    rank = dist.get_rank()
    stage: dict[str, object] = {"common": 1, f"rank-{rank}": rank}
    state: dict[str, object] = {"stage": stage | ({"w": torch.ones(2)} if rank else {}), "log": {"b": 1, "a": {}}}
    if rank:
        state["log"] = {"a": {}, "b": 1}  # another order is no other key
    for step in range(2):
        holdfast.save(f"{folder}/run", state, step)
    state["stage"] = {"common": 0, f"rank-{rank}": -1} | ({"w": torch.zeros(2)} if rank else {})
    holdfast.load(f"{folder}/run", state)
    loaded = state["stage"]
    assert isinstance(loaded, dict)
    if rank:
        assert loaded.pop("w").tolist() == [1, 1]
    united = holdfast.open(f"{folder}/run").tree("stage")
    assert isinstance(united, dict)
    return {"mine": loaded, "all": sorted(united)}


def test_dicts_with_tensors_and_other_keys_on_other_ranks_are_united(tmp_path: Path) -> None:
    found = run_ranks(2, _save_dicts_with_other_keys, str(tmp_path))
    everything = ["common", "rank-0", "rank-1", "w"]
    assert found == [{"mine": {"common": 1, f"rank-{r}": r}, "all": everything} for r in range(2)]


def _save_values_with_other_keys(folder: str, which: str, through: str) -> tuple[str, str]:
    rank = dist.get_rank()
    dicts: dict[str, object] = {
        "other keys": {f"shard{rank}": 100 + rank},
        "empty on one rank": {"x": 1} if rank else {},
        "nested": {"of": [{"epoch": 1, f"shard{rank}": None}]},
        "arrays": {f"shard{rank}": np.ones(2)},
    }
    state: dict[str, object] = {"w": torch.ones(1), "seen": dicts[which]}
    try:
        if through == "save":
            holdfast.save(f"{folder}/run", state, 1)
        else:
            with holdfast.Checkpointer(f"{folder}/run", state, memory=None) as checkpointer:
                checkpointer.save(1)
    except StateError as error:
        return error.code, error.action
    return "saved", ""


@pytest.mark.parametrize("which", ["other keys", "empty on one rank", "nested", "arrays"])
@pytest.mark.parametrize("through", ["save", "Checkpointer"])
def test_dicts_of_values_with_other_keys_on_other_ranks_are_not_silently_united(
    tmp_path: Path, which: str, through: str
) -> None:
    for code, action in run_ranks(2, _save_values_with_other_keys, str(tmp_path), which, through):
        assert code == "state.diverged"
        assert "holdfast.PerRank" in action
