"""The limits at which failed saves end training: a pure choice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, StopAfter


@pytest.mark.parametrize(
    ("policy", "num_missed", "waited_s", "said"),
    [
        (StopAfter(missed=3), 2, 1e9, ""),
        (StopAfter(missed=3), 3, 0.0, "3 saves in a row"),
        (StopAfter(without_durable_s=60), 100, 59.0, ""),
        (StopAfter(without_durable_s=60), 0, 180.0, "for 3 min"),
        (StopAfter(missed=3, without_durable_s=60), 3, 0.0, "3 saves in a row"),
        (StopAfter(missed=3, without_durable_s=60), 0, 60.0, "for 60 s"),
    ],
)
def test_training_stops_at_the_first_limit(policy: StopAfter, num_missed: int, waited_s: float, said: str) -> None:
    why = policy.why(num_missed=num_missed, waited_s=waited_s)
    assert said in why
    assert bool(said) == bool(why)


def test_a_limit_that_says_nothing_or_too_much_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a limit"):
        StopAfter()
    with pytest.raises(ValueError, match="before a save fails"):
        StopAfter(missed=0)
    with pytest.raises(ValueError, match="positive"):
        StopAfter(without_durable_s=0)


def test_any_other_value_of_the_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'warn', or a limit such as holdfast\.StopAfter"):
        Checkpointer(tmp_path, {"w": torch.ones(1)}, on_failed_save="ignore")  # type: ignore[arg-type]
