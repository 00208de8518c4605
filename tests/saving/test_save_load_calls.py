"""Calls of `save` and `load` in one plain process: the checkpoint they mean, names, damage, reports, arguments."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast import Checkpointer, ConfigurationError, CorruptError, IncompatibleError, NotFoundError
from tests.saving.test_save_load import same
from tests.support.models import build, differing, filled


def test_the_head_moves_and_older_steps_stay(tmp_path: Path) -> None:
    places = [holdfast.save(tmp_path / "run", filled("plain", seed).state, 10 * seed).place for seed in (1, 2, 3)]
    for selector, seed in (("", 3), ("@step=10", 1), ("@step=20", 2), (f"@{places[0]}", 1)):
        job = build("plain")
        report = holdfast.load(f"{tmp_path}/run{selector}", into=job.state)
        assert differing(job, seed) == []
        assert (report.step, report.place) == (10 * seed, places[seed - 1])


def test_a_checkpoint_folder_loads_without_its_run(tmp_path: Path) -> None:
    report = holdfast.save(tmp_path / "run", filled("plain", 1).state, 10)
    moved = tmp_path / "elsewhere"
    os.rename(report.path, moved)
    job = build("plain")
    assert holdfast.load(moved, into=job.state).step == 10
    assert differing(job, 1) == []


def test_a_relative_path_means_the_folder_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    holdfast.save("run", {"a": torch.ones(2)}, 1)
    into = {"a": torch.zeros(2)}
    holdfast.load(tmp_path / "run", into=into)
    holdfast.load("run/", into=into)
    assert into["a"].tolist() == [1.0, 1.0]


def test_a_rollback_abandons_the_future_it_left(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for seed in (1, 2):
        holdfast.save(run, filled("plain", seed).state, seed)
    holdfast.load(f"{run}@step=1", into=build("plain").state, continues=True)
    report = holdfast.save(run, filled("plain", 3).state, 2)
    assert report.place == "2.1"
    job = build("plain")
    holdfast.load(f"{run}@step=2", into=job.state)
    assert differing(job, 3) == []
    holdfast.load(f"{run}@1.2", into=job.state)
    assert differing(job, 2) == []


def test_names_on_one_side_only_are_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    saved: dict[str, object] = {"model": nn.Linear(2, 2), "seen": 4, "old": torch.zeros(1)}
    holdfast.save(tmp_path / "run", saved, 1)
    model = nn.Linear(2, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    into: dict[str, object] = {"model": model, "seen": 0, "new": torch.zeros(1), "note": "mine"}
    with pytest.raises(IncompatibleError) as raised:
        holdfast.load(tmp_path / "run", into=into)
    assert raised.value.code == "incompatible.names"
    for name in ("new", "note", "old"):
        assert name in str(raised.value)
    assert same(dict(model.state_dict()), before)
    assert into["seen"] == 0


def test_without_strict_what_both_have_is_loaded_and_the_rest_reported(tmp_path: Path) -> None:
    weight = torch.arange(4.0).reshape(2, 2)
    holdfast.save(tmp_path / "run", {"model": {"weight": weight}, "seen": 4, "old": torch.zeros(1)}, 1)
    into: dict[str, Any] = {"model": {"weight": torch.zeros(2, 2)}, "seen": 0, "new": torch.ones(1), "note": "mine"}
    report = holdfast.load(tmp_path / "run", into=into, strict=False)
    assert set(report.missing) == {"new", "note"}
    assert report.unexpected == ("old",)
    assert set(report.loaded) == {"model/weight", "seen"}
    assert same(into, {"model": {"weight": weight}, "seen": 4, "new": torch.ones(1), "note": "mine"})


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def test_an_altered_byte_is_found_and_its_tensor_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    holdfast.save(run, {"a": torch.zeros(1 << 19), "b": torch.zeros(1 << 19)}, 1)
    into = {"a": torch.ones(1 << 19), "b": torch.ones(1 << 19)}
    path = Path(holdfast.open(run).path) / "data-00000.safetensors"
    damage(path, 4096 + (1 << 21) + 17)
    with pytest.raises(CorruptError, match=r"it holds b\b") as raised:
        holdfast.load(run, into=into)
    assert raised.value.tensor == "b"
    assert raised.value.path == str(path)
    holdfast.load(run, into=into, verify=False)
    assert into["a"].count_nonzero() == 0
    assert into["b"].count_nonzero() == 1


@pytest.mark.parametrize("name", ["manifest", "seal", "data", "commit"])
def test_a_missing_file_of_a_committed_checkpoint_is_said(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    folder = Path(holdfast.save(run, {"a": torch.zeros(8)}, 1).path)
    (victim,) = folder.glob(f"{name}*") if name != "commit" else (run / "history").iterdir()
    victim.unlink()
    with pytest.raises((CorruptError, NotFoundError)) as raised:
        holdfast.load(run, into={"a": torch.ones(8)})
    assert str(run) in str(raised.value)


def test_the_report_tells_sizes_phases_and_the_place(tmp_path: Path) -> None:
    report = holdfast.save(tmp_path / "run", {"a": torch.zeros(100), "n": 1}, 7, metrics={"loss": math.nan})
    assert (report.step, report.place, report.num_tensors) == (7, "1.1", 1)
    assert (
        report.written_nbytes
        == report.nbytes
        == sum(path.stat().st_size for path in Path(report.path).glob("*.safetensors"))
    )
    assert list(report.seconds) == ["describe", "plan", "write", "commit"]
    assert all(seconds >= 0 for seconds in report.seconds.values())


@pytest.mark.parametrize(
    "value",
    [torch.tensor(0.5), torch.ones(1, 1), torch.ones((), requires_grad=True), np.float32(0.5), 0.5, 3],
    ids=repr,
)
def test_metrics_are_any_numbers(tmp_path: Path, value: Any) -> None:
    assert holdfast.save(tmp_path / "run", {}, 1, metrics={"loss": value}).step == 1
    (commit,) = (tmp_path / "run/history").iterdir()
    assert json.loads(commit.read_text())["metrics"] == {
        "loss": value.item() if isinstance(value, torch.Tensor) else value
    }


@pytest.mark.parametrize(
    "value", ["0.5", None, [1.0], 1j, torch.ones(2), torch.tensor(1j), torch.ones((), device="meta")], ids=repr
)
def test_a_metric_that_is_no_number_is_refused_before_anything_is_written(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ValueError if isinstance(value, torch.Tensor) else TypeError, match="loss"):
        holdfast.save(tmp_path / "run", {}, 1, metrics={"loss": value})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("step", [-1, True, 1.0, "3", None])
def test_a_step_that_is_no_whole_number_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ValueError, match="step must be a whole number from 0 to"):
        holdfast.save(tmp_path / "run", {}, step)
    assert not (tmp_path / "run").exists()


def test_the_greatest_step_is_the_one_that_the_name_of_a_folder_can_have(tmp_path: Path) -> None:
    for step in (10**18, 1 << 62, 1 << 63, 10**30):
        with pytest.raises(ConfigurationError, match=r"\[config.step\].*too large"):
            holdfast.save(tmp_path / "run", {}, step)
    assert not (tmp_path / "run").exists()
    state = {"w": torch.ones(1)}
    holdfast.save(tmp_path / "run", state, 10**18 - 1)
    assert holdfast.load(tmp_path / "run", into=state).step == 10**18 - 1


@pytest.mark.parametrize("step", [np.int64(3), np.uint8(3), torch.tensor(3)], ids=lambda step: type(step).__name__)
def test_a_step_may_be_a_whole_number_of_numpy_or_torch(tmp_path: Path, step: Any) -> None:
    report = holdfast.save(tmp_path / "run", {"w": torch.ones(1)}, step)
    assert (type(report.step), report.step) == (int, 3)
    with Checkpointer(tmp_path / "run", {"w": torch.ones(1)}, memory=None, takeover=True) as checkpointer:
        assert type(checkpointer.save(step + 1).step) is int


def test_an_empty_state_is_a_checkpoint_too(tmp_path: Path) -> None:
    report = holdfast.save(tmp_path / "run", {}, 0)
    assert report.num_tensors == 0
    assert holdfast.load(tmp_path / "run", into={}).step == 0


@pytest.mark.parametrize(
    "option", [{"strict": "no"}, {"verify": 0}, {"fallback": "yes"}, {"allow_empty": None}, {"continues": "no"}]
)
def test_an_option_of_another_type_is_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(option))} must be True"):
        holdfast.load(tmp_path / "run", {"w": torch.zeros(1)}, **option)


def test_errors_about_names_know_what_is_often_behind_them(tmp_path: Path) -> None:
    def training() -> tuple[nn.Module, torch.optim.AdamW]:
        model = nn.Linear(2, 2)
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = training()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    holdfast.save(tmp_path / "run", {"model": model, "optimizer": optimizer}, 1)
    holdfast.save(tmp_path / "dicts", {"optimizer": optimizer.state_dict()}, 1)
    other, fresh = training()
    with pytest.raises(IncompatibleError, match="A learning-rate scheduler adds initial_lr"):
        holdfast.load(tmp_path / "run", {"model": other, "optimizer": fresh})
    with pytest.raises(IncompatibleError) as caught:  # the whole optimizer is missing: its rates explain nothing
        holdfast.load(tmp_path / "run", {"model": other, "x": 1})
    assert "initial_lr" not in caught.value.action
    with pytest.raises(IncompatibleError, match=r"tree\('optimizer'\), and pass that to load_state_dict"):
        holdfast.load(tmp_path / "dicts", {"optimizer": fresh.state_dict()})
    tree: Any = holdfast.open(tmp_path / "dicts").tree("optimizer")
    fresh.load_state_dict(tree)
    assert fresh.state[next(other.parameters())]["exp_avg"].equal(optimizer.state[next(model.parameters())]["exp_avg"])


def test_a_save_of_an_empty_state_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    holdfast.save(tmp_path / "run", {}, 1)
    assert "the state of step 1 is empty" in caplog.text
    caplog.clear()
    holdfast.save(tmp_path / "run", {"epoch": 1}, 2)
    assert "is empty" not in caplog.text
