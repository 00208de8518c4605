"""Errors say what is really the matter with a path, a clock, or a copy of a run."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import CorruptError, HoldfastError, NotFoundError
from holdfast.run.fallback import is_damage


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(4.0)}


def test_a_run_that_is_a_file_or_a_dangling_link_is_said_to_be_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    for run, what in (
        ("file", "'/.*/file' is a file, not a folder"),
        ("file/below", "'/.*/file' is a file, not a folder"),
        ("link", "'/.*/link' is a link to '/.*/unmounted', which does not exist"),
        ("link/below", "'/.*/link' is a link to '/.*/unmounted', which does not exist"),
    ):
        with pytest.raises(HoldfastError, match=what) as caught:
            holdfast.save(tmp_path / run, state(), 1)
        assert caught.value.code in ("storage.not_a_folder", "config.not_a_run")
    with pytest.raises(NotFoundError, match=r"is a link to .* which does not exist"):
        holdfast.load(tmp_path / "link", state())


@pytest.mark.parametrize("clock", [-5.0, 0.0, 1e12], ids=["before_1970", "at_1970", "after_9999"])
def test_a_clock_out_of_range_keeps_nobody_from_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: float
) -> None:
    monkeypatch.setattr(time, "time", lambda: clock)
    holdfast.save(tmp_path / "run", state(), 1)
    into = {"w": torch.zeros(4)}
    assert holdfast.load(tmp_path / "run", into).step == 1
    assert torch.equal(into["w"], state()["w"])


def test_a_copy_of_a_live_run_whose_head_came_too_late_says_how_to_copy(tmp_path: Path) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    tensors = state()
    holdfast.save(run, tensors, 1)
    shutil.copytree(run / "checkpoints", copy / "checkpoints")  # `cp -r` comes here first
    holdfast.save(run, tensors, 2)
    shutil.copytree(run, copy, ignore=shutil.ignore_patterns("checkpoints"), dirs_exist_ok=True)
    with pytest.raises(CorruptError, match="use holdfast cp") as caught:
        holdfast.open(copy)
    assert is_damage(caught.value)
    with pytest.raises(CorruptError, match=r"Load '.*@1\.1' \(step 1\), load with fallback=True"):
        holdfast.load(copy, tensors)
    assert holdfast.load(copy, tensors, fallback=True).step == 1
