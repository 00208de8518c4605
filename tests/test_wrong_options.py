"""Options of a wrong type or value are refused at once, with a sentence about that option, before anything changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.mapping import Rename
from tests.support.models import start_new_job


def state() -> dict[str, object]:
    return {"model": {"a": torch.arange(4.0)}}


def refusal(call: Any, *args: object, **options: object) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        call(*args, **options)
    return str(caught.value)


@pytest.mark.parametrize("timeout_s", ["5", None, True, 0, -1, float("nan"), float("inf"), 1e12])
def test_a_timeout_that_is_none_is_refused_by_every_verb(tmp_path: Path, timeout_s: object) -> None:
    run = tmp_path / "run"
    holdfast.save(run, state(), 1)
    begun = {
        "save": refusal(holdfast.save, run, state(), 2, timeout_s=timeout_s),
        "load": refusal(holdfast.load, run, state(), timeout_s=timeout_s),
        "Checkpointer": refusal(holdfast.Checkpointer, run, state(), timeout_s=timeout_s),
    }
    with holdfast.Checkpointer(tmp_path / "saved", state(), memory=None) as checkpointer:
        handle = checkpointer.save(0)
        if timeout_s is not None:  # the constructor's timeout, or none
            begun["wait"] = refusal(checkpointer.wait, timeout_s)
            begun["durable"] = refusal(handle.durable.wait, timeout_s)
    assert all(message.startswith("a timeout must be ") and str(timeout_s) in message for message in begun.values()), (
        begun
    )
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
        ({"memory_budget": "16MB"}, "memory_budget must be a whole number"),
        ({"memory_budget": 1e9}, "memory_budget must be a whole number"),
        ({"memory_budget": 1}, "memory_budget is 1, but at least"),
        ({"bandwidths": {"node_storage": 1}}, "bandwidths are a holdfast.Bandwidths"),
        ({"verify": None}, "verify must be True or False"),
        ({"group": "x"}, "group is a process group"),
    ],
)
def test_a_load_names_the_option_that_it_cannot_use(tmp_path: Path, options: dict[str, object], said: str) -> None:
    run = tmp_path / "run"
    holdfast.save(run, state(), 1)
    assert said in refusal(holdfast.load, run, state(), **options)


@pytest.mark.parametrize("options", [{"cast": torch.float16}, {"mapping": 3}, {"select": 3}, {"group": "x"}])
def test_a_plan_of_a_load_refuses_what_the_load_refuses(tmp_path: Path, options: dict[str, object]) -> None:
    run = tmp_path / "run"
    holdfast.save(run, state(), 1)
    assert refusal(holdfast.plan_load, run, state(), **options) == refusal(holdfast.load, run, state(), **options)


@pytest.mark.parametrize("takeover", ["no", "False", None, 0])
def test_takeover_as_text_does_not_take_the_run_over(tmp_path: Path, takeover: object) -> None:
    run = tmp_path / "run"
    holdfast.save(run, state(), 1)
    start_new_job()
    begun = {
        "save": refusal(holdfast.save, run, state(), 2, takeover=takeover),
        "Checkpointer": refusal(holdfast.Checkpointer, run, state(), takeover=takeover),
    }
    assert set(begun.values()) == {f"takeover must be True or False, not {takeover!r}"}
    assert holdfast.open(run).step == 1


def test_every_reader_refuses_a_verify_that_is_no_flag(tmp_path: Path) -> None:
    run = tmp_path / "run"
    holdfast.save(run, state(), 1)
    with holdfast.Checkpointer(run, state()) as checkpointer:
        said = {refusal(holdfast.open, run, verify="no"), refusal(checkpointer.restore, verify="no")}
        assert "fallback must be True or False" in refusal(checkpointer.restore, fallback="no")
    assert said == {"verify must be True or False, not 'no'"}


def test_a_group_that_is_none_is_refused_by_every_verb(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said = {
        refusal(holdfast.save, run, state(), 2, group="x"),
        refusal(holdfast.transfer, state(), state(), group="x"),
        refusal(holdfast.Checkpointer, run, state(), group="x"),
    }
    assert said == {"group is a process group of torch.distributed, or None for all ranks, not a str"}


@pytest.mark.parametrize("generations", ["2", 2.0, True, 1])
def test_generations_that_are_no_number_from_2_on_are_refused(generations: object) -> None:
    assert refusal(holdfast.Memory, generations=generations).startswith("generations ")


@pytest.mark.parametrize("node_dir", [None, 3])
def test_a_node_dir_of_none_is_not_a_folder_of_that_name(node_dir: object) -> None:
    assert "memory=None" in refusal(holdfast.Memory, node_dir=node_dir)


@pytest.mark.parametrize("speed", ["1GB/s", None, True, 0, -1.0, float("nan")])
def test_bandwidths_name_the_one_that_is_no_speed(speed: object) -> None:
    said = refusal(holdfast.Bandwidths, node_storage=1e9, all_storage=speed, node_network=1e9)
    assert said.startswith("all_storage must be ")


def test_piecewise_says_what_a_piece_is() -> None:
    assert "a piece is a pair" in refusal(holdfast.Piecewise, (3,), [torch.ones(3)])
    assert "sequence of whole numbers" in refusal(holdfast.Piecewise, "abc", [])


@pytest.mark.parametrize("metrics", [3, 0, "", [1]])
def test_metrics_that_are_no_dict_are_refused(tmp_path: Path, metrics: object) -> None:
    assert "metrics must be a dict" in refusal(holdfast.save, tmp_path / "run", state(), 1, metrics=metrics)


@pytest.mark.parametrize("metrics", [0.5, 0, ["loss"]])
@pytest.mark.parametrize("save", [holdfast.EverySteps(9), holdfast.OnMetric("loss")], ids=repr)
def test_a_step_with_metrics_that_are_no_dict_says_so_whatever_the_policy(
    tmp_path: Path, save: holdfast.SavePolicy, metrics: object
) -> None:
    """With `OnMetric` it was an AttributeError of a float."""
    with holdfast.Checkpointer(tmp_path, state(), memory=None, save=save, keep=holdfast.KeepBest("loss")) as own:
        assert "metrics must be a dict" in refusal(own.step, 0, metrics=metrics)
        assert "metrics must be a dict" in refusal(own.save, 0, metrics=metrics)


def test_a_metric_that_is_a_text_is_told_to_be_no_number(tmp_path: Path) -> None:
    """The error was "a metric must be a string with a number, not 'loss': '0.5'"."""
    said = {refusal(holdfast.save, tmp_path / "run", state(), 1, metrics={"loss": "0.5"})}
    with holdfast.Checkpointer(tmp_path / "loop", state(), memory=None, save=holdfast.OnMetric("loss")) as own:
        said.add(refusal(own.step, 0, metrics={"loss": "0.5"}))
    assert said == {"metric 'loss' must be a number, not a str: '0.5'"}
    assert "a metric must be a string, not an int" in refusal(holdfast.save, tmp_path, state(), 1, metrics={1: 0.5})
