"""A path means what it meant when it was given: `~` is expanded, and a change of working directory moves nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, ConfigurationError, Memory
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.checkpointer.test_checkpointer import Loop
from tests.support.command_line import holdfast_command
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home folder; it is the working directory too, and has another folder and a node's memory in it."""
    for name in ("elsewhere", "node"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    end_keepers(tmp_path / "node")


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "storage"])
def test_a_relative_run_stays_where_it_was_when_the_working_directory_changes(home: Path, in_memory: bool) -> None:
    loop = Loop()
    memory = Memory(node_dir=Path("node")) if in_memory else None
    with Checkpointer("runs/a", loop.state, memory=memory, timeout_s=30) as checkpointer:
        for step in (1, 2, 3):
            loop.step()
            checkpointer.save(step)
            checkpointer.wait()
            os.chdir(home / "elsewhere")
        saved = loop.bits()
        loop.step()
        checkpointer.restore()
    assert [commit.step for commit in Run.open(open_store(Location(str(home / "runs/a")))).lineage()] == [3, 2, 1]
    assert loop.bits() == saved
    assert list((home / "elsewhere").iterdir()) == []


def test_every_verb_knows_the_home_folder(home: Path) -> None:
    holdfast.save("~/runs/a", {"w": torch.arange(4.0)}, 1)
    start_new_job()
    os.chdir(home / "elsewhere")
    into = {"w": torch.zeros(4)}
    assert Path(holdfast.load("~/runs/a", into).path).is_relative_to(home / "runs/a")
    view = holdfast.open("~/runs/a@step=1")
    assert torch.equal(into["w"], view["w"][...])
    assert holdfast.plan_load("~/runs/a", into).needed_nbytes == 16
    assert holdfast_command("ls", "~/runs/a").status == 0
    assert list((home / "elsewhere").iterdir()) == []


def test_a_path_of_other_bytes_than_utf_8_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="not UTF-8") as caught:
        holdfast.save("/tmp/\udcff", {}, 1)
    assert caught.value.code == "config.path"


def test_a_run_that_was_moved_while_its_job_ran_is_said_to_be_one(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3)}
    holdfast.save(tmp_path / "run", state, 1)
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigurationError, match=r"knows it by another path, '.*/run', .*load the run first"):
        holdfast.save(tmp_path / "run", state, 2)
    holdfast.load(tmp_path / "run", state)
    assert holdfast.save(tmp_path / "run", state, 2).place == "2.1"
