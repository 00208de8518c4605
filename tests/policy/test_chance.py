"""A policy of what to keep that the policy of when to save meets by chance only is told of."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from holdfast import Auto, Checkpointer, EverySteps, EveryTime, KeepEvery, KeepLast, OnPreemption
from holdfast.policy.chance import kept_by_chance
from holdfast.policy.keep import KeepPolicy
from holdfast.policy.when import SavePolicy


@pytest.mark.parametrize(
    ("save", "keep", "told"),
    [
        (EverySteps(5), KeepLast(2) | KeepEvery(10), []),
        (Auto(max_overhead=0.01) | EverySteps(1000) | OnPreemption(), KeepEvery(10_000), []),
        (EverySteps(7) | EverySteps(5), KeepEvery(10), []),
        (EveryTime(60), KeepLast(1), []),
        (EverySteps(7), KeepEvery(10), ["KeepEvery(10) keeps only each 70th step"]),
        (EverySteps(7) | EverySteps(4), KeepEvery(10), ["KeepEvery(10) keeps only each 20th step"]),
        (
            EveryTime(60),
            KeepLast(1) | KeepEvery(10),
            ["KeepEvery(10) keeps multiples of 10, which are saved"],
        ),
        (EverySteps(5, memory_only=True), KeepEvery(10), ["which are saved by chance only"]),
    ],
)
def test_steps_that_are_kept_and_rarely_saved_are_named(save: SavePolicy, keep: KeepPolicy, told: list[str]) -> None:
    found = list(kept_by_chance(save, keep))
    assert len(found) == len(told)
    assert all(text in each for text, each in zip(told, found, strict=True))


def test_a_checkpointer_warns_of_them_before_it_saves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"x": torch.zeros(2)}
    with Checkpointer(tmp_path / "run", state, memory=None, save=EverySteps(7), keep=KeepEvery(10)):
        found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(found) == 1
    assert "add EverySteps(10) to save" in found[0]
