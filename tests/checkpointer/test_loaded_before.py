"""A loop whose caller has loaded a checkpoint of the run goes on from it, and does not restore the head over it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast
from holdfast import Checkpointer, EverySteps
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


def training(lr: float = 1e-3) -> dict[str, object]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return {"model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3)}


def trained(own: Checkpointer, total: int) -> list[int]:
    """The steps that a loop makes, up to step `total`."""
    steps = []
    for step in own.steps(total):
        own.step(step)
        steps.append(step)
    return steps


def train(run: str, state: dict[str, object], total: int) -> list[int]:
    """Train up to step `total` with a Checkpointer, and return the steps."""
    with Checkpointer(run, state, memory=None, save=EverySteps(5)) as own:
        return trained(own, total)


def rate(state: dict[str, object]) -> float:
    optimizer = state["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    return float(optimizer.param_groups[0]["lr"])


def test_a_load_without_the_scheduler_stays_in_the_loop(run: str) -> None:
    """`steps` restored the head over it, and training went on with the old rate."""
    train(run, training(), 10)
    start_new_job()
    state = training()
    with Checkpointer(run, state, memory=None, save=EverySteps(5)) as own:
        holdfast.load(run, into=state, select="!scheduler", continues=True)
        optimizer = state["optimizer"]
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.param_groups[0]["lr"] = 0.25
        steps = own.steps(12)
        assert next(steps) == 10
        assert rate(state) == 0.25


def test_an_older_checkpoint_that_was_loaded_whole_is_a_rollback(run: str, caplog: pytest.LogCaptureFixture) -> None:
    train(run, training(), 11)
    start_new_job()
    state = training()
    with caplog.at_level("INFO", logger="holdfast"):
        holdfast.load(f"{run}@step=5", into=state)
        assert train(run, state, 8) == [6, 7]
    assert "the loop goes on after step 5 at 1.1, which this job has loaded" in caplog.text
    assert [item.step for item in holdfast.ls(run)] == [7, 5, 10]


@pytest.mark.parametrize("what", ["trained since", "another object", "a restore", "not to go on from"])
def test_a_load_that_does_not_say_what_the_loop_goes_on_from_is_followed_by_a_restore(run: str, what: str) -> None:
    """What failed in training and begins again in the same process holds later steps than the last checkpoint."""
    train(run, training(), 7)
    start_new_job()
    state = training()
    if what == "trained since":
        holdfast.load(f"{run}@step=5", into=state)
        own = Checkpointer(run, state, memory=None, save=EverySteps(50))
        steps = own.steps(20)
        for _ in range(2):
            own.step(next(steps))
        own._give_up()
    elif what == "another object":
        holdfast.load(f"{run}@step=5", into=training(), continues=False)
    elif what == "a restore":
        with Checkpointer(run, state, memory=None) as own:
            own.restore(at="step=5")
    else:
        holdfast.load(f"{run}@step=5", into=state, continues=False)
    assert train(run, state, 9) == [7, 8]


def ranks_that_load(run: str) -> list[int]:
    start_new_job()
    state: dict[str, object] = {"w": torch.zeros(5), "other": torch.ones(3)}
    with Checkpointer(run, state, memory=None, save=EverySteps(5)) as own:
        holdfast.load(run, into=state, select="w", continues=True)
        return trained(own, 12)


def test_all_ranks_go_on_from_what_they_have_loaded(run: str, tmp_path: Path) -> None:
    holdfast.save(run, {"w": torch.zeros(5), "other": torch.zeros(3)}, 9)
    assert run_ranks(2, ranks_that_load, run) == [[10, 11], [10, 11]]
