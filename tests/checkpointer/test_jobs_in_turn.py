"""Jobs that save into one run in turn (``takeover="always"``): beside each other on one node, and restored together."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Memory
from holdfast.node_memory.inventory import node_memory
from tests.support import nursery
from tests.support.models import start_new_job
from tests.support.nursery import until


def save_in_turn(run: str, node_dir: str, turns: str, number: int) -> None:
    """Be one of two jobs that save a step each in turn, three times; say so in files."""
    state = {"w": torch.zeros(1000)}
    with Checkpointer(
        run, state, memory=Memory(node_dir=Path(node_dir)), takeover="always", timeout_s=30
    ) as checkpointer:
        for step in range(number, 6, 2):
            until(Path(turns, str(step)).exists)
            state["w"].fill_(step)
            checkpointer.save(step).durable.wait(30)
            Path(turns, str(step + 1)).touch()
        until(Path(turns, "6").exists)


def test_two_jobs_of_one_node_save_in_turn_and_each_has_memory_of_its_own(
    run: str, node_dir: Path, tmp_path: Path
) -> None:
    """They shared slots, so a save could find that the other job had taken its slot (``storage.memory``)."""
    turns = tmp_path / "turns"
    turns.mkdir()
    jobs = [
        nursery.start(save_in_turn, run, str(node_dir), str(turns), number, err=tmp_path / f"err{number}")
        for number in range(2)
    ]
    (turns / "0").touch()
    for job in jobs:
        assert job.wait() == 0, job.err
        assert "saves go to storage" not in (tmp_path / f"err{jobs.index(job)}").read_text()
    assert [each.step for each in holdfast.ls(run)] == [5, 4, 3, 2, 1, 0]
    assert [found.run for found in node_memory(node_dir)] == [run, run]


def test_a_job_that_comes_back_finds_the_memory_that_it_left(run: str, node_dir: Path, tmp_path: Path) -> None:
    for turn in range(2):
        turns = tmp_path / f"turns{turn}"
        turns.mkdir()
        for name in ("0", "2", "4", "6"):
            (turns / name).touch()
        process = nursery.start(save_in_turn, run, str(node_dir), str(turns), 4, err=tmp_path / "err")
        assert process.wait() == 0, process.err
    assert len(list(node_memory(node_dir))) == 1


def test_jobs_in_turn_that_restore_together_are_not_told_that_jobs_before_them_died(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    """From the third one on, the log warned that several jobs had resumed the checkpoint."""
    holdfast.save(run, {"w": torch.zeros(3)}, 7)
    start_new_job()
    with ExitStack() as stack:
        for _ in range(4):
            state = {"w": torch.ones(3)}
            job = stack.enter_context(Checkpointer(run, state, memory=None, takeover="always"))
            assert job.restore().earlier_resumes == 0
    assert caplog.text == ""


def test_a_limit_of_resumes_is_refused_for_jobs_that_resume_together(run: str) -> None:
    with pytest.raises(ValueError, match="max_resumes counts no jobs of takeover='always'"):
        Checkpointer(run, {"w": torch.ones(3)}, takeover="always", max_resumes=3)
