"""Some loads make the run continue from the loaded checkpoint; others only read it."""

from __future__ import annotations

import gc
import multiprocessing
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast import Checkpointer, ConfigurationError, CorruptError, Memory, mapping
from holdfast.format.records import Place, Why
from holdfast.run.history import Run
from holdfast.run.session import JOB
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.checkpointer.test_checkpointer import Loop
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue


@pytest.fixture
def run(tmp_path: Path) -> str:
    """The root of a run with steps 1, 2 and 3, saved by another job."""
    root = str(tmp_path / "run")
    loop = Loop()
    for step in (1, 2, 3):
        loop.step()
        holdfast.save(root, loop.state, step)
    start_new_job()
    return root


def newest(run: str) -> tuple[Why, Place | None]:
    found = Run.open(open_store(Location(run)))
    epoch = found.epoch(found.newest_epoch() or 0)
    return epoch.why, epoch.opened_from


def steps(run: str) -> list[int]:
    return [commit.step for commit in Run.open(open_store(Location(run))).lineage()]


def resumed(run: str) -> Loop:
    """A loop that goes on from the head, and has saved step 4."""
    loop = Loop(seed=1)
    holdfast.load(run, loop.state)
    holdfast.save(run, loop.state, 4)
    return loop


def refused(run: str, state: dict[str, Any], code: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        holdfast.save(run, state, 9)
    assert caught.value.code == code
    return str(caught.value)


def load_part(run: str, into: dict[str, Any], **options: Any) -> None:
    holdfast.load(f"{run}@step=1", into, select="model", **options)


def test_a_teacher_loaded_from_an_older_step_does_not_roll_the_run_back(run: str) -> None:
    loop = resumed(run)
    teacher = Loop(seed=2)
    load_part(run, {"model": teacher.model})
    holdfast.load(f"{run}@step=2", teacher.state)  # all of it too: they are other objects
    holdfast.save(run, loop.state, 5)
    assert steps(run) == [5, 4, 3, 2, 1]
    assert newest(run) == ("resume", Place(1, 3))


def test_a_teacher_does_not_roll_a_background_save_back(run: str, memory: Memory) -> None:
    loop, teacher = Loop(seed=1), Loop(seed=2)
    with Checkpointer(run, loop.state, memory=memory, timeout_s=60) as checkpointer:
        assert checkpointer.restore().next_step == 4
        checkpointer.save(4)
        holdfast.load(f"{run}@step=1", teacher.state)
        checkpointer.save(5)
    assert steps(run) == [5, 4, 3, 2, 1]


def test_a_load_of_the_very_objects_that_are_saved_in_a_new_mapping_is_a_rollback(run: str) -> None:
    loop = resumed(run)
    holdfast.load(f"{run}@step=2", dict(loop.state))
    holdfast.save(run, {"model": loop.model, "optimizer": loop.optimizer, "progress": {"epoch": 7}}, 5)
    assert newest(run) == ("rollback", Place(1, 2))
    assert steps(run) == [5, 2, 1]


def test_a_job_that_loaded_into_other_objects_than_it_saves_is_refused_and_told_how_to_go_on(run: str) -> None:
    other, loop = Loop(seed=1), Loop(seed=2)
    holdfast.load(run, other.state)
    assert "continues=True" in refused(run, loop.state, "config.unloaded_history")
    holdfast.load(run, other.state, continues=True)
    holdfast.save(run, loop.state, 4)
    assert newest(run) == ("resume", Place(1, 3))


@pytest.mark.parametrize("how", ["select", "mapping", "cast"])
def test_a_load_of_a_part_of_what_is_saved_is_refused_at_the_next_save_with_both_choices(run: str, how: str) -> None:
    loop = resumed(run)
    into: dict[str, Any] = {"model": loop.model}
    options: dict[str, Any] = {"select": "model"}
    if how == "mapping":
        options = {"mapping": [mapping.Drop("optimizer"), mapping.Drop("progress")]}
    elif how == "cast":
        loop.model.double()
        options = {"select": "model", "cast": True}
    holdfast.load(f"{run}@step=1", into, **options)
    told = refused(run, loop.state, "config.unclear_history")
    assert "continues=True to continue from there, or with continues=False to go on after 2.1" in told
    refused(run, loop.state, "config.unclear_history")
    assert steps(run) == [4, 3, 2, 1]


@pytest.mark.parametrize("select", [["model", "optimizer"], "!progress"])
def test_a_selection_that_leaves_out_only_values_is_a_part_too(run: str, select: str | list[str]) -> None:
    loop = resumed(run)
    start_new_job()
    holdfast.load(f"{run}@step=1", loop.state, select=select)
    assert "continues=True" in refused(run, loop.state, "config.unclear_history")
    assert steps(run) == [4, 3, 2, 1]


def test_a_selection_with_which_all_was_saved_is_the_whole(tmp_path: Path) -> None:
    loop, select = Loop(), ["model", "optimizer"]
    for step in (1, 2):
        holdfast.save(tmp_path / "run", loop.state, step, select=select)
    start_new_job()
    holdfast.load(f"{tmp_path / 'run'}@step=1", loop.state, select=select)
    holdfast.save(tmp_path / "run", loop.state, 2, select=select)
    assert newest(str(tmp_path / "run")) == ("rollback", Place(1, 1))


def test_a_background_save_of_an_unclear_history_is_raised_by_the_next_save_until_that_is_said(
    run: str, memory: Memory
) -> None:
    loop = Loop(seed=1)
    with Checkpointer(run, loop.state, memory=memory) as checkpointer:
        checkpointer.restore()
        for step in (4, 5):
            checkpointer.save(step).durable.wait(60)
        holdfast.load(f"{run}@step=1", {"model": loop.model}, select="model")
        with pytest.raises(ConfigurationError, match=r"config\.unclear_history"):
            checkpointer.save(6).durable.wait(60)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=r"config\.unclear_history"):
                checkpointer.save(7)
        holdfast.load(f"{run}@step=1", {"model": loop.model}, select="model", continues=False)
        checkpointer.save(8).durable.wait(60)
        checkpointer.save(9).durable.wait(60)
    assert steps(run) == [9, 8, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("where", ["run", "elsewhere"])
def test_what_a_load_left_partly_filled_is_not_saved_before_a_load_fills_it(
    tmp_path: Path, memory: Memory, where: str
) -> None:
    model = nn.Linear(1024, 1024)
    state: dict[str, Any] = {"model": model, "epoch": 1}
    run, into = tmp_path / "run", tmp_path / where
    for step in (1, 2):
        holdfast.save(run, state, step)
    (file,) = run.glob("checkpoints/step-0000000001-*/data-00000.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 255
    file.write_bytes(data)
    with pytest.raises(CorruptError) as caught:
        holdfast.load(f"{run}@step=1", state)
    assert caught.value.__notes__ == ["The live state is partly filled: load it again before using it."]
    for saved in (state, {"student": model}):
        with pytest.raises(ConfigurationError, match=r"config\.partly_filled"):
            holdfast.save(into, saved, 3)
        with (
            pytest.raises(ConfigurationError, match=r"config\.partly_filled"),
            Checkpointer(into, saved, memory=memory) as checkpointer,
        ):
            checkpointer.save(3)
    holdfast.save(tmp_path / "other", {"model": nn.Linear(2, 2)}, 1)  # other objects may be saved
    with pytest.raises(ConfigurationError, match=r"config\.partly_filled"):
        holdfast.save(into, state, 3)
    holdfast.load(run, state)
    holdfast.save(into, state, 3)
    assert steps(str(into))[0] == 3


def test_a_load_that_fails_before_it_fills_anything_hinders_no_save(run: str) -> None:
    loop = resumed(run)
    with pytest.raises(holdfast.IncompatibleError):
        holdfast.load(f"{run}@step=2", {**loop.state, "more": torch.ones(1)})
    with pytest.raises(holdfast.NotFoundError):
        holdfast.load(f"{run}@step=77", loop.state)
    holdfast.save(run, loop.state, 5)
    assert steps(run) == [5, 4, 3, 2, 1]


def test_a_forked_child_is_a_job_of_its_own(run: str) -> None:
    loop = resumed(run)

    def save_in_child(told: SimpleQueue[str]) -> None:
        try:
            holdfast.save(run, loop.state, 5)
        except ConfigurationError as error:
            told.put(error.code)

    context = multiprocessing.get_context("fork")
    told: SimpleQueue[str] = context.SimpleQueue()
    child = context.Process(target=save_in_child, args=(told,))
    child.start()
    assert told.get() == "config.unloaded_history"
    child.join()
    holdfast.save(run, loop.state, 5)
    assert steps(run) == [5, 4, 3, 2, 1]


def test_the_caller_says_what_a_load_of_a_part_means(run: str) -> None:
    loop = resumed(run)
    load_part(run, {"model": loop.model}, continues=False)
    holdfast.save(run, loop.state, 5)
    assert steps(run) == [5, 4, 3, 2, 1]
    load_part(run, {"model": loop.model})
    load_part(run, {"model": loop.model}, continues=False)  # takes back what was unclear
    holdfast.save(run, loop.state, 6)
    assert steps(run) == [6, 5, 4, 3, 2, 1]
    load_part(run, {"model": loop.model}, continues=True)
    holdfast.save(run, loop.state, 7)
    assert (steps(run), newest(run)) == ([7, 1], ("rollback", Place(1, 1)))


def test_loading_a_part_of_what_was_just_saved_changes_nothing(run: str) -> None:
    loop = resumed(run)
    holdfast.load(run, {"model": loop.model}, select="model")
    holdfast.save(run, loop.state, 5)
    assert (steps(run), newest(run)) == ([5, 4, 3, 2, 1], ("resume", Place(1, 3)))


def test_the_last_load_of_each_object_counts(run: str) -> None:
    loop = resumed(run)
    holdfast.load(f"{run}@step=1", loop.state)
    holdfast.load(f"{run}@step=2", loop.state)
    holdfast.save(run, loop.state, 5)
    assert newest(run) == ("rollback", Place(1, 2))
    holdfast.load(f"{run}@step=1", loop.state)
    holdfast.load(f"{run}@step=2", {"model": loop.model}, select="model")
    refused(run, loop.state, "config.unclear_history")


def test_weights_from_another_run_move_neither_run(run: str, tmp_path: Path) -> None:
    elsewhere = str(tmp_path / "elsewhere")
    holdfast.save(elsewhere, {"model": Loop(seed=5).model}, 70)
    loop = resumed(run)
    holdfast.load(elsewhere, {"model": loop.model})
    holdfast.save(run, loop.state, 5)
    assert (steps(run), steps(elsewhere)) == ([5, 4, 3, 2, 1], [70])


def test_a_copy_saved_elsewhere_after_a_load_does_not_make_the_job_forget_the_load(run: str, tmp_path: Path) -> None:
    loop = Loop(seed=1)
    holdfast.load(run, loop.state)
    holdfast.save(tmp_path / "copy", loop.state, 3)
    holdfast.save(run, loop.state, 4)
    assert newest(run)[0] == "resume"
    assert steps(run) == [4, 3, 2, 1]


def test_objects_beside_the_head_may_be_new_in_a_new_job_and_not_beside_an_older_checkpoint(run: str) -> None:
    loop = Loop(seed=1)
    holdfast.load(f"{run}@step=2", loop.state)
    state = {**loop.state, "added": nn.Linear(2, 2)}
    refused(run, state, "config.unclear_history")
    holdfast.load(run, loop.state)
    holdfast.save(run, state, 4)
    assert newest(run) == ("resume", Place(1, 3))


def test_the_tensors_of_a_state_dict_and_a_moved_or_wrapped_model_are_what_was_loaded(run: str) -> None:
    loop = Loop()
    flat = str(Path(run).parent / "flat")
    holdfast.save(flat, {"model": loop.model.state_dict()}, 1)
    start_new_job()
    holdfast.load(flat, {"model": loop.model.state_dict()})
    holdfast.save(flat, {"model": nn.DataParallel(loop.model)}, 2)
    assert steps(flat) == [2, 1]
    holdfast.load(f"{flat}@step=1", {"model": loop.model})
    loop.model.double()  # other memory, one model
    holdfast.save(flat, {"model": loop.model}, 3)
    assert steps(flat) == [3, 1]


def test_what_was_loaded_is_not_kept_alive_and_another_object_in_its_place_is_not_taken_for_it(run: str) -> None:
    for _ in range(5):
        loop = Loop(seed=1)
        holdfast.load(run, loop.state)
        del loop
        gc.collect()
    refused(run, Loop(seed=2).state, "config.unloaded_history")
    assert not any(identity.is_alive for identity, _ in JOB._filled.values())
    assert not any(memory.forget(None) for memory, _ in JOB._filled_memory)


def test_what_a_load_leaves_behind_does_not_grow_with_the_number_of_tensors(tmp_path: Path) -> None:
    # Objects that stay have Python's collector go through the whole process: a load of 10,000 tensors took twice as
    # long for it.
    few, many = ({"tensors": {f"t{i}": torch.zeros(2) for i in range(count)}} for count in (2, 2_000))
    holdfast.save(tmp_path / "few", few, 1)
    holdfast.save(tmp_path / "many", many, 1)
    holdfast.load(tmp_path / "few", few)
    gc.collect()
    before = len(gc.get_objects())
    holdfast.load(tmp_path / "many", many)
    gc.collect()
    assert len(gc.get_objects()) - before < 500


def test_an_interpreter_that_ends_after_a_load_of_tensors_says_nothing(tmp_path: Path) -> None:
    # The interpreter frees what the job remembers of the load after the names of the module that frees it are gone.
    script = (
        "import sys, torch, holdfast\n"
        "class Extra(torch.nn.Module):\n"
        "    def get_extra_state(self): return {'t': torch.ones(3)}\n"
        "    def set_extra_state(self, state): self.t = state['t']\n"
        "state = {'m': Extra()}\n"
        "holdfast.save(sys.argv[1], state, 1)\n"
        "holdfast.load(sys.argv[1], state)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_checkpoint_outside_any_history_is_nothing_to_continue_from(run: str) -> None:
    folder = holdfast.open(run).path
    with pytest.raises(ConfigurationError, match=r"config\.continues"):
        holdfast.load(folder, Loop().state, continues=True)


def _teach(run: str) -> Sequence[int]:
    """Two ranks: the student is in DDP, the teacher is not."""
    start_new_job()
    student, teacher = nn.Linear(4, 3), nn.Linear(4, 3)
    holdfast.save(run, {"model": student}, 1)
    holdfast.save(run, {"model": DistributedDataParallel(student)}, 2)
    holdfast.load(f"{run}@step=1", {"model": teacher})
    holdfast.save(run, {"model": DistributedDataParallel(student)}, 3)
    holdfast.load(f"{run}@step=1", {"model": student})
    holdfast.save(run, {"model": DistributedDataParallel(student)}, 4)
    return steps(run)


def test_ranks_tell_the_teacher_from_the_student_in_ddp(tmp_path: Path) -> None:
    assert run_ranks(2, _teach, str(tmp_path / "run")) == [[4, 1]] * 2
