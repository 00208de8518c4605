"""Exports to Megatron: which files there are, and that a folder is read again as it was. `test_megatron_checkpoints`
loads such folders into Megatron itself."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import exporting
from holdfast.errors import HoldfastError
from holdfast.exporting import folder_writer
from tests.support.bound import bits
from tests.support.command_line import ENVIRONMENT

FIXTURES = Path(__file__).parents[1] / "interop" / "fixtures" / "megatron"
TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of Megatron, whose optimizer any layout loads."""
    with tarfile.open(FIXTURES / "full-on-4.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "full-on-4"


def test_an_export_is_read_as_the_folder_that_it_came_from(tmp_path: Path, folder: Path) -> None:
    report = holdfast.export(folder, tmp_path / "new", "megatron")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["iter_0000001", TRACKER]
    files = sorted(path.name for path in (tmp_path / "new" / "iter_0000001").iterdir())
    assert files == [".metadata", *report.files, "common.pt", "metadata.json"]
    assert (tmp_path / "new" / TRACKER).read_text() == "1"
    config = json.loads((tmp_path / "new" / "iter_0000001" / "metadata.json").read_text())
    assert config == json.loads((folder / "iter_0000001" / "metadata.json").read_text())
    old, new = holdfast.open(folder), holdfast.open(tmp_path / "new")
    names = [name for name in old.names() if "random" not in name]
    assert names == new.names()
    assert [name for name in names if bits(old[name][...]) != bits(new[name][...])] == []
    before: Any = old.tree()
    after: Any = new.tree()
    assert {key: after["optimizer"][key] for key in ("step", "param_groups")} == {
        key: before["optimizer"][key] for key in ("step", "param_groups")
    }
    assert after["scheduler"] == before["scheduler"]
    assert new.step == 1


def test_entries_of_the_user_stand_beside_those_of_megatron(tmp_path: Path) -> None:
    state = {"model": {"decoder.weight": torch.arange(6.0).view(2, 3)}, "progress": {"tokens": 7, "seen": [1, 2]}}
    holdfast.save(tmp_path / "run", state, 1234567)
    holdfast.export(tmp_path / "run", tmp_path / "new", "megatron")
    common = torch.load(tmp_path / "new" / "iter_1234567" / "common.pt", weights_only=True)
    assert common["progress"] == {"tokens": 7, "seen": [1, 2]}
    assert common["iteration"] == 1234567
    assert "optimizer" not in common
    found = holdfast.open(tmp_path / "new")["model/decoder.weight"][...]
    assert torch.equal(found, state["model"]["decoder.weight"])  # type: ignore[index]


def test_a_second_iteration_moves_the_tracker_and_a_second_export_of_one_is_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        holdfast.save(tmp_path / f"run-{step}", {"model": {"weight": torch.full((2,), float(step))}}, step)
        holdfast.export(tmp_path / f"run-{step}", tmp_path / "new", "megatron")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["iter_0000001", "iter_0000002", TRACKER]
    assert holdfast.open(tmp_path / "new")["model/weight"][...].tolist() == [2.0, 2.0]
    with pytest.raises(HoldfastError, match="is not empty") as caught:
        holdfast.export(tmp_path / "run-1", tmp_path / "new", "megatron")
    assert caught.value.code == "config.destination"
    assert (tmp_path / "new" / TRACKER).read_text() == "2"


def test_an_export_that_was_killed_before_the_tracker_is_finished_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder was whole, so the same call refused it, and no tracker was ever written."""
    holdfast.save(tmp_path / "run", {"model": {"weight": torch.ones(2)}}, 3)
    monkeypatch.setattr(exporting, "write_tracker", _die)
    with pytest.raises(KeyboardInterrupt):
        holdfast.export(tmp_path / "run", tmp_path / "new", "megatron")
    monkeypatch.undo()
    assert not (tmp_path / "new" / TRACKER).exists()
    report = holdfast.export(tmp_path / "run", tmp_path / "new", "megatron")
    assert set(report.files) <= set(report.kept)
    assert holdfast.open(tmp_path / "new")["model/weight"][...].tolist() == [1.0, 1.0]


#: An export that kills itself while it writes the tracker.
KILLED = """
import os, signal, sys
import holdfast
from holdfast.store import posix
def killed(temporary, path):
    os.kill(os.getpid(), signal.SIGKILL)
posix._take_name = killed
holdfast.export(sys.argv[1], sys.argv[2], "megatron")
"""


def test_a_kill_while_the_tracker_was_written_left_a_temporary_file_for_ever(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": {"weight": torch.ones(2)}}, 3)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run"), str(tmp_path / "new")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (leftover,) = (path for path in (tmp_path / "new").iterdir() if path.name != "iter_0000003")
    assert leftover.name.startswith(".tmp-")
    os.utime(leftover, (0, 0))  # a new one could be that of another call
    holdfast.export(tmp_path / "run", tmp_path / "new", "megatron")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["iter_0000003", TRACKER]


def test_a_kill_while_the_tracker_was_written_left_an_older_iteration_without_one(tmp_path: Path) -> None:
    """Megatron without a tracker file begins with random weights, although the older iteration is there."""
    for step in (1, 3):
        holdfast.save(tmp_path / f"run-{step}", {"model": {"weight": torch.full((2,), float(step))}}, step)
    holdfast.export(tmp_path / "run-1", tmp_path / "new", "megatron")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run-3"), str(tmp_path / "new")]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert holdfast.open(tmp_path / "new").step == 1
    holdfast.export(tmp_path / "run-3", tmp_path / "new", "megatron")
    found = holdfast.open(tmp_path / "new")
    assert (found.step, found["model/weight"][...].tolist()) == (3, [3.0, 3.0])


@pytest.mark.parametrize("other", ["hf", "dcp"])
def test_an_export_to_megatron_went_into_the_folder_of_an_export_that_had_not_ended(tmp_path: Path, other: str) -> None:
    """The other one could then never be finished: it found the folder of the iteration."""
    holdfast.save(tmp_path / "run", {"model": {"weight": torch.ones(2)}}, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_writer, "_check_whole", _die)
        with pytest.raises(KeyboardInterrupt):
            holdfast.export(tmp_path / "run", tmp_path / "new", other)
    before = sorted(path.name for path in (tmp_path / "new").iterdir())
    with pytest.raises(HoldfastError, match="holds a part of another export") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "new", "megatron")
    assert caught.value.code == "config.destination"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == before
    holdfast.export(tmp_path / "run", tmp_path / "new", other)


def _die(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_older_iteration_does_not_take_the_tracker_from_a_later_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Megatron would have gone on from the older one without a word."""
    for step in (500, 3):
        holdfast.save(tmp_path / f"run-{step}", {"model": {"weight": torch.ones(2)}}, step)
        holdfast.export(tmp_path / f"run-{step}", tmp_path / "new", "megatron")
    assert (tmp_path / "new" / TRACKER).read_text() == "500"
    assert "keeps naming iteration 500, which is later than 3" in caplog.text


@pytest.mark.parametrize("text", ["500 is the best one", "iter_0000500", "1\n2", "7" * 200, None])
def test_an_export_overwrote_a_file_that_was_no_tracker(tmp_path: Path, text: str | None) -> None:
    holdfast.save(tmp_path / "run", {"model": {"weight": torch.ones(2)}}, 3)
    (tmp_path / "new").mkdir()
    if text is None:
        (tmp_path / "new" / TRACKER).mkdir()
    else:
        (tmp_path / "new" / TRACKER).write_text(text)
    with pytest.raises(HoldfastError, match=f"{TRACKER}' is no tracker file of Megatron") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "new", "megatron")
    assert caught.value.code == "config.destination"
    assert [path.name for path in (tmp_path / "new").iterdir()] == [TRACKER]
    assert text is None or (tmp_path / "new" / TRACKER).read_text() == text


