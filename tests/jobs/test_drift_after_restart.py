"""Copies that a load made equal, and that drift before the first save of the new job: a warning, as in the old job."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import holdfast
from holdfast import Checkpointer, Memory
from holdfast.errors import StateError
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


def state(fill: float) -> dict[str, Any]:
    model = nn.Linear(4, 4)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(fill)
    return {"model": model, "scale": torch.full((100,), float(fill))}


def drift(held: dict[str, Any]) -> None:
    if dist.get_rank() == 1:
        held["scale"] += 1e-3


def drifted(folder: str) -> str:
    """A run whose head is marked: its copies drifted in the job that saved it. It lies where nothing is known of it."""
    start_new_job()
    held = state(1)
    holdfast.save(f"{folder}/before", held, 1)
    drift(held)
    marked = tuple[str, ...]()
    for step in range(2, 20):
        marked = holdfast.save(f"{folder}/before", held, step).diverged
    assert marked == ("scale",)
    if dist.get_rank() == 0:
        shutil.move(f"{folder}/before", f"{folder}/run")
    dist.barrier()
    start_new_job()
    return f"{folder}/run"


def resume(folder: str, through: str, loads: str) -> tuple[str, ...] | str:
    """The marks of the first save of a job that goes on from a drifted checkpoint; or the code of its error."""
    run, held = drifted(folder), state(0)
    if through == "Checkpointer":
        Path(f"{folder}/node").mkdir(exist_ok=True)
        with Checkpointer(run, held, memory=Memory(node_dir=Path(folder) / "node")) as checkpointer:
            checkpointer.restore()
            drift(held)
            checkpointer.save(20).durable.wait(60)
        return holdfast.open(run).diverged
    if loads == "all":
        holdfast.load(run, held)
    elif loads == "part":
        holdfast.load(run, held, select="model", continues=True)
    else:
        groups = [dist.new_group([rank]) for rank in range(2)]
        if dist.get_rank() == 0:
            holdfast.load(run, held, group=groups[0])
        dist.barrier()
    drift(held)
    try:
        return holdfast.save(run, held, 20).diverged
    except StateError as error:
        return error.code


@pytest.mark.parametrize("through", ["save", "Checkpointer"])
def test_copies_that_drift_again_after_a_restart_do_not_fail_the_first_save(tmp_path: Path, through: str) -> None:
    assert run_ranks(2, resume, str(tmp_path), through, "all") == [("scale",)] * 2


@pytest.mark.parametrize("loads", ["part", "one rank"])
def test_copies_that_no_load_made_equal_are_refused_as_at_any_first_save(tmp_path: Path, loads: str) -> None:
    assert run_ranks(2, resume, str(tmp_path), "save", loads) == ["state.diverged"] * 2
