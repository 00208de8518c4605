"""A loop whose caller has loaded a checkpoint of the run goes on from it, and does not restore the head over it."""

from __future__ import annotations

from functools import partial
from logging import getLogger
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
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
    with (
        caplog.at_level("INFO", logger="holdfast"),
        Checkpointer(run, state, memory=None, save=EverySteps(5)) as own,
    ):
        holdfast.load(f"{run}@step=5", into=state)
        assert trained(own, 8) == [6, 7]
    assert "the loop goes on after step 5 at 1.1, which this job has loaded" in caplog.text
    assert [item.step for item in holdfast.ls(run)] == [7, 5, 10]


def test_a_load_after_a_restore_counts_and_so_does_one_between_two_loops(run: str) -> None:
    """The loop went on with the steps of the restore, and the weights of the load."""
    train(run, training(), 11)
    start_new_job()
    state = training()
    with Checkpointer(run, state, memory=None, save=EverySteps(5)) as own:
        own.restore()
        holdfast.load(f"{run}@step=5", into=state, continues=True)
        assert trained(own, 8) == [6, 7]
        assert trained(own, 9) == [8]
        own.wait()
        holdfast.load(f"{run}@step=5", into=state, continues=True)
        assert trained(own, 8) == [6, 7]
        holdfast.load(f"{run}@step=5", into=state, continues=True)
        own.restore(at="step=7")
        assert trained(own, 10) == [8, 9]


@pytest.mark.parametrize(
    "what", ["trained since", "began since", "saved since", "before", "another object", "a restore", "apart"]
)
def test_a_load_that_does_not_say_what_the_loop_goes_on_from_is_followed_by_a_restore(
    run: str, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """A state whose training failed and begins again in the same process may be of a later step than the load."""
    train(run, training(), 7)
    start_new_job()
    state = training()
    failed = Checkpointer(run, state, memory=None, save=EverySteps(50))
    match what:
        case "trained since" | "began since":
            holdfast.load(f"{run}@step=5", into=state, continues=True)
            steps = failed.steps(20)
            assert next(steps) == 6
            if what == "trained since":
                failed.step(6)
        case "before":
            holdfast.load(f"{run}@step=5", into=state, continues=True)
        case "saved since":
            holdfast.load(f"{run}@step=5", into=state, continues=True)
            holdfast.save(f"{run}-other", state, 0)
        case "another object":
            holdfast.load(f"{run}@step=5", into=training(), continues=True)
        case "a restore":
            failed.restore(at="step=5")
        case "apart":
            holdfast.load(f"{run}@step=5", into=state, continues=False)
    if what in ("saved since", "another object", "apart"):
        with failed:
            assert trained(failed, 9) == [7, 8]
    else:
        failed._give_up()
        failed._end_loop()
        assert train(run, state, 9) == [7, 8]
    is_told = what in ("trained since", "began since", "saved since", "before")
    assert ("the loop does not go on from step 5 at 1.1" in caplog.text) == is_told


def ranks_that_load(run: str, *, alone: bool) -> list[int]:
    start_new_job()
    state: dict[str, object] = {"w": torch.zeros(5), "other": torch.ones(3)}
    groups = [dist.new_group([rank]) for rank in range(2)]
    with Checkpointer(run, state, memory=None, save=EverySteps(5)) as own:
        if not alone:
            holdfast.load(f"{run}@step=4", into=state, select="w", continues=True)
        elif dist.get_rank() == 0:
            holdfast.load(f"{run}@step=4", into=state, select="w", continues=True, group=groups[0])
        steps = trained(own, 12)
    weights = state["w"]
    assert isinstance(weights, torch.Tensor)
    return [*steps, int(weights[0])]


@pytest.mark.parametrize("alone", [False, True])
def test_all_ranks_go_on_from_what_all_have_loaded(run: str, *, alone: bool) -> None:
    """When one rank had loaded alone, the other one trained with the weights that it had."""
    for step in (4, 9):
        holdfast.save(run, {"w": torch.full((5,), float(step)), "other": torch.zeros(3)}, step)
    expected = [10, 11, 9] if alone else [5, 6, 7, 8, 9, 10, 11, 4]
    assert run_ranks(2, partial(ranks_that_load, alone=alone), run) == [expected, expected]


def goes_on_after(run: str, caplog: pytest.LogCaptureFixture, **options: Any) -> str:
    """The warnings of a loop that goes on from a load of `run` with these options."""
    start_new_job()
    state = training()
    with Checkpointer(run, state, memory=None, save=EverySteps(5)) as own:
        holdfast.load(run, into=state, continues=True, **options)
        caplog.clear()
        assert next(own.steps(12)) == 10
    return "\n".join(record.getMessage() for record in caplog.records if record.levelname == "WARNING")


def test_a_loop_that_resumed_only_a_part_of_its_state_says_which_entries_are_not_restored(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It went on with a fresh optimizer, and said only that it went on after step 9."""
    train(run, training(), 10)
    told = goes_on_after(run, caplog, select="model")
    assert "goes on after step 9 at 1.2, but not all of the state is from there" in told
    assert "the load has left out 'optimizer', 'scheduler' (select=" in told
    assert "left out 'model', 'scheduler'" in goes_on_after(run, caplog, select=["model/weight", "optimizer"])
    assert goes_on_after(run, caplog) == ""
    assert goes_on_after(run, caplog, select=["model", "optimizer", "scheduler"]) == ""
    assert goes_on_after(run, caplog, cast=True) == ""


def test_a_loop_says_which_entries_the_checkpoint_of_a_lenient_load_lacks(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    whole = training()
    del whole["scheduler"]
    train(run, whole, 10)
    assert "the load has left out 'scheduler' (select=" in goes_on_after(run, caplog, strict=False)


def parts_that_ranks_load(run: str) -> str:
    start_new_job()
    state: dict[str, object] = {"w": torch.zeros(5), "other": torch.ones(3)}
    with Checkpointer(run, state, memory=None, save=EverySteps(5)) as own:
        holdfast.load(run, into=state, select="w", continues=True)
        with patch.object(getLogger("holdfast.checkpointer.loaded_before"), "warning") as warned:
            assert next(own.steps(12)) == 10
    return str(warned.call_args)


def test_the_first_rank_alone_says_what_is_not_restored(run: str) -> None:
    holdfast.save(run, {"w": torch.zeros(5), "other": torch.zeros(3)}, 9)
    first, second = run_ranks(2, parts_that_ranks_load, run)
    assert "'other'" in first
    assert second == "None"
