"""A job that finds nothing to restore hears at once that its first save, hours later, could not be made."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast import Checkpointer, ConfigurationError, HoldfastError, StorageError
from tests.support.ranks import run_ranks


def state() -> dict[str, object]:
    model = nn.Linear(4, 4)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def tree(folder: Path) -> list[str]:
    return sorted(str(path) for path in folder.rglob("*"))


def parent_of_runs(folder: Path) -> Path:
    holdfast.save(folder / "a", state(), 1)
    holdfast.save(folder / "b", state(), 1)
    return folder


def folder_with_a_log(folder: Path) -> Path:
    (folder / "log.txt").write_text("x")
    return folder


def plain_file(folder: Path) -> Path:
    (folder / "file").write_text("x")
    return folder / "file"


def below_a_file(folder: Path) -> Path:
    return plain_file(folder) / "run"


def dangling_link(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "nowhere")
    return folder / "link"


@pytest.mark.parametrize("made", [parent_of_runs, folder_with_a_log, plain_file, below_a_file, dangling_link])
def test_a_path_that_cannot_become_a_run_is_refused_by_restore_as_by_the_first_save(
    tmp_path: Path, made: Callable[[Path], Path]
) -> None:
    run = made(tmp_path)
    before = tree(tmp_path)
    checkpointer = Checkpointer(run, state(), memory=None)
    with pytest.raises(HoldfastError) as restored:
        checkpointer.restore()
    assert tree(tmp_path) == before
    with pytest.raises(HoldfastError) as saved:
        checkpointer.save(0)
    assert (restored.value.code, restored.value.message) == (saved.value.code, saved.value.message)


def test_a_selection_that_matches_nothing_is_refused_by_restore_as_by_the_first_save(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "run", state(), memory=None, select="no_such_name/*")
    with pytest.raises(HoldfastError) as restored:
        checkpointer.restore()
    with pytest.raises(HoldfastError) as saved:
        checkpointer.save(0)
    assert restored.value.code == saved.value.code == "incompatible.select"


def test_the_parent_of_runs_is_refused_with_the_names_of_the_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"Name one of the runs in it \('a', 'b'\)"):
        Checkpointer(parent_of_runs(tmp_path), state(), memory=None).restore()


def test_a_folder_that_cannot_be_written_is_refused_by_restore_as_by_the_first_save(tmp_path: Path) -> None:
    (tmp_path / "fixed").mkdir()
    if subprocess.run(["chattr", "+i", tmp_path / "fixed"], capture_output=True, check=False).returncode:
        pytest.skip("only root can make a folder that nobody can write to")
    try:
        checkpointer = Checkpointer(tmp_path / "fixed" / "run", state(), memory=None)
        for call in (checkpointer.restore, lambda: checkpointer.save(0)):
            with pytest.raises(StorageError) as caught:
                call()
            assert caught.value.code == "storage.denied"
    finally:
        subprocess.run(["chattr", "-i", tmp_path / "fixed"], check=True)


def test_a_state_that_can_never_be_saved_is_refused_by_restore_as_by_the_first_save(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path / "run", {**state(), "x": object()}, memory=None)
    messages = []
    for call in (checkpointer.restore, lambda: checkpointer.save(0)):
        with pytest.raises(holdfast.StateError) as caught:
            call()
        messages.append(caught.value.message)
    assert messages[0] == messages[1]
    assert not (tmp_path / "run").exists()


def test_a_model_on_meta_finds_nothing_to_restore_before_it_is_made(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with Checkpointer(tmp_path / "run", {"model": model}, memory=None) as checkpointer:
        assert checkpointer.restore().next_step == 0
        model.to_empty(device="cpu")
        checkpointer.save(0)


def test_a_part_of_the_state_that_is_not_selected_may_be_anything(tmp_path: Path) -> None:
    given = {**state(), "x": object()}
    with Checkpointer(tmp_path / "run", given, memory=None, select=["model", "optimizer"]) as checkpointer:
        assert checkpointer.restore().next_step == 0


def restored_on_ranks(run: str) -> tuple[str, str]:
    extra = {"x": object()} if dist.get_rank() == 1 else {}
    try:
        Checkpointer(run, {**state(), **extra}, memory=None).restore()
    except HoldfastError as error:
        return error.code, error.message
    return "", ""


def test_all_ranks_raise_the_error_of_the_one_whose_state_cannot_be_saved(tmp_path: Path) -> None:
    first, second = run_ranks(2, restored_on_ranks, str(tmp_path / "run"))
    assert first == second
    assert first[0] == "state.unsupported_leaf"


def test_all_ranks_raise_the_error_of_the_path(tmp_path: Path) -> None:
    first, second = run_ranks(2, restored_on_ranks, str(folder_with_a_log(tmp_path)))
    assert first == second
    assert first[0] in ("config.not_a_run", "state.unsupported_leaf")


def test_a_restore_of_another_state_names_the_call_that_has_the_options(tmp_path: Path) -> None:
    run = os.fspath(tmp_path / "run")
    holdfast.save(run, state(), 1)
    checkpointer = Checkpointer(run, {**state(), "extra": 1}, memory=None)
    with pytest.raises(holdfast.IncompatibleError) as caught:
        checkpointer.restore()
    assert caught.value.action.endswith(f"holdfast.load('{run}', into=state, ..., continues=True) has these options.")
    with pytest.raises(holdfast.IncompatibleError) as caught:
        holdfast.load(run, {**state(), "extra": 1})
    assert "continues=True" not in caught.value.action


def restored_with_a_loader(run: str) -> str:
    own = {**state(), "loader": holdfast.PerRank({"position": dist.get_rank()})}
    if dist.get_world_size() == 2:
        holdfast.save(run, own, 1)
        return ""
    with pytest.raises(holdfast.IncompatibleError) as caught:
        Checkpointer(run, own, memory=None).restore()
    assert caught.value.code == "incompatible.per_rank"
    return caught.value.action


def test_the_advice_about_what_belongs_to_each_rank_names_no_options_of_a_load(tmp_path: Path) -> None:
    """It ended with "holdfast.load(..., continues=True) has these options", which on_resize is none of."""
    run = os.fspath(tmp_path / "run")
    run_ranks(2, restored_with_a_loader, run)
    (action,) = set(run_ranks(3, restored_with_a_loader, run))
    assert "holdfast.load" not in action
    assert "on_resize=" in action
    assert "GlobalOrder" in action
