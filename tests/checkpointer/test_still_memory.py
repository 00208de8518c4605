"""Background saves of a state with a frozen base: memory holds all of it, and storage gets the base once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, Memory
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.checkpoint.verification import verify_checkpoint
from holdfast.run.diagnosis import examine
from tests.checkpointer.test_memory_only import save_held
from tests.saving.test_references import Job, assert_equal, folder_of, opened, still_in
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.nursery import until
from tests.support.ranks import run_ranks


def save(own: Checkpointer, job: Job, step: int) -> holdfast.Handle:
    job.train()
    job.state["step"] = step
    handle = own.save(step)
    handle.durable.wait(60.0)
    return handle


def restored(run: str, memory: Memory) -> tuple[Job, str | None]:
    """A new job that goes on from what it finds, and where it found that."""
    start_new_job()
    job = Job(seed=9)
    job.train()
    with Checkpointer(run, job.state, memory=memory) as own:
        return job, own.restore().tier


def test_the_base_goes_to_storage_once_and_to_memory_each_time(
    run: str, memory: Memory, node_dir: Path, tmp_path: Path
) -> None:
    job = Job()
    own = Checkpointer(run, job.state, memory=memory)
    first, second = save(own, job, 1), save(own, job, 2)
    assert second.durable.nbytes < 0.2 * first.durable.nbytes
    assert still_in(run, 2) == ["still-00001.same.json"]
    own.close()
    found, tier = restored(run, memory)
    assert tier == "node memory"
    assert_equal(found.bits(), job.bits())
    end_keepers(node_dir)
    other = tmp_path / "other"
    other.mkdir()
    found, tier = restored(run, Memory(node_dir=other))
    assert tier == "storage"
    assert_equal(found.bits(), job.bits())
    end_keepers(other)
    assert examine(opened(run)) == []


def test_a_base_that_changes_secretly_is_found_by_the_keeper(run: str, memory: Memory) -> None:
    job = Job()
    with Checkpointer(run, job.state, memory=memory) as own:
        save(own, job, 1)
        with torch.no_grad():
            job.model.base.weight.data[0, 0] += 1
        save(own, job, 2)
        save(own, job, 3)
    assert [still_in(run, step) for step in (2, 3)] == [["still-00001.safetensors"], ["still-00001.same.json"]]
    assert torch.equal(holdfast.open(run)["model/base.weight"][...], job.model.base.weight)
    for place in opened(run).places():
        checkpoint = Checkpoint(opened(run).locate(opened(run).commit(place)))
        assert verify_checkpoint(checkpoint, deep=True) == []


def test_a_save_to_memory_alone_leaves_no_record_and_is_written_whole(run: str, memory: Memory) -> None:
    job = Job()
    job.state["w"], job.state["progress"] = torch.zeros(4), {"step": 0}
    with Checkpointer(run, job.state, memory=memory) as own:
        save(own, job, 1)
        save_held(own, job.state, 2)
        assert not (Path(run) / "references").exists()
    # The end of the job makes it durable.
    until(lambda: len(opened(run).places()) == 2)
    assert still_in(run, 2) == ["still-00001.safetensors"]


def save_in_background(run: str, node_dir: Path) -> list[int]:
    start_new_job()
    job = Job()
    with Checkpointer(run, job.state, memory=Memory(node_dir=node_dir)) as own:
        return [save(own, job, step).durable.nbytes for step in (1, 2, 3)]


@pytest.mark.parametrize("world_size", [2])
def test_keepers_of_several_ranks_commit_what_is_marked(run: str, node_dir: Path, world_size: int) -> None:
    sizes = run_ranks(world_size, save_in_background, run, node_dir)
    assert sum(third for *_, third in sizes) < 0.2 * sum(first for first, *_ in sizes)
    assert still_in(run, 3) == ["still-00001.same.json"]
    assert (folder_of(run, 1) / "still-00001.safetensors").exists()
    start_new_job()
    checkpoint = Checkpoint(opened(run).locate(opened(run).find(step=3)))
    assert verify_checkpoint(checkpoint, deep=True) == []
