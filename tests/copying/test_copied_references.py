"""Copies of runs whose checkpoints refer to files of earlier ones: each checkpoint of the copy has all of its bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.checkpoint.stored_checkpoint import Checkpoint
from holdfast.errors import CorruptError
from holdfast.format import manifest as fmt
from holdfast.format.records import SEAL_NAME, Place
from holdfast.run.complete import check_data, read_manifest
from holdfast.run.leases import await_ended_reads
from holdfast.testing.memory_store import MemoryStore
from tests.copying.test_copy_model import DieAt, PowerCutError, copied
from tests.copying.test_copy_run import copy_with, opened
from tests.saving.test_references import Job, assert_equal, folder_of, load_and_save, loaded, sharded, still_in
from tests.support.command_line import holdfast_command
from tests.support.faulty_storage import FaultyStore
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks

STILL = "still-00001.safetensors"


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[str]:
    start_new_job()
    yield str(tmp_path / "copy")
    start_new_job()


def saved(run: str, *steps: int) -> tuple[Job, dict[int, dict[str, torch.Tensor]]]:
    """Save a frozen base and its adapter at each of the steps. Returns the job, and the weights of each step."""
    job, bits = Job(), {}
    for step in steps:
        job.save(run, step)
        bits[step] = job.bits()
    return job, bits


def remove(run: str, step: int) -> None:
    await_ended_reads()
    holdfast.remove(f"{run}@step={step}")


def check_sound(copy: str) -> None:
    """Verification reads every byte, the doctor has no finding, and no checkpoint needs a folder but its own."""
    assert holdfast_command("verify", copy, "--all", "--deep").status == 0
    assert holdfast_command("doctor", copy, "--deep").status == 0
    run = opened(Path(copy))
    for place in run.places():
        commit = run.commit(place)
        stored = read_manifest(run, commit.checkpoint)
        checkpoint = Checkpoint(run.locate(commit))
        for index, seal in enumerate(checkpoint.seal.files):
            assert run.storage.nbytes(stored.key(seal.name)) == seal.nbytes
            assert check_data(run.storage, stored, checkpoint.files.layout(index)) == seal


def test_the_files_of_a_removed_checkpoint_come_with_each_one_that_needs_them(run: str, copy: str) -> None:
    job, bits = saved(run, 1, 2, 3)
    remove(run, 1)
    assert still_in(run, 1) == [STILL]
    report = holdfast.copy_run(run, copy)
    assert report.copied == ("1.2", "1.3")
    assert report.written_nbytes > 2 * job.model.base.weight.nbytes
    assert {path.name for path in Path(copy).iterdir()} == {"checkpoints", "epochs", "history", "holdfast.json"}
    for step in (2, 3):
        names = {path.name for path in folder_of(copy, step).iterdir()}
        assert names == {fmt.NAME, SEAL_NAME, "data-00000.safetensors", STILL}
        for name in names - {STILL}:
            assert (folder_of(copy, step) / name).read_bytes() == (folder_of(run, step) / name).read_bytes()
    shutil.rmtree(run)
    check_sound(copy)
    for step in (2, 3):
        assert_equal(loaded(f"{copy}@step={step}"), bits[step])


def test_the_next_copy_brings_a_new_checkpoint_with_all_of_its_bytes(run: str, copy: str) -> None:
    job, bits = saved(run, 1, 2)
    holdfast.copy_run(run, copy)
    remove(run, 1)
    assert job.save(run, 3).referenced_nbytes > 0
    bits[3] = job.bits()
    report = holdfast.copy_run(run, copy)
    assert (report.copied, report.present) == (("1.3",), ("1.2",))
    check_sound(copy)
    for step, expected in bits.items():
        assert_equal(loaded(f"{copy}@step={step}"), expected)


def test_a_job_that_goes_on_in_the_copy_refers_to_the_head_of_the_copy(run: str, copy: str) -> None:
    saved(run, 1, 2, 3)
    holdfast.copy_run(run, copy)
    start_new_job()
    job = Job(seed=5)
    job.train()
    holdfast.load(copy, job.state)
    assert job.save(copy, 4).referenced_nbytes > 0
    assert still_in(copy, 4) == ["still-00001.same.json"]
    for step in (1, 2):
        remove(copy, step)
        assert not list(Path(copy, "checkpoints").glob(f"step-{step:010d}-*"))  # nobody needs anything of it
    remove(copy, 3)
    assert still_in(copy, 3) == [STILL]
    assert holdfast_command("verify", copy, "--all", "--deep").status == 0
    assert holdfast_command("doctor", copy).status == 0
    assert_equal(loaded(copy), job.bits())


def test_one_checkpoint_is_copied_with_what_it_refers_to(run: str, copy: str, tmp_path: Path) -> None:
    _, bits = saved(run, 1, 2)
    assert holdfast.copy_run(f"{run}@step=2", copy).copied == ("1.2",)
    check_sound(copy)
    assert_equal(loaded(copy), bits[2])
    # Its folder can go on alone, as after `holdfast compact`.
    alone = tmp_path / "alone" / folder_of(copy, 2).name
    shutil.copytree(folder_of(copy, 2), alone)
    assert torch.equal(holdfast.open(str(alone))["model/base.weight"][...], bits[2]["base.weight"])
    # A file that the copy lost comes again, and the others are kept.
    (folder_of(copy, 2) / STILL).unlink()
    report = holdfast.copy_run(f"{run}@step=2", copy)
    assert (report.present, report.num_kept) == (("1.2",), 1)
    check_sound(copy)


def test_a_copy_gives_a_run_back_what_a_lost_holder_had(run: str, copy: str) -> None:
    _, bits = saved(run, 1, 2, 3)
    holdfast.copy_run(run, copy)
    remove(run, 1)
    (folder_of(run, 1) / STILL).unlink()
    assert holdfast_command("verify", run, "--all").status == 1
    for place in ("1.2", "1.3"):
        holdfast.copy_run(f"{copy}@{place}", run)
    assert holdfast_command("verify", run, "--all", "--deep").status == 0
    for step in (2, 3):
        assert_equal(loaded(f"{run}@step={step}"), bits[step])


def test_a_damaged_file_of_an_earlier_checkpoint_does_not_appear_in_the_copy(run: str, copy: str) -> None:
    saved(run, 1, 2)
    with (folder_of(run, 1) / STILL).open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"?")
    with pytest.raises(CorruptError, match="does not match its digest") as caught:
        holdfast.copy_run(f"{run}@step=2", copy)
    assert caught.value.path is not None
    assert folder_of(run, 1).name in caught.value.path
    assert not list(Path(copy).rglob("still-*"))


def test_a_copy_that_dies_at_every_change_ends_with_the_same_bytes(run: str) -> None:
    saved(run, 1, 2, 3)
    remove(run, 1)
    source, whole, target = opened(Path(run)), MemoryStore("whole"), MemoryStore("target")
    copied(source, whole)
    for num_changes in range(len(whole.objects)):
        with suppress(PowerCutError):
            copied(source, FaultyStore(target, DieAt(num_changes, when="before")))
        assert target.objects.items() <= whole.objects.items()
    copied(source, target)
    assert target.objects == whole.objects


def compact_and_remove(run: str) -> None:
    for step in (2, 3):
        holdfast.compact(f"{run}@step={step}")
    remove(run, 1)
    assert not list(Path(run, "checkpoints").glob("step-0000000001-*"))


@pytest.mark.parametrize("what", [lambda run: remove(run, 1), compact_and_remove], ids=["removed", "not needed"])
def test_a_holder_that_is_deleted_during_the_copy(run: str, copy: str, what: Callable[[str], None]) -> None:
    _, bits = saved(run, 1, 2, 3)
    copy_with(opened(Path(run)), Path(copy), lambda text: what(run) if "1.2" in text else None)
    check_sound(copy)
    assert_equal(loaded(f"{copy}@step=2"), bits[2])


def test_a_copy_that_fails_beside_a_removal_in_the_target_deletes_no_file_that_others_need(run: str, copy: str) -> None:
    saved(run, 1, 2)
    holdfast.copy_run(run, copy)
    start_new_job()
    job = Job(seed=5)
    job.train()
    holdfast.load(copy, job.state)
    job.save(copy, 3)
    with next(folder_of(run, 2).glob("data-*")).open("r+b") as file:
        file.seek(-5, 2)
        file.write(b"?")
    removed: list[str] = []

    def watch(_: int, when: str, name: str, path: str) -> None:
        if (when, name) == ("before", "list") and path.endswith(folder_of(run, 2).name) and not removed:
            removed.append(path)
            remove(copy, 2)

    target = FaultyStore(opened(Path(copy)).storage, watch)
    outcome = copied(opened(Path(run)), target, Place(1, 2), skip_damaged=True)
    assert (outcome.damaged, len(removed)) == ([Place(1, 2)], 1)
    assert_equal(loaded(copy), job.bits())


def save_on_ranks(run: str) -> dict[str, torch.Tensor]:
    start_new_job()
    job = sharded(0)
    assert [job.save(run, step).referenced_nbytes > 0 for step in (1, 2, 3)] == [False, True, True]
    return {name: tensor.full_tensor() for name, tensor in job.model.state_dict().items()}


@pytest.mark.slow
def test_a_copy_is_loaded_and_trained_on_by_another_number_of_ranks(run: str, copy: str) -> None:
    expected = run_ranks(2, save_on_ranks, run)[0]
    remove(run, 1)
    holdfast.copy_run(run, copy)
    shutil.rmtree(run)
    check_sound(copy)
    for found, _ in run_ranks(3, load_and_save, copy, 4):
        assert_equal(found, expected)
    check_sound(copy)
    assert torch.equal(holdfast.open(copy)["model/base.weight"][...], expected["base.weight"])


@pytest.mark.slow
def test_references_go_to_a_bucket_and_back(run: str, copy: str, in_bucket: str) -> None:
    _, bits = saved(run, 1, 2, 3)
    remove(run, 1)
    holdfast.copy_run(run, in_bucket, read_back=True)
    shutil.rmtree(run)
    assert holdfast_command("verify", in_bucket, "--all", "--deep").status == 0
    holdfast.copy_run(in_bucket, copy)
    check_sound(copy)
    for step in (2, 3):
        assert_equal(loaded(f"{copy}@step={step}"), bits[step])
