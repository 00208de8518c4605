"""Metrics that are none: an error in the first step, and no reason to lose training later."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holdfast import Checkpointer, EverySteps, ls


@pytest.fixture
def state() -> dict[str, object]:
    return {"w": torch.zeros(10)}


NO_METRICS: list[Any] = [
    {"loss": None},
    {"loss": "0.5"},
    {"loss": torch.ones(3)},
    {"loss": np.ones(3)},
    {"loss": torch.ones((), dtype=torch.complex64)},
    {3: 0.5},
    0.5,
    {f"metric {number}": 0.5 for number in range(100_000)},
]


@pytest.mark.parametrize("metrics", NO_METRICS[:-1], ids=repr)
def test_what_is_no_metric_is_an_error_in_the_first_step(run: str, state: dict[str, object], metrics: Any) -> None:
    """It was one at the first save: all steps before it were lost."""
    with (
        Checkpointer(run, state, memory=None, save=EverySteps(1000)) as own,
        pytest.raises((TypeError, ValueError), match="metric"),
    ):
        own.step(0, metrics=metrics)


@pytest.mark.parametrize("metrics", NO_METRICS, ids=lambda metrics: repr(metrics)[:20])
def test_what_is_no_metric_in_a_later_step_is_left_out_and_the_step_is_saved(
    run: str, state: dict[str, object], caplog: pytest.LogCaptureFixture, metrics: Any
) -> None:
    with Checkpointer(run, state, memory=None, save=EverySteps(2)) as own:
        own.step(1, metrics={"loss": 1.0, "accuracy": 0.5})
        own.step(2, metrics=metrics)
        own.step(3)
        own.step(4, metrics={"accuracy": 0.75} | metrics if isinstance(metrics, dict) else metrics)
    saved = {item.step: item.metrics for item in ls(run)}
    is_one = isinstance(metrics, dict) and len(metrics) == 1
    assert saved == {2: {}, 4: {"accuracy": 0.75} if is_one else {}}
    assert caplog.text.count("a metric of a step is left out") == 1
