"""Jobs and copies of their runs: on other storage, on another number of ranks, beside a job that saves and deletes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, EverySteps, KeepLast
from holdfast.run.history import Run
from holdfast.store.urls import location_of, open_store
from tests.jobs.test_resharding import load, save
from tests.support import nursery
from tests.support.command_line import holdfast_command
from tests.support.models import start_new_job
from tests.support.nursery import until
from tests.support.ranks import run_ranks

#: The elements of a large tensor: its file is uploaded in parts.
LARGE = 5 << 20


def train(run: str, num_steps: int, *, keep: int | None = None) -> tuple[int | None, dict[str, torch.Tensor]]:
    """Train up to a step, and return the step that it went on from, and its weights."""
    start_new_job()
    torch.manual_seed(7)
    model = torch.nn.Linear(64, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    policy = None if keep is None else KeepLast(keep)
    with Checkpointer(run, state, save=EverySteps(5), keep=policy, memory=None) as ckpt:
        restored = ckpt.restore().step
        for step in ckpt.steps(num_steps):
            optimizer.zero_grad()
            model(torch.full((64,), step / 10)).square().sum().backward()
            optimizer.step()
            ckpt.step(step)
    return restored, {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train_and_delete(run: str) -> None:
    """Train until somebody ends this process, and keep two checkpoints."""
    train(run, 1_000_000, keep=2)


@pytest.mark.slow
def test_a_run_goes_to_a_bucket_and_back(run: str, in_bucket: str, tmp_path: Path) -> None:
    start_new_job()
    state = {"w": torch.arange(LARGE), "b": torch.randn(7)}
    for step in (1, 2):
        state["w"] += 1
        holdfast.save(run, state, step)
    holdfast.copy_run(run, in_bucket)
    assert holdfast_command("verify", in_bucket, "--all", "--deep").status == 0
    back = str(tmp_path / "back")
    assert len(holdfast.copy_run(in_bucket, back, read_back=True).copied) == 2
    for path in Path(run).rglob("*.*"):
        assert path.read_bytes() == (Path(back) / path.relative_to(run)).read_bytes()


def test_a_job_goes_on_from_a_copy_as_it_would_from_the_run(run: str, tmp_path: Path) -> None:
    copy = str(tmp_path / "copy")
    train(run, 10)
    holdfast.copy_run(run, copy)
    there, here = train(copy, 20), train(run, 20)
    assert there[0] == here[0] == 9
    assert all(torch.equal(there[1][name], here[1][name]) for name in here[1])
    # From now on there are two histories with one id, and neither takes anything from the other.
    with pytest.raises(holdfast.ConfigurationError, match="a job has saved into it"):
        holdfast.copy_run(run, copy)


def test_a_job_that_has_loaded_the_run_does_not_save_into_its_copy(run: str, tmp_path: Path) -> None:
    start_new_job()
    state = {"w": torch.arange(10)}
    holdfast.save(run, state, 1)
    copy = str(tmp_path / "copy")
    holdfast.copy_run(run, copy)
    holdfast.load(run, state)
    with pytest.raises(holdfast.ConfigurationError) as error:
        holdfast.save(copy, state, 2)
    assert error.value.code == "config.unloaded_history"


@pytest.mark.slow
def test_a_copy_is_restored_on_another_number_of_ranks(run: str, tmp_path: Path) -> None:
    run_ranks(2, save, "fsdp", run, 5, 30)
    copy = str(tmp_path / "copy")
    holdfast.copy_run(run, copy)
    for differing_names, unloaded, held, needed in run_ranks(3, load, "fsdp", copy, 5, 1):
        assert (differing_names, unloaded) == ([], set())
        assert needed == held


@pytest.mark.slow
def test_copies_beside_a_job_that_saves_and_deletes(run: str, tmp_path: Path) -> None:
    job = nursery.start(train_and_delete, run, err=tmp_path / "err")
    copy = str(tmp_path / "copy")
    try:
        until(lambda: Path(run).exists() and bool(open_store(location_of(run)).list("history")), timeout_s=60)
        seen: set[str] = set()
        while len(seen) < 30:
            assert job.is_running
            report = holdfast.copy_run(run, copy)
            seen.update(report.copied)
            target = Run.open(open_store(location_of(copy)))
            assert {str(place) for place in target.places()} == seen
            head = target.head()
            assert head is not None
            assert str(head.place) == report.head
    finally:
        job.send(signal.SIGTERM)
        job.kill()
    assert holdfast_command("verify", copy, "--all", "--deep").status == 0
    assert holdfast_command("doctor", copy).status == 0
