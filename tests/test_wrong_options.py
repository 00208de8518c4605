"""Options of a wrong type or value are refused at once, with a sentence about that option, before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.mapping import Rename


def state() -> dict[str, object]:
    return {"model": {"a": torch.arange(4.0)}}


def refusal(call: Any, *args: object, **options: object) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(*args, **options)
    return str(caught.value)


@pytest.mark.parametrize("timeout_s", ["5", None, 0, -1, float("nan")])
def test_a_timeout_that_is_none_is_refused_by_every_verb(tmp_path: Path, timeout_s: object) -> None:
    run = tmp_path / "run"
    holdfast.save(run, state(), 1)
    begun = {
        "save": refusal(holdfast.save, run, state(), 2, timeout_s=timeout_s),
        "load": refusal(holdfast.load, run, state(), timeout_s=timeout_s),
        "Checkpointer": refusal(holdfast.Checkpointer, run, state(), timeout_s=timeout_s),
    }
    assert all(message.startswith("a timeout is ") and str(timeout_s) in message for message in begun.values()), begun
    assert holdfast.open(run).step == 1


@pytest.mark.parametrize("memory", ["2GB", True, 2**31])
def test_a_size_given_as_memory_is_refused_before_the_first_save(tmp_path: Path, memory: object) -> None:
    assert "holdfast.Memory" in refusal(holdfast.Checkpointer, tmp_path / "run", state(), memory=memory)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"select": 3}, "globs must be a string or a list of strings"),
        ({"cast": 3}, "globs must be a string or a list of strings"),
        ({"cast": torch.float16}, "cast must be True, or globs"),
        ({"mapping": 3}, "mapping must be a list of rules"),
        ({"mapping": Rename("a", "b")}, "mapping must be a list of rules"),
        ({"mapping": {"a": "b"}}, "mapping must be a list of rules"),
    ],
)
def test_a_load_names_the_option_that_it_cannot_use(tmp_path: Path, options: dict[str, object], said: str) -> None:
    run = tmp_path / "run"
    holdfast.save(run, state(), 1)
    assert said in refusal(holdfast.load, run, state(), **options)


def test_metrics_that_are_no_dict_are_refused(tmp_path: Path) -> None:
    assert "metrics must be a dict" in refusal(holdfast.save, tmp_path / "run", state(), 1, metrics=3)
