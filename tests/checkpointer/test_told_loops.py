"""Warnings and errors for a loop: random numbers that it forgets, steps that are not left, a forgotten restore."""

from __future__ import annotations

import gc
import signal
import time

import pytest
import torch

import holdfast
from holdfast import Checkpointer, ConfigurationError, EverySteps, Memory, OnPreemption
from tests.support.models import start_new_job


@pytest.fixture
def state() -> dict[str, object]:
    return {"w": torch.zeros(100), "progress": {"samples": 0}}


@pytest.mark.parametrize("has_it", [True, False])
def test_a_loop_is_told_that_it_forgets_its_random_numbers(
    run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture, *, has_it: bool
) -> None:
    state |= {"inner": {"random": holdfast.RandomState()}} if has_it else {}
    with (
        caplog.at_level("INFO", logger="holdfast"),
        Checkpointer(run, state, memory=None, save=EverySteps(5)) as checkpointer,
    ):
        checkpointer.step(0)
        checkpointer.step(1)
    assert caplog.text.count("has no holdfast.RandomState()") == (0 if has_it else 1)


def test_a_loop_with_no_step_left_says_so(run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        start_new_job()
        caplog.clear()
        with (
            caplog.at_level("INFO", logger="holdfast"),
            Checkpointer(run, state, memory=None, save=EverySteps(5)) as checkpointer,
        ):
            for step in checkpointer.steps(3):
                checkpointer.step(step)
    assert "the next step would be 3, so nothing is left of 3 steps" in caplog.text


def test_a_loop_that_forgot_to_restore_is_told_at_its_first_step(run: str, state: dict[str, object]) -> None:
    """It was told at its first save: all training up to then was lost."""
    holdfast.save(run, state, 0)
    start_new_job()
    forgetful = Checkpointer(run, state, memory=None, save=EverySteps(500))
    with pytest.raises(ConfigurationError) as error:
        forgetful.step(0)
    assert error.value.code == "config.unloaded_history"
    forgetful.restore()
    assert forgetful.step(1) is None
    forgetful.close()


def test_a_loop_is_warned_of_state_dicts_which_training_does_not_change(
    run: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each checkpoint had the optimizer as it was before the first step, and nothing said so."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state = {
        "model": model.state_dict(),
        "training": {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()},
    }
    with Checkpointer(run, state, memory=None) as checkpointer:
        checkpointer.restore()
        checkpointer.save(0)
    warnings = [record.getMessage() for record in caplog.records if "state_dict()" in record.getMessage()]
    assert len(warnings) == 2
    assert warnings[0].startswith("'training/optimizer' is a state_dict(): a copy of this moment")
    assert "'training/scheduler' is a state_dict()" in warnings[1]
    assert "Give the scheduler itself" in warnings[1]


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_a_checkpointer_that_was_dropped_unclosed_does_not_stand_in_the_way_of_the_next_one(
    run: str, state: dict[str, object], memory: Memory, *, is_in_memory: bool
) -> None:
    """A cell of a notebook that is run again has no object left that it could close."""

    def train() -> Checkpointer:
        own = Checkpointer(
            run, state, memory=memory if is_in_memory else None, save=EverySteps(2) | OnPreemption((signal.SIGUSR1,))
        )
        for step in own.steps(3):
            own.step(step)
        own.wait()
        time.sleep(0.2)  # the thread that has told the end of the last save lets go of it
        return own

    gc.disable()
    try:
        train()
        start_new_job()
        held = train()
        with pytest.raises(ConfigurationError, match=r"config\.two_loops"):
            train()
        held.close()
    finally:
        gc.enable()
