"""Jobs of accelerate on several ranks that are killed, and go on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import NotFoundError
from tests.project.test_guides import example
from tests.project.torchrun import run_torchrun
from tests.trainers.stored import contents

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]

#: The parts of a state that belong to ranks.
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "accelerate.md"
OWN = ("random/", "loader/random/")
Line = dict[str, Any]


def train(node_dir: Path, plugin: str, num_ranks: int, run: str, num_steps: int, stop: int | None = None) -> list[Line]:
    """Train up to a number of steps, or until the last rank is killed before a step. Returns what the ranks printed."""
    folder = node_dir.parent
    shutil.copy(Path(__file__).with_name("accelerate_job.py"), folder / "train.py")
    end = ("0", "-1") if stop is None else (str(int(signal.SIGKILL)), str(stop))
    status, lines = run_torchrun(folder, num_ranks, plugin, str(folder / run), str(node_dir), str(num_steps), *end)
    assert (status == 0) == (stop is None)
    return sorted(
        (json.loads(line) for line in lines if line.startswith("{")), key=lambda line: (line["step"], line["rank"])
    )


def of_steps(lines: list[Line], steps: Sequence[int]) -> list[Line]:
    return [line for line in lines if line["step"] in steps]


def samples(lines: list[Line]) -> list[int]:
    return list(chain.from_iterable(line["samples"] for line in lines))


def shared(run: Path) -> dict[str, object]:
    """The contents of a checkpoint that belong to the whole job."""
    return {name: value for name, value in contents(run).items() if not name.startswith(OWN)}


def probes(run: Path, lines: list[Line]) -> list[str]:
    """The losses of batches of the job, with the weights of a checkpoint and without dropout, in a plain model."""
    model = nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.3), nn.Linear(8, 5), nn.Linear(5, 1)).eval()
    holdfast.load(run, {"model": model}, select="model")
    batches = [torch.tensor(line["samples"], dtype=torch.float32).unsqueeze(1) for line in lines]
    with torch.no_grad():
        return [float(model(batch).square().mean()).hex() for batch in batches]


@pytest.mark.parametrize("plugin", ["ddp", "fsdp2"])
def test_a_killed_job_goes_on_bit_for_bit_on_as_many_ranks_and_by_samples_on_others(
    plugin: str, tmp_path: Path, node_dir: Path
) -> None:
    whole = train(node_dir, plugin, 2, "whole", 14)  # epochs of 4 steps, of which the last has one batch
    train(node_dir, plugin, 2, "parts", 14, stop=10)
    again = train(node_dir, plugin, 2, "parts", 14)
    assert again == of_steps(whole, range(10, 14))
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")

    for num_ranks, run, num_steps in ((3, "parts", 17), (1, "whole", 15)):
        saved = shared(tmp_path / run)
        before = tmp_path / f"before-{num_ranks}"
        shutil.copytree(tmp_path / run, before)
        more = train(node_dir, plugin, num_ranks, run, num_steps)
        assert [*dict.fromkeys(line["step"] for line in more)] == [*range(14, num_steps)]
        assert shared(tmp_path / f"{run}-copy-{num_ranks}") == saved
        first = of_steps(more, [14])
        assert [line["probe"] for line in first] == probes(before, first)
        rest = samples(first)
        seen = samples(of_steps(whole, [12, 13]))
        if num_ranks == 3:  # the rest of the epoch, filled up to whole batches of all ranks; then whole epochs
            assert {*seen, *rest} == {*range(26)}
            assert len(rest) == 12
            assert len({*samples(of_steps(more, [15, 16]))}) == 24
        else:
            assert len({*seen, *rest}) == 20


def test_the_loop_of_the_guide_is_killed_and_goes_on_on_other_ranks(tmp_path: Path) -> None:
    script, _ = example(GUIDE)
    words = ("holdfast", "state", "checkpointer", "step")
    added = [
        line for line in script.splitlines() if re.search(rf"\b({'|'.join(words)})", line.partition("optimizer.")[0])
    ]
    assert len([line for line in added if "scheduler.step" not in line]) <= 15
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", "9999"]
    job = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    run = tmp_path / "runs" / "accelerate"
    while newest(run) < 5:
        assert job.poll() is None
        time.sleep(0.1)
    os.killpg(job.pid, signal.SIGKILL)  # the ranks end with torchrun: they are in its process group
    job.wait()
    status, lines = run_torchrun(tmp_path, 3, "0")
    assert status == 0
    (begun,) = [line for line in lines if "begin at step" in line]
    start = int(begun.split("step ")[1].split(",")[0])
    assert start > 5
    status, lines = run_torchrun(tmp_path, 3, str(start + 3))
    assert (status, [line for line in lines if "begin" in line]) == (0, [begun])
    assert newest(run) == start + 2


def newest(run: Path) -> int:
    try:
        return holdfast.open(run).step
    except NotFoundError:
        return -1
