"""Scripts that were written for DCP run with `holdfast.dcp` in its place, on several ranks, and load on others."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import holdfast
from holdfast import SaveReport, dcp
from holdfast.dcp import AsyncSaveResponse
from tests.dcp.dcp_scripts import contents, gathered, load_app, load_parts, save_app, save_parts, trained
from tests.support.ranks import run_ranks


def _save_app(folder: str) -> dict[str, object]:
    return save_app(dcp, folder)


def _load_app(folder: str) -> dict[str, object]:
    return load_app(dcp, folder)


@pytest.mark.parametrize("ranks", [(2, 3), (3, 1)])
def test_the_tutorial_saves_and_loads_on_another_number_of_ranks(tmp_path: Path, ranks: tuple[int, int]) -> None:
    folder = str(tmp_path / "checkpoints" / "step-7")
    saved = run_ranks(ranks[0], _save_app, folder)
    assert run_ranks(ranks[1], _load_app, folder) == [saved[0]] * ranks[1]
    (only,) = holdfast.ls(folder)
    assert only.step == 7


def _save_app_by_torch(folder: str) -> dict[str, object]:
    return save_app(torch_dcp, folder)


def test_a_folder_that_dcp_wrote_loads_on_another_number_of_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "dcp")
    saved = run_ranks(2, _save_app_by_torch, folder)
    assert run_ranks(3, _load_app, folder) == [saved[0]] * 3


def _save_parts(folder: str, flat: bool) -> dict[str, object]:
    return save_parts(dcp, folder, flat=flat)


def _load_parts(folder: str, flat: bool) -> dict[str, object]:
    return load_parts(dcp, folder, flat=flat)


@pytest.mark.parametrize("flat", [False, True])
def test_states_of_the_model_and_of_the_optimizer_in_folders_of_their_own(tmp_path: Path, flat: bool) -> None:
    saved = run_ranks(3, _save_parts, str(tmp_path), flat)
    assert run_ranks(2, _load_parts, str(tmp_path), flat) == [saved[0]] * 2


def _save_under(folder: str, fsdp1: bool, in_background: bool) -> dict[str, object]:
    app = trained(0, steps=2, fsdp1=fsdp1)
    if in_background:
        future = dcp.async_save({"app": app}, checkpoint_id=folder)
        assert isinstance(future, Future)
        future.result(timeout=60)
    else:
        dcp.save({"app": app}, checkpoint_id=folder)
    return gathered(app)


def _load_under(folder: str, fsdp1: bool) -> dict[str, object]:
    app = trained(9, steps=1, fsdp1=fsdp1)
    dcp.load({"app": app}, checkpoint_id=folder)
    return gathered(app)


@pytest.mark.parametrize("in_background", [False, True])
def test_the_sharded_tensors_of_fsdp1_load_on_another_number_of_ranks(tmp_path: Path, in_background: bool) -> None:
    """FSDP1 gives them in its state dicts."""
    saved = run_ranks(3, _save_under, str(tmp_path / "c"), True, in_background)[0]
    assert run_ranks(2, _load_under, str(tmp_path / "c"), True)[0] == saved
    assert run_ranks(2, _load_under, str(tmp_path / "c"), False)[0] == saved


@pytest.mark.slow
def test_a_job_moves_from_fsdp2_to_fsdp1(tmp_path: Path) -> None:
    saved = run_ranks(2, _save_under, str(tmp_path / "c"), False, False)[0]
    assert run_ranks(3, _load_under, str(tmp_path / "c"), True)[0] == saved


def _save_in_background(folder: str) -> list[dict[str, object]]:
    """Save three times in the background, and train on while the copies are written."""
    app, saved = trained(0, steps=1), []
    last: Future[SaveReport] | None = None
    stager = DefaultStager(StagingOptions(False, True, False, False))  # pinned memory needs CUDA
    for step in range(3):
        if last is not None:
            last.result()
        begun = dcp.async_save({"app": app}, checkpoint_id=f"{folder}/step-{step}", async_stager=stager)
        assert isinstance(begun, Future)
        last = begun
        saved.append(contents(app))
        app.model(torch.arange(8)).sum().backward()
        app.optimizer.step()
        app.optimizer.zero_grad()
    assert last is not None
    assert last.result(timeout=60).step == 2
    stager.close()
    dist.barrier()
    return saved


def test_saves_in_the_background_hold_the_state_of_their_instant(tmp_path: Path) -> None:
    saved = run_ranks(2, _save_in_background, str(tmp_path))[0]
    for step in (0, 2):
        assert run_ranks(3, _load_app, f"{tmp_path}/step-{step}")[0] == saved[step]


def _queue_saves(folder: str) -> list[int]:
    """Begin several saves without a wait between them, and one save in the foreground beside them."""
    app = trained(0, steps=1)
    futures = [dcp.async_save({"app": app}, checkpoint_id=f"{folder}/step-{step}") for step in range(3)]
    dcp.save({"app": app}, checkpoint_id=f"{folder}/step-3")
    reports = [future.result() for future in futures if not isinstance(future, AsyncSaveResponse)]
    dist.barrier()
    return [report.step for report in reports]


def test_saves_that_nobody_waits_for_follow_one_another(tmp_path: Path) -> None:
    assert run_ranks(2, _queue_saves, str(tmp_path)) == [[0, 1, 2]] * 2
    assert [holdfast.open(tmp_path / f"step-{step}").step for step in range(4)] == [0, 1, 2, 3]


def _fail_on_one_rank(folder: str) -> str:
    state: dict[str, object] = {"tensor": torch.ones(3)}
    if dist.get_rank() == 1:
        state["strange"] = {1, 2}
    with pytest.raises(holdfast.StateError) as foreground:
        dcp.save(state, checkpoint_id=folder)
    future = dcp.async_save({"tensor": torch.ones(3), "own": dist.get_rank()}, checkpoint_id=folder)
    assert isinstance(future, Future)
    with pytest.raises(holdfast.StateError) as background:
        future.result()
    return f"{foreground.value.code} {background.value.code}"


def test_an_error_on_one_rank_is_raised_on_all_also_by_futures(tmp_path: Path) -> None:
    """DCP would take the value of any one rank."""
    found = run_ranks(2, _fail_on_one_rank, str(tmp_path / "ckpt"))
    assert found[0] == found[1]
    assert found[0].startswith("state.unsupported_leaf ")


class BrokenOnOneRank(dcp.Stateful):
    def state_dict(self) -> dict[str, object]:
        if dist.get_rank() == 1:
            raise RuntimeError("out of memory")
        return {"x": 1}

    def load_state_dict(self, state_dict: dict[str, object]) -> None: ...


def _fail_in_a_state_dict(folder: str) -> list[str]:
    dcp.save({"app": {"x": 1}}, checkpoint_id=folder)
    found = []
    for call in (dcp.load, dcp.save, dcp.async_save):
        with pytest.raises(dcp.CheckpointException) as caught:
            call({"app": BrokenOnOneRank()}, checkpoint_id=folder)
        found.append(str(caught.value))
    return found


def test_a_state_dict_that_raises_on_one_rank_is_an_error_on_all_at_once(tmp_path: Path) -> None:
    found = run_ranks(2, _fail_in_a_state_dict, str(tmp_path / "c"))
    assert found[0] == found[1]
    assert all("rank 1" in text and "out of memory" in text for text in found[0])


def _alone(folder: str) -> float:
    rank = dist.get_rank()
    dcp.save({"x": torch.full((2,), float(rank))}, checkpoint_id=f"{folder}/{rank}", no_dist=True)
    state: dict[str, object] = {"x": torch.zeros(2)}
    dcp.load(state, checkpoint_id=f"{folder}/{rank}", no_dist=True)
    assert isinstance(state["x"], torch.Tensor)
    return state["x"].sum().item()


def test_no_dist_saves_and_loads_on_each_rank_alone(tmp_path: Path) -> None:
    assert run_ranks(2, _alone, str(tmp_path)) == [0.0, 2.0]


def _in_half_of_the_job(folder: str) -> bool:
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    number = dist.get_rank() // 2
    state: dict[str, object] = {"x": torch.full((2,), float(number))}
    dcp.save(state, checkpoint_id=f"{folder}/{number}", process_group=groups[number])
    found: dict[str, object] = {"x": torch.zeros(2)}
    dcp.load(found, checkpoint_id=f"{folder}/{number}", process_group=groups[number])
    assert isinstance(found["x"], torch.Tensor)
    return bool((found["x"] == number).all())


def test_groups_of_ranks_save_on_their_own(tmp_path: Path) -> None:
    assert run_ranks(3, _in_half_of_the_job, str(tmp_path)) == [True] * 3
