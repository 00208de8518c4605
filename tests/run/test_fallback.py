"""`load(..., fallback=True)` passes over damaged checkpoints, on all ranks together, and says which and why."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import Checkpointer
from holdfast.errors import CorruptError, NotFoundError
from holdfast.format.records import Place
from holdfast.mapping import Crop, Pad
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.support.command_line import holdfast_command
from tests.support.models import Kind, build, differing, filled, start_new_job
from tests.support.ranks import RanksFailedError, run_ranks

STEPS = (1, 2, 3)


def save_all(kind: Kind, run: str) -> None:
    start_new_job()
    for step in STEPS:
        holdfast.save(run, filled(kind, step).state, step, timeout_s=30)


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the steps 1, 2 and 3, of two ranks."""
    run = tmp_path_factory.mktemp("fallback") / "run"
    run_ranks(2, save_all, "fsdp", str(run))
    return run


@pytest.fixture
def run(saved_run: Path, tmp_path: Path) -> Path:
    start_new_job()
    shutil.copytree(saved_run, tmp_path / "run")
    return tmp_path / "run"


def file_of(run: Path, step: int, name: str) -> Path:
    return next(run.glob(f"checkpoints/step-{step:010d}-*")) / name


def flip_last(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("name", ["seal.json", "manifest.hfm", "data-00001.safetensors"])
def test_a_head_that_lacks_a_file_is_passed_over(run: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    file_of(run, 3, name).unlink()
    job = build("plain", num_steps=0)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        report = holdfast.load(run, job.state, fallback=True)
    assert (report.step, report.place, differing(job, 2)) == (2, "1.2", [])
    ((place, reason),) = report.skipped
    assert place == "1.3"
    assert name in reason
    assert [record.levelname for record in caplog.records if "1.3" in record.message] == ["WARNING"]


@pytest.mark.parametrize("name", ["seal.json", "manifest.hfm", "data-00000.safetensors"])
def test_damage_that_shows_only_while_reading_is_passed_over_too(run: Path, name: str) -> None:
    flip_last(file_of(run, 3, name))
    job = build("plain", num_steps=0)
    report = holdfast.load(run, job.state, fallback=True)
    assert (report.step, differing(job, 2)) == (2, [])
    assert [place for place, _ in report.skipped] == ["1.3"]


def test_several_bad_ones_are_passed_over_one_after_the_other(run: Path) -> None:
    file_of(run, 3, "seal.json").unlink()
    flip_last(file_of(run, 2, "data-00000.safetensors"))
    job = build("plain", num_steps=0)
    report = holdfast.load(run, job.state, fallback=True)
    assert (report.step, differing(job, 1)) == (1, [])
    assert [place for place, _ in report.skipped] == ["1.3", "1.2"]


def test_a_commit_record_that_is_damaged_counts_as_a_bad_checkpoint(run: Path) -> None:
    flip_last(run / "history" / "9999999998-9999999996.json")
    with pytest.raises(CorruptError, match=r"Load '.*@1\.2' \(step 2\)"):
        holdfast.load(run, build("plain", num_steps=0).state)
    assert holdfast.load(run, build("plain", num_steps=0).state, fallback=True).step == 2


def test_when_none_is_left_the_error_says_what_is_wrong_with_each(run: Path) -> None:
    for step in STEPS:
        file_of(run, step, "data-00001.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"1\.3: .* 1\.2: .* 1\.1: ") as caught:
        holdfast.load(run, build("plain", num_steps=0).state, fallback=True)
    assert caught.value.code == "corrupt.lineage"
    with pytest.raises(NotFoundError):
        holdfast.load(run / "nothing", build("plain", num_steps=0).state, fallback=True)


@pytest.mark.parametrize("name", ["seal.json", "manifest.hfm", "data-00000.safetensors"])
def test_a_lost_file_is_not_taken_for_a_first_start(run: Path, name: str) -> None:
    file_of(run, 3, name).unlink()
    with pytest.raises(CorruptError):  # jobs begin anew on NotFoundError
        holdfast.load(run, build("plain", num_steps=0).state)
    with pytest.raises(CorruptError):
        Checkpointer(run, build("plain", num_steps=0).state, memory=None).restore()


def test_a_restore_passes_over_a_damaged_head_when_told_to_and_saves_go_on_from_there(run: Path) -> None:
    flip_last(file_of(run, 3, "data-00000.safetensors"))
    job = build("plain", num_steps=0)
    with Checkpointer(run, job.state, memory=None) as checkpointer:
        report = checkpointer.restore(fallback=True)
        assert (report.step, report.next_step, differing(job, 2)) == (2, 3, [])
        assert report.load is not None
        assert [place for place, _ in report.load.skipped] == ["1.3"]
        checkpointer.save(3)
    assert [commit.step for commit in Run.open(open_store(Location(str(run)))).lineage()] == [3, 2, 1]


def test_nothing_is_passed_over_where_nothing_is_wrong(run: Path) -> None:
    report = holdfast.load(run, build("plain", num_steps=0).state, fallback=True)
    assert (report.step, report.skipped) == (3, ())


def test_a_selected_checkpoint_falls_back_along_its_own_lineage(run: Path) -> None:
    file_of(run, 2, "manifest.hfm").unlink()
    for selector in ("@1.2", "@step=2"):
        report = holdfast.load(f"{run}{selector}", build("plain", num_steps=0).state, fallback=True)
        assert (report.step, [place for place, _ in report.skipped]) == (1, ["1.2"])


@pytest.mark.parametrize("name", ["seal.json", "manifest.hfm", "data-00001.safetensors"])
def test_without_fallback_the_error_names_the_older_checkpoint_that_loads(run: Path, name: str) -> None:
    flip_last(file_of(run, 3, name))
    file_of(run, 2, "data-00000.safetensors").unlink()
    with pytest.raises(CorruptError) as caught:
        holdfast.load(run, build("plain", num_steps=0).state)
    assert f"'{run}@1.1' (step 1)" in caught.value.action
    assert holdfast.load(f"{run}@1.1", build("plain", num_steps=0).state).step == 1


def test_a_folder_outside_any_history_has_nothing_to_fall_back_to(run: Path) -> None:
    folder = file_of(run, 3, "manifest.hfm").parent
    flip_last(folder / "data-00001.safetensors")
    with pytest.raises(CorruptError, match=r"data-00001\.safetensors"):
        holdfast.load(folder, build("plain", num_steps=0).state, fallback=True)
    with pytest.raises(CorruptError, match=r"data-00001\.safetensors"):
        holdfast.load(folder, build("plain", num_steps=0).state)


def test_the_job_resumes_from_the_older_checkpoint_which_is_no_rollback(run: Path) -> None:
    flip_last(file_of(run, 3, "data-00000.safetensors"))
    job = build("plain", num_steps=0)
    holdfast.load(run, job.state, fallback=True)
    assert holdfast.save(run, job.state, 3).place == "2.1"
    history = Run.open(open_store(Location(str(run))))
    assert (history.epoch(2).why, history.epoch(2).opened_from) == ("resume", Place(1, 2))
    assert "abandoned when epoch 2 went on from 1.2 (resume)" in holdfast_command("ls", run).out
    assert [commit.step for commit in history.lineage()] == [3, 2, 1]
    assert holdfast.load(run, job.state).step == 3


def test_an_older_checkpoint_that_was_chosen_is_a_rollback_although_it_fell_back(run: Path) -> None:
    flip_last(file_of(run, 2, "data-00000.safetensors"))
    job = build("plain", num_steps=0)
    holdfast.load(f"{run}@step=2", job.state, fallback=True)
    holdfast.save(run, job.state, 2)
    assert Run.open(open_store(Location(str(run)))).epoch(2).why == "rollback"


def load_and_go_on(run: str) -> tuple[int, list[str], tuple[tuple[str, str], ...], str]:
    start_new_job()
    job = build("fsdp", num_steps=0)
    report = holdfast.load(run, job.state, fallback=True, timeout_s=30)
    differs = differing(job, 2)
    return report.step, differs, report.skipped, holdfast.save(run, job.state, 3, timeout_s=30).place


def test_damage_that_one_rank_alone_meets_takes_all_ranks_to_the_same_older_one(run: Path) -> None:
    # The last bytes of the second file are of the second rank's half.
    flip_last(file_of(run, 3, "data-00001.safetensors"))
    first, second = run_ranks(2, load_and_go_on, str(run))
    assert first == second
    step, differs, skipped, place = first
    assert (step, differs, place) == (2, [], "2.1")
    assert [place for place, _ in skipped] == ["1.3"]
    assert "data-00001.safetensors" in skipped[0][1]


def load_strictly(run: str) -> str:
    start_new_job()
    job = build("fsdp", num_steps=0)
    with pytest.raises(CorruptError) as caught:
        holdfast.load(run, job.state, timeout_s=30)
    dist.barrier()  # all ranks raise, none is left behind
    return caught.value.action


def test_without_fallback_all_ranks_are_told_the_same_older_checkpoint(run: Path) -> None:
    flip_last(file_of(run, 3, "data-00001.safetensors"))
    actions = run_ranks(2, load_strictly, str(run))
    assert actions[0] == actions[1]
    assert "@1.2' (step 2)" in actions[0]


def load_into_less(run: str) -> None:
    start_new_job()
    holdfast.load(run, {"model": build("fsdp", num_steps=0).model}, fallback=True, timeout_s=30)


def test_a_state_that_does_not_fit_is_no_reason_to_fall_back(run: Path) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(2, load_into_less, str(run))
    assert {type(error).__name__ for error in failed.value.by_rank.values()} == {"IncompatibleError"}


def save_growing(run: Path, *, damaged_mib: int) -> None:
    """The head has 4 MiB of a tensor that the checkpoint before lacks, then 12 MiB of one that has 4 MiB there."""
    start_new_job()
    holdfast.save(run, {"table": torch.ones(1 << 20)}, 1)
    holdfast.save(run, {"table": torch.full((3 << 20,), 2.0), "new": torch.full((1 << 20,), 2.0)}, 2)
    data = bytearray((path := file_of(run, 2, "data-00000.safetensors")).read_bytes())
    data[damaged_mib << 20] ^= 1
    path.write_bytes(bytes(data))


def test_what_the_older_checkpoint_lacks_stays_as_it_was(tmp_path: Path) -> None:
    save_growing(tmp_path / "run", damaged_mib=7)
    state = {"table": torch.zeros(1 << 20), "new": torch.zeros(1 << 20)}
    with torch.device("meta"):
        state["meta"] = torch.zeros(4)
    longer = [Crop("table", size=1 << 20)]
    report = holdfast.load(tmp_path / "run", state, mapping=longer, strict=False, fallback=True)
    assert (report.step, report.missing, report.on_meta) == (1, ("meta", "new"), ("meta",))
    assert (state["table"] == 1).all()
    assert not state["new"].any()


def test_what_a_rule_keeps_stays_as_it_was(tmp_path: Path) -> None:
    save_growing(tmp_path / "run", damaged_mib=15)
    state = {"table": torch.zeros(3 << 20)}
    kept = [Pad("table", size=3 << 20, fill="keep")]
    report = holdfast.load(tmp_path / "run", state, select="table", mapping=kept, fallback=True)
    assert (report.step, [place for place, _ in report.skipped]) == (1, ["1.2"])
    assert (state["table"][: 1 << 20] == 1).all()
    assert not state["table"][1 << 20 :].any()
