"""Damaged records of commits and epochs: jobs go on from an older checkpoint, and the doctor makes them anew."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer, CorruptError, Memory, NotFoundError
from holdfast.format import records
from holdfast.format.records import Place
from holdfast.node_memory.slots import Slot, SlotState, slot_names
from holdfast.run.diagnosis import examine, finish
from tests.checkpointer.test_checkpointer import folder_of
from tests.run.test_lost_epochs import opened
from tests.store.test_posix_storage import mounted
from tests.support import nursery
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.nursery import until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with the steps 1, 2 and 3."""
    state = {"w": torch.zeros(4)}
    for step in (1, 2, 3):
        state["w"].fill_(step)
        holdfast.save(tmp_path / "run", state, step)
    start_new_job()
    return tmp_path / "run"


def damage(root: Path, key: str, how: str) -> None:
    path = root / key
    data = b"" if how == "emptied" else path.read_bytes()[:-3] + b"!!!"
    path.write_bytes(data)


HEAD = records.commit_key(Place(1, 3))


@pytest.mark.parametrize("how", ["emptied", "altered"])
@pytest.mark.parametrize("verb", ["load", "restore"])
def test_a_job_that_passed_over_a_damaged_commit_record_saves_on(root: Path, how: str, verb: str) -> None:
    damage(root, HEAD, how)
    state = {"w": torch.zeros(4)}
    with Checkpointer(root, state, memory=None) as checkpointer:
        if verb == "load":
            assert holdfast.load(root, state, fallback=True).step == 2
        else:
            assert checkpointer.restore(fallback=True).step == 2
        checkpointer.save(3)
        checkpointer.save(4)
    start_new_job()
    assert holdfast.load(root, state).step == 4
    assert [commit.step for commit in opened(root).lineage()] == [4, 3, 2, 1]


