"""Frozen tensors of saves that go to a disk of the node first: the disk has them whole, and the run once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, Memory
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.run.diagnosis import examine
from holdfast.signing import KEYS
from tests.checkpointer.test_still_memory import save
from tests.saving.test_references import Job, assert_equal, folder_of, opened, still_in
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


def goes_down(node_dir: Path) -> None:
    """The node goes down: its keeper dies, and its memory is lost."""
    end_keepers(node_dir)
    shutil.rmtree(node_dir)
    node_dir.mkdir()
    start_new_job()


def restored(run: str, node_dir: Path, disk: Path, keys: str) -> tuple[dict[str, torch.Tensor], int | None, str | None]:
    """The findings of a new job with these signing keys: the bits, the step, and the tier."""
    start_new_job()
    job = Job(seed=9)
    job.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEYS, keys)
        with Checkpointer(run, job.state, memory=Memory(node_dir=node_dir), local=disk) as own:
            report = own.restore()
    return job.bits(), report.step, report.tier


@pytest.mark.parametrize("keys", [pytest.param("", id="plain"), pytest.param("ab" * 32, id="signed")])
def test_the_base_lies_on_the_disk_whole_and_goes_to_the_run_once(
    run: str, node_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: str
) -> None:
    monkeypatch.setenv(KEYS, keys)
    disk = tmp_path / "disk"
    job = Job()
    with Checkpointer(run, job.state, memory=Memory(node_dir=node_dir), local=disk) as own:
        first, second = (save(own, job, step).durable for step in (1, 2))
    assert second.nbytes < 0.2 * first.nbytes
    assert still_in(run, 2) == ["still-00001.same.json"]
    (written,) = folder_of(run, 1).glob("still-*")
    on_disk = sorted(disk.glob("*/checkpoints/*/still-00001.safetensors"))
    assert len(on_disk) == 2
    assert on_disk[0].read_bytes() == written.read_bytes()
    for place in opened(run).places():
        assert verify_checkpoint(Checkpoint(opened(run).locate(opened(run).commit(place))), deep=True) == []

    # Neither the run's copy of the base nor memory is needed to restore on this node.
    goes_down(node_dir)
    written.rename(tmp_path / "base")
    bits, step, tier = restored(run, node_dir, disk, keys)
    assert (step, tier) == (2, "node disk")
    assert_equal(bits, job.bits())

    # Other ranks on other nodes need neither the disk.
    (tmp_path / "base").rename(written)
    goes_down(node_dir)
    (tmp_path / "other").mkdir()
    for bits, step, tier in run_ranks(2, restored, run, tmp_path / "other", tmp_path / "none", keys):
        assert (step, tier) == (2, "storage")
        assert_equal(bits, job.bits())
    end_keepers(tmp_path / "other")
    start_new_job()
    assert examine(opened(run)) == []
