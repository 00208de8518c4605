"""A job of accelerate with DeepSpeed is killed, and goes on at other stages and on other ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.project.torchrun import run_torchrun
from tests.trainers.stored import contents

pytestmark = [pytest.mark.deepspeed, pytest.mark.timeout(600)]

#: The parts of a state that belong to ranks.
OWN = ("random/", "loader/random/")


def train(folder: Path, num_ranks: int, *numbers: int) -> tuple[int, list[dict[str, Any]]]:
    """Train at a stage up to a number of steps, or until the last rank is killed before a step."""
    shutil.copy(Path(__file__).with_name("accelerate_deepspeed_job.py"), folder / "train.py")
    stage, num_steps, stop = map(str, numbers)
    status, lines = run_torchrun(folder, num_ranks, stage, str(folder), num_steps, stop)
    return status, [json.loads(line) for line in lines if line.startswith("{")]


def shared(run: Path) -> dict[str, object]:
    return {name: value for name, value in contents(run).items() if not name.startswith(OWN)}


def test_a_killed_job_goes_on_at_other_stages_on_other_ranks(tmp_path: Path) -> None:
    status, first = train(tmp_path, 2, 1, 9, 4)
    assert status != 0
    assert {tuple(line["entries"]) for line in first} == {("accelerator", "engine", "loader", "random", "scheduler")}
    for num_ranks, stage, start, num_steps in ((3, 3, 4, 6), (1, 2, 6, 8)):
        saved = shared(tmp_path / "run")
        status, lines = train(tmp_path, num_ranks, stage, num_steps, -1)
        assert status == 0
        assert {line["step"] for line in lines} == {*range(start, num_steps)}
        copy = shared(tmp_path / f"copy-{num_ranks}")
        tensors = {name for name, value in saved.items() if isinstance(value, bytes)}
        assert {name: copy[name] for name in tensors} == {name: saved[name] for name in tensors}
        if num_ranks == 3:  # the rest of the epoch on the new ranks
            seen = [sample for line in first if line["step"] < start for sample in line["samples"]]
            rest = [sample for line in lines if line["step"] in (4, 5) for sample in line["samples"]]
            assert {*seen, *rest} == {*range(24)}