def test_what_is_damaged_in_storage_is_not_blamed_on_memory(
    root: Path, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    damage(root, HEAD, "emptied")
    with Checkpointer(root, {"w": torch.zeros(4)}, memory=memory) as checkpointer:
        assert checkpointer.restore(fallback=True).step == 2
    assert "the snapshots in memory cannot be used" not in caplog.text


@pytest.mark.parametrize("how", ["emptied", "altered"])
def test_the_doctor_makes_a_damaged_commit_record_anew_from_its_checkpoint(root: Path, how: str) -> None:
    sound = (root / HEAD).read_bytes()
    damage(root, HEAD, how)
    (finding,) = examine(opened(root))
    assert (finding.code, finding.remedy) == ("record.damaged", "finish")
    assert finish(opened(root), finding).step == 3
    assert (root / HEAD).read_bytes() == sound
    assert examine(opened(root)) == []
    assert finish(opened(root), finding).step == 3, "again does no harm"


def test_a_damaged_commit_whose_checkpoint_is_damaged_too_stays_as_it_is(root: Path) -> None:
    damage(root, HEAD, "emptied")
    (finding,) = examine(opened(root))
    (file,) = (root / "checkpoints").glob("step-0000000003-*/data-00000.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    with pytest.raises(CorruptError):
        finish(opened(root), finding)
    assert (root / HEAD).read_bytes() == b""
    shutil.rmtree(file.parent)
    (finding,) = examine(opened(root))
    assert (finding.code, finding.remedy) == ("record.damaged", "none")


@pytest.mark.parametrize("seal", [b"damaged", None])
def test_a_checkpoint_whose_commit_and_seal_are_damaged_is_listed_once(root: Path, seal: bytes | None) -> None:
    """The doctor also said that another checkpoint was committed at its place."""
    damage(root, HEAD, "emptied")
    (path,) = (root / "checkpoints").glob("step-0000000003-*/seal.json")
    path.unlink()
    if seal is not None:
        path.write_bytes(seal)
    (finding,) = examine(opened(root))
    assert (finding.code, finding.remedy) == ("record.damaged", "none")


def test_the_doctor_makes_a_damaged_epoch_record_anew(root: Path) -> None:
    damage(root, records.epoch_key(1), "emptied")
    (finding,) = examine(opened(root))
    assert (finding.code, finding.remedy) == ("record.damaged", "finish")
    assert finish(opened(root), finding).step == 3
    assert examine(opened(root)) == []


def test_a_run_that_lost_its_history_is_not_begun_anew(root: Path) -> None:
    shutil.rmtree(root / "history")
    state = {"w": torch.zeros(4)}
    for act in (
        lambda: holdfast.load(root, state),
        lambda: holdfast.open(root),
        lambda: Checkpointer(root, state, memory=None).restore(),
        lambda: holdfast.save(root, state, 1),
    ):
        with pytest.raises(CorruptError, match=r"has sealed checkpoints .*, but no commits.*doctor --finish") as caught:
            act()
        assert caught.value.code == "corrupt.history"
    for finding in examine(opened(root)):
        assert (finding.code, finding.remedy) == ("folder.complete", "finish")
        finish(opened(root), finding)
    assert holdfast.load(root, state).step == 3


def test_one_sealed_checkpoint_without_a_commit_is_what_a_save_that_died_leaves(tmp_path: Path) -> None:
    root, state = tmp_path / "run", {"w": torch.ones(4)}
    holdfast.save(root, state, 1)
    (root / records.commit_key(Place(1, 1))).unlink()
    start_new_job()
    with pytest.raises(NotFoundError, match="doctor to see whether one can be finished"):
        holdfast.load(root, state)
    assert holdfast.save(root, state, 1).place == "2.1"


def test_jobs_that_die_in_their_first_saves_are_no_lost_history(tmp_path: Path) -> None:
    """The third job was told that the history folder was lost, and so were all after it: no job could start any more
    until somebody had called the doctor."""
    root, state = tmp_path / "run", {"w": torch.ones(4)}
    for job in (1, 2, 3):
        holdfast.save(root, state, job)
        (root / records.commit_key(Place(job, 1))).unlink()
        start_new_job()
        with pytest.raises(NotFoundError, match="doctor to see whether one can be finished"):
            holdfast.load(root, state)
    with Checkpointer(root, state, memory=None) as checkpointer:
        assert checkpointer.restore().step is None
        checkpointer.save(0)
    assert holdfast.load(root, state).step == 0


@pytest.mark.parametrize("also", [records.EPOCHS, None])
def test_the_lost_history_of_jobs_that_went_on_from_each_other_is_told(tmp_path: Path, also: str | None) -> None:
    root, state = tmp_path / "run", {"w": torch.ones(4)}
    for job in (1, 2):
        if job > 1:
            holdfast.load(root, state)
        holdfast.save(root, state, job)
        start_new_job()
    for folder in ("history", also):
        if folder is not None:
            shutil.rmtree(root / folder)
    with pytest.raises(CorruptError, match=r"no commits|is missing"):
        holdfast.load(root, state)


def stage_and_die(run: str, node_dir: Path) -> None:
    state = {f"w{number}": torch.full((1 << 19,), 7.0) for number in range(6)} | {"epoch": 3}
    checkpointer = Checkpointer(run, state, memory=Memory(node_dir=node_dir))
    checkpointer.save(1).staged.wait(60)
    os.kill(os.getpid(), signal.SIGKILL)


def test_damaged_memory_that_is_the_only_copy_is_not_taken_for_a_first_start(tmp_path: Path) -> None:
    """Storage has no room for what a killed trainer staged, and a byte of it flips in memory."""
    memory = Memory(node_dir=tmp_path / "node")
    memory.node_dir.mkdir()
    with mounted(tmp_path / "disk", "tmpfs", "size=1m") as disk:
        run = str(disk / "run")
        killed = nursery.start(stage_and_die, run, memory.node_dir, err=tmp_path / "err")
        assert killed.wait() == -signal.SIGKILL, killed.err
        with folder_of(run, memory.node_dir) as folder:
            for name in slot_names(folder):
                with Slot(folder, name) as slot:
                    if slot.refresh().contents is not None:
                        until(lambda slot=slot: slot.refresh().state == SlotState.SEALED)  # type: ignore[misc]
                        slot.data[int(len(slot.data) * 0.7)] ^= 1
        into: dict[str, Any] = {f"w{number}": torch.zeros(1 << 19) for number in range(6)} | {"epoch": 0}
        with Checkpointer(run, into, memory=memory) as checkpointer:
            with pytest.raises(CorruptError, match="no other copy") as caught:
                checkpointer.restore()
            assert any("partly filled" in note for note in caught.value.__notes__)
        end_keepers(memory.node_dir)
