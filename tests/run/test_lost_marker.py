"""A run that has lost its marker is damaged: nothing takes it for a new run, and the doctor makes the marker anew."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, ConfigurationError, CorruptError, Memory, NotFoundError
from holdfast.run.diagnosis import examine, repair
from holdfast.run.history import Run
from holdfast.run.lost_marker import unmarked_run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.support.command_line import holdfast_command
from tests.support.models import start_new_job

KINDS = ("lost", "queue", "folder", "link to nothing")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with the steps 1 to 3."""
    state = {"w": torch.zeros(4)}
    for step in (1, 2, 3):
        state["w"].fill_(step)
        holdfast.save(tmp_path / "run", state, step)
    start_new_job()
    return tmp_path / "run"


def lose(root: Path, kind: str) -> None:
    marker = root / "holdfast.json"
    marker.unlink()
    if kind == "queue":
        os.mkfifo(marker)
    elif kind == "folder":
        marker.mkdir()
    elif kind == "link to nothing":
        marker.symlink_to("nothing")


def unmarked(root: Path) -> Run:
    return unmarked_run(open_store(Location(str(root))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("in_memory", [True, False])
def test_restore_does_not_take_a_run_without_its_marker_for_a_new_one(
    root: Path, tmp_path: Path, kind: str, in_memory: bool
) -> None:
    (tmp_path / "node").mkdir()
    lose(root, kind)
    state = {"w": torch.zeros(4)}
    memory = Memory(node_dir=tmp_path / "node") if in_memory else None
    checkpointer = Checkpointer(root, state, memory=memory, timeout_s=20)
    calls: list[Callable[[], object]] = [
        checkpointer.restore,
        lambda: checkpointer.restore(fallback=True),
        lambda: checkpointer.save(4),
        lambda: holdfast.load(root, state),
        lambda: holdfast.load(root, state, fallback=True),
        lambda: holdfast.open(root),
        lambda: holdfast.save(root, state, 4),
        lambda: holdfast.save(root, state, 4, takeover=True),
    ]
    for call in calls:
        with pytest.raises(CorruptError, match=r"whose marker .* is missing.*doctor --finish") as caught:
            call()
        assert caught.value.code == "corrupt.marker"
    assert state["w"].tolist() == [0.0] * 4
    assert holdfast_command("ls", "--json", root).json["error"]["code"] == "corrupt.marker"


@pytest.mark.parametrize("kind", ["lost", "queue", "link to nothing"])
def test_the_doctor_makes_a_lost_marker_anew_and_everything_loads_again(root: Path, kind: str) -> None:
    before = json.loads((root / "holdfast.json").read_text())
    lose(root, kind)
    found = holdfast_command("doctor", "--json", root)
    assert [(each["code"], each["remedy"]) for each in found.json["findings"]] == [("marker.missing", "finish")]
    assert found.json["head"]["step"] == 3
    done = holdfast_command("doctor", "--finish", "--yes", root)
    assert done.status == 0, done.err
    after = json.loads((root / "holdfast.json").read_text())
    assert (after["run_id"], after["format"]) == (before["run_id"], before["format"])
    assert holdfast_command("doctor", "--deep", root).status == 0
    state = {"w": torch.zeros(4)}
    assert holdfast.load(root, state).step == 3
    assert holdfast.save(root, state, 4).step == 4


def test_a_damaged_marker_is_made_anew_too(root: Path) -> None:
    text = (root / "holdfast.json").read_text()
    (root / "holdfast.json").write_text(text.replace("marker", "marked"))
    with pytest.raises(CorruptError):
        holdfast.open(root)
    (finding,) = examine(unmarked(root))
    assert (finding.code, finding.remedy) == ("record.damaged", "finish")
    repair(unmarked(root), finding)
    assert holdfast.open(root).step == 3
    repair(unmarked(root), finding)  # a sound one stays


def test_what_cannot_be_removed_in_place_of_the_marker_is_said(root: Path) -> None:
    lose(root, "folder")
    (finding,) = examine(unmarked(root))
    with pytest.raises(ConfigurationError, match="by hand"):
        repair(unmarked(root), finding)


def test_a_marker_that_nothing_tells_is_not_guessed(root: Path) -> None:
    lose(root, "lost")
    for manifest in root.glob("checkpoints/*/manifest.hfm"):
        manifest.unlink()
    findings = examine(unmarked(root))
    assert (findings[0].code, findings[0].remedy) == ("marker.missing", "none")
    assert holdfast_command("doctor", "--finish", "--yes", root).status == 1
    assert not (root / "holdfast.json").exists()


def test_a_checkpoint_of_another_run_does_not_say_what_the_marker_was(root: Path, tmp_path: Path) -> None:
    before = json.loads((root / "holdfast.json").read_text())
    holdfast.save(tmp_path / "other", {"w": torch.ones(4)}, 7)
    (theirs,) = (tmp_path / "other" / "checkpoints").iterdir()
    theirs.rename(root / "checkpoints" / theirs.name)
    lose(root, "lost")
    assert unmarked(root).run_id == before["run_id"]


def test_folders_of_other_programs_are_no_damaged_runs(tmp_path: Path) -> None:
    for name in ("checkpoints/checkpoint-500", "history", "epochs"):
        (tmp_path / "other" / name).mkdir(parents=True)
    with pytest.raises(NotFoundError) as caught:
        holdfast.open(tmp_path / "other")
    assert caught.value.code == "not_found.run"
    with pytest.raises(ConfigurationError) as refused:
        holdfast.save(tmp_path / "other", {"w": torch.ones(4)}, 1)
    assert refused.value.code == "config.not_a_run"
