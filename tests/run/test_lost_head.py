"""A lost commit record of the head: loads and `ls` warn of the sealed checkpoint beyond it, and name the doctor."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer
from holdfast.format import records
from holdfast.format.records import SEAL_NAME, Place
from holdfast.run.history import Run
from holdfast.run.lost_head import lost_head
from holdfast.run.rollback import rollback
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.support.command_line import holdfast_command
from tests.support.models import start_new_job

State = dict[str, object]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A run with steps 1 to 3 in its first epoch."""
    start_new_job()
    for step in (1, 2, 3):
        holdfast.save(tmp_path / "run", state(), step)
    start_new_job()
    return tmp_path / "run"


def state() -> State:
    return {"w": torch.zeros(4)}


def lose(root: Path, place: Place) -> None:
    (root / records.commit_key(place)).unlink()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    caplog.clear()
    return found


def test_a_lost_commit_record_of_the_head_does_not_step_the_head_back_silently(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "warning" not in holdfast_command("ls", root).out
    holdfast.load(root, state())
    assert warnings(caplog) == []
    lose(root, Place(1, 3))
    for fallback in (False, True):
        assert holdfast.load(root, state(), fallback=fallback).step == 2
        (text,) = warnings(caplog)
        assert "(place 1.3, step 3) is sealed and newer than the head 1.2" in text
        assert f"holdfast doctor {root}" in text
        assert "--finish" in text
    with Checkpointer(root, state(), memory=None) as checkpointer:
        checkpointer.restore()
    assert len(warnings(caplog)) == 1
    listed = holdfast_command("ls", root)
    assert listed.status == 0
    assert "place 1.3, step 3" in " ".join(listed.out.split())
    assert holdfast_command("ls", root, "--json").json["uncommitted"].startswith(f"'{root}")
    holdfast.load(f"{root}@step=2", state())  # the caller chose it
    assert warnings(caplog) == []
    assert holdfast_command("doctor", root, "--finish").status == 0
    assert holdfast.load(root, state()).step == 3
    assert warnings(caplog) == []


def test_the_first_lost_commit_of_an_epoch_is_found_too(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    into = state()
    holdfast.load(root, into)
    holdfast.save(root, into, 4)
    start_new_job()
    lose(root, Place(2, 1))
    assert holdfast.load(root, into).step == 3
    assert "place 2.1, step 4" in warnings(caplog)[0]


def test_what_a_rollback_abandoned_and_what_is_unsealed_or_removed_is_no_lost_head(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run.open(open_store(Location(str(root))))
    (folder,) = root.glob("checkpoints/step-0000000003-*")
    lose(root, Place(1, 3))
    (folder / SEAL_NAME).rename(root.parent / "seal")  # as of a save that died while it wrote
    holdfast.load(root, state())
    assert warnings(caplog) == []
    (root.parent / "seal").rename(folder / SEAL_NAME)
    rollback(run, Place(1, 1))  # a process that commits it now does not make it the head
    holdfast.load(root, state())
    assert warnings(caplog) == []


def test_looking_for_a_lost_head_takes_few_requests_however_many_checkpoints_follow(root: Path) -> None:
    run = Run.open(open_store(Location(str(root))))
    into = state()
    holdfast.load(f"{root}@step=1", into, continues=True)
    for step in range(4, 24):
        holdfast.save(root, into, step)
    head = run.find(place=Place(1, 1))
    seen: list[str] = []
    read = run.storage.read

    def counted(key: str, *, limit: int = 1 << 30) -> bytes:
        seen.append(key)
        return read(key, limit=limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.storage, "read", counted)
        assert lost_head(run, head, newest=9) is None
    assert len(seen) == 8