@pytest.mark.parametrize("text", ["", "release", "2\n"])
def test_a_tracker_of_megatron_is_still_replaced(tmp_path: Path, text: str) -> None:
    holdfast.save(tmp_path / "run", {"model": {"weight": torch.ones(2)}}, 3)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / TRACKER).write_text(text)
    holdfast.export(tmp_path / "run", tmp_path / "new", "megatron")
    assert (tmp_path / "new" / TRACKER).read_text() == "3"


def test_a_state_without_a_step_is_a_release(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.ones(2)}}, tmp_path / "weights.pt")
    holdfast.export(tmp_path / "weights.pt", tmp_path / "new", "megatron")
    assert (tmp_path / "new" / TRACKER).read_text() == "release"
    assert holdfast.open(tmp_path / "new").names() == ["model/weight"]


def test_what_megatron_has_no_key_for_is_refused_and_can_be_left_out(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.ones(2)}, "ema": {"weight": torch.zeros(2)}}
    holdfast.save(tmp_path / "run", state, 1)
    with pytest.raises(HoldfastError, match="ema/weight has no key in Megatron") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "new", "megatron")
    assert caught.value.code == "incompatible.export"
    assert not (tmp_path / "new").exists()
    holdfast.export(tmp_path / "run", tmp_path / "new", "megatron", select="model")
    assert holdfast.open(tmp_path / "new").names() == ["model/weight"]


def test_an_export_of_a_plain_model_was_silent_about_names_that_megatron_does_not_find(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = ["decoder.layers.0.self_attn.q_proj.weight", "model.norm.weight", "output_layer.weight"]
    holdfast.save(tmp_path / "run", {"model": {name: torch.ones(2) for name in names}}, 1)
    holdfast.export(tmp_path / "run", tmp_path / "new", "megatron")
    assert f"2 of 3 weights have names that no model of Megatron-core has, such as model/{names[0]}" in caplog.text
    assert "--mapping" in caplog.text


def test_the_names_of_megatron_are_exported_without_a_warning(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holdfast.export(folder, tmp_path / "new", "megatron")
    assert caplog.text == ""


def test_a_plain_optimizer_was_exported_although_megatron_finds_none_of_its_groups(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"output_layer": torch.nn.Linear(2, 2)})
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    holdfast.save(tmp_path / "run", state, 1)
    with pytest.raises(HoldfastError, match=r"optimizer is a plain one.*select='model'.*ToMegatron") as caught:
        holdfast.export(tmp_path / "run", tmp_path / "new", "megatron")
    assert caught.value.code == "incompatible.export"
    holdfast.export(tmp_path / "run", tmp_path / "new", "megatron", select="model")
    assert holdfast.open(tmp_path / "new").names() == ["model/output_layer.bias", "model/output_layer.weight"]


def test_buckets_of_a_layout_are_no_export(tmp_path: Path) -> None:
    with tarfile.open(FIXTURES / "buckets-on-4.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    with pytest.raises(HoldfastError, match="is a bucket of the job that saved it"):
        holdfast.export(tmp_path / "buckets-on-4", tmp_path / "new", "megatron")
    shutil.rmtree(tmp_path / "new", ignore_errors=True)
    holdfast.export(tmp_path / "buckets-on-4", tmp_path / "new", "megatron", select="model")
