"""The arguments of DCP's calls: each does what it does there, or is refused by name."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.staging import BlockingAsyncStager, DefaultStager, StagingOptions

import holdfast
from holdfast import dcp
from holdfast.dcp.replaced import mark_replaced
from holdfast.errors import ConfigurationError, IncompatibleError, NotFoundError
from holdfast.store.urls import location_of
from tests.dcp.dcp_scripts import contents, load_app, save_app, trained
from tests.support.bound import bits
from tests.support.command_line import holdfast_command
from tests.support.models import start_new_job
from tests.support.nursery import run_script

# Stock DCP warns where there is one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def some_state() -> dict[str, Any]:
    return {"model": {"w": torch.arange(6.0), "b": torch.ones(2)}, "step": 3, "groups": [{"lr": 0.1, "params": [0, 1]}]}


def empty_state() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(6), "b": torch.zeros(2)}, "step": 0, "groups": [{"lr": 0.0, "params": []}]}


@pytest.mark.parametrize("name", ["save", "async_save", "load"])
def test_every_argument_of_dcp_can_be_given(name: str) -> None:
    theirs, ours = (inspect.signature(getattr(module, name)).parameters for module in (torch_dcp, dcp))
    assert theirs.keys() == ours.keys()
    assert {key: theirs[key].default for key in theirs} == {key: ours[key].default for key in theirs}
    assert all(getattr(torch_dcp, key, getattr(dcp, key)) for key in dcp.__all__)


@pytest.mark.parametrize("kind", ["FileSystemWriter", "FileSystemReader"])
def test_the_classes_for_folders_take_the_arguments_of_those_of_dcp(kind: str) -> None:
    theirs, ours = (inspect.signature(getattr(module, kind)).parameters for module in (torch_dcp, dcp))
    assert list(theirs) == list(ours)


def test_values_and_tensors_come_back_in_place(tmp_path: Path) -> None:
    dcp.save(some_state(), checkpoint_id=tmp_path / "c")
    state = empty_state()
    weights, inner = state["model"]["w"], state["model"]
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state["model"] is inner
    assert state["model"]["w"] is weights
    assert torch.equal(weights, torch.arange(6.0))
    assert (state["step"], state["groups"]) == (3, some_state()["groups"])


def test_a_writer_and_a_reader_name_the_folder_also_by_position(tmp_path: Path) -> None:
    dcp.save(some_state(), dcp.FileSystemWriter(tmp_path / "c"))
    state = empty_state()
    dcp.load(state, dcp.FileSystemReader(tmp_path / "c"))
    assert state["step"] == 3
    dcp.save(some_state(), storage_writer=dcp.FileSystemWriter(tmp_path / "c"), checkpoint_id=tmp_path / "other")
    assert holdfast.open(tmp_path / "other").value("step") == 3


def test_a_load_takes_what_it_asks_for_and_leaves_the_rest(tmp_path: Path) -> None:
    dcp.save(some_state(), checkpoint_id=tmp_path / "c")
    state: dict[str, Any] = {"model": {"b": torch.zeros(2)}}
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state["model"]["b"].tolist() == [1.0, 1.0]


def test_a_name_that_the_checkpoint_lacks_is_an_error_unless_the_planner_allows_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save(some_state(), checkpoint_id=tmp_path / "c")
    state = empty_state() | {"new": torch.full((2,), 7.0)}
    with pytest.raises(IncompatibleError) as caught:
        dcp.load(state, checkpoint_id=tmp_path / "c")
    assert caught.value.code == "incompatible.names"
    assert "new" in str(caught.value)
    assert caught.value.action.startswith("Pass planner=DefaultLoadPlanner(allow_partial_load=True)")
    assert not state["model"]["w"].any(), "nothing is changed"
    dcp.load(state, checkpoint_id=tmp_path / "c", planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert state["new"].tolist() == [7.0, 7.0]
    assert state["step"] == 3
    assert "does not have new, which keeps its contents" in caplog.text


def test_calls_that_torch_has_replaced_name_ours() -> None:
    with pytest.raises(AttributeError, match=r"call holdfast\.dcp\.load\."):
        _ = dcp.load_state_dict


def test_another_dtype_is_refused_where_dcp_would_lose_digits(tmp_path: Path) -> None:
    dcp.save({"w": torch.tensor([70_000.0])}, checkpoint_id=tmp_path / "c")
    with pytest.raises(IncompatibleError) as caught:
        dcp.load({"w": torch.zeros(1, dtype=torch.float16)}, checkpoint_id=tmp_path / "c")
    assert caught.value.code == "incompatible.dtype"


@pytest.mark.parametrize(
    ("folder", "step"),
    [("step-12", 12), ("step_0007", 7), ("30", 30), ("latest", 0), ("v2-final", 0), ("9" * 30, None)],
)
def test_the_number_at_the_end_of_a_folder_is_the_step(tmp_path: Path, folder: str, step: int | None) -> None:
    saved = dcp.save({"x": 1}, checkpoint_id=tmp_path / folder)
    assert saved.step == (0 if step is None else step)


def test_a_save_into_the_same_folder_replaces_the_checkpoint_once_the_new_one_is_committed(tmp_path: Path) -> None:
    for number in range(3):
        dcp.save({"x": number}, checkpoint_id=tmp_path / "latest")
    (only,) = holdfast.ls(tmp_path / "latest")
    assert only.step == 2
    assert len(list((tmp_path / "latest" / "checkpoints").iterdir())) == 1
    start_new_job()
    dcp.save({"x": 9}, checkpoint_id=tmp_path / "latest")
    state: dict[str, object] = {"x": 0}
    dcp.load(state, checkpoint_id=tmp_path / "latest")
    assert state["x"] == 9
    assert len(holdfast.ls(tmp_path / "latest")) == 1


def test_the_doctor_knows_the_folder_of_marks_that_saves_leave_and_gc_finds_no_garbage(tmp_path: Path) -> None:
    """The doctor called it unknown, and its exit code was that of a finding."""
    for number in range(2):
        dcp.save({"w": torch.full((3,), number)}, checkpoint_id=tmp_path / "a")
    assert (tmp_path / "a" / "replaced").is_dir()
    assert holdfast_command("doctor", tmp_path / "a").status == 0
    assert holdfast_command("gc", tmp_path / "a", "--dry-run").lines == [f"{tmp_path / 'a'}: no garbage"]


def test_a_save_that_fails_leaves_the_checkpoint_that_it_would_replace(tmp_path: Path) -> None:
    """DCP would have overwritten its files by then."""
    dcp.save(some_state(), checkpoint_id=tmp_path / "c")
    with pytest.raises(holdfast.StateError):
        dcp.save(some_state() | {"strange": {1}}, checkpoint_id=tmp_path / "c")
    state = empty_state()
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state["step"] == 3


KILLED = """
import os, signal, sys
import torch
from holdfast import dcp
from holdfast.dcp import dcp_saving

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "before the commit":
    dcp_saving.save_over = die
elif sys.argv[2] == "in the only save":
    from holdfast.store.posix import PosixStore
    create = PosixStore.create
    PosixStore.create = lambda store, key, data: die() if key.startswith("history/") else create(store, key, data)
elif sys.argv[2] == "before the deletion":
    dcp_saving.remove_replaced = die
dcp.save({"x": 5}, checkpoint_id=sys.argv[1])
"""


def test_a_folder_whose_only_save_was_killed_is_told_from_a_whole_one(tmp_path: Path) -> None:
    dcp.save({"x": 1}, checkpoint_id=tmp_path / "step-0")
    assert run_script(KILLED, str(tmp_path / "step-1"), "in the only save").status == -signal.SIGKILL
    assert (tmp_path / "step-1" / "holdfast.json").exists()
    folders = [str(tmp_path / f"step-{step}") for step in range(3)]
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "dcp.md").read_text()
    (line,) = re.findall(r"^saved = .*$", guide, re.MULTILINE)
    exec(line, names := {"folders": folders, "os": os, "holdfast": holdfast})
    assert names["saved"] == folders[:1]
    with pytest.raises(NotFoundError, match=r"not_found\.head.* load the folder of an earlier save"):
        dcp.load({"x": 0}, checkpoint_id=folders[1])
    dcp.save({"x": 2}, checkpoint_id=folders[1])
    state: dict[str, Any] = {"x": 0}
    dcp.load(state, checkpoint_id=folders[1])
    assert state["x"] == 2


@pytest.mark.parametrize("when", ["before the commit", "before the deletion"])
def test_the_next_save_deletes_what_a_killed_one_had_replaced(tmp_path: Path, when: str) -> None:
    folder = tmp_path / "latest"
    dcp.save({"x": 1}, checkpoint_id=folder)
    assert run_script(KILLED, str(folder), when).status == -signal.SIGKILL
    is_committed = when == "before the deletion"
    state: dict[str, object] = {"x": 0}
    dcp.load(state, checkpoint_id=folder)
    assert state["x"] == (5 if is_committed else 1)
    assert len(holdfast.ls(folder)) == (2 if is_committed else 1)
    start_new_job()
    for number in (7, 8):
        dcp.save({"x": number}, checkpoint_id=folder)
        assert len(holdfast.ls(folder)) == 1
        assert not list((folder / "replaced").iterdir())
    dcp.load(state, checkpoint_id=folder)
    assert state["x"] == 8


def test_a_run_with_a_history_loses_nothing_to_a_save_of_dcp(tmp_path: Path) -> None:
    for step in range(3):
        holdfast.save(tmp_path / "run", {"x": step}, step)
    start_new_job()
    dcp.save({"x": 9}, checkpoint_id=tmp_path / "run")
    assert [one.step for one in holdfast.ls(tmp_path / "run")] == [3, 2, 1, 0]


def test_a_pinned_checkpoint_stays_beside_the_one_that_replaces_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dcp.save({"x": 1}, checkpoint_id=tmp_path / "c")
    (only,) = holdfast.ls(tmp_path / "c")
    holdfast.pin(f"{tmp_path / 'c'}@{only.place}")
    dcp.save({"x": 2}, checkpoint_id=tmp_path / "c")
    assert len(holdfast.ls(tmp_path / "c")) == 2
    assert "keeps a checkpoint that was replaced" in caplog.text
    dcp.save({"x": 2.5}, checkpoint_id=tmp_path / "c")
    assert len(holdfast.ls(tmp_path / "c")) == 2  # those that are not pinned go
    holdfast.unpin(f"{tmp_path / 'c'}@{only.place}")
    dcp.save({"x": 3}, checkpoint_id=tmp_path / "c")
    assert len(holdfast.ls(tmp_path / "c")) == 1


def test_the_mark_of_a_killed_save_does_not_make_a_history_one_checkpoint(tmp_path: Path) -> None:
    """A save of DCP deleted both checkpoints of a history, because an earlier one had been killed."""
    dcp.save({"x": 1}, checkpoint_id=tmp_path / "c")
    assert mark_replaced(location_of(str(tmp_path / "c")), 10.0) is not None  # a save begins, and is killed
    start_new_job()
    into = {"x": 0}
    holdfast.load(tmp_path / "c", into=into)
    holdfast.save(tmp_path / "c", into, 7)
    start_new_job()
    dcp.save({"x": 2}, checkpoint_id=tmp_path / "c")
    assert [item.step for item in holdfast.ls(tmp_path / "c")] == [8, 7, 0]


def test_a_folder_with_a_checkpoint_is_refused_without_overwrite(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "c", overwrite=False)
    dcp.save({"x": 1}, storage_writer=writer)
    with pytest.raises(ConfigurationError) as caught:
        dcp.save({"x": 2}, storage_writer=writer)
    assert caught.value.code == "config.dcp_exists"


def test_a_folder_of_dcp_is_not_mixed_with_ours(tmp_path: Path) -> None:
    torch_dcp.save(some_state(), checkpoint_id=tmp_path / "c")
    with pytest.raises(ConfigurationError) as caught:
        dcp.save(some_state(), checkpoint_id=tmp_path / "c")
    assert caught.value.code == "config.not_a_run"
    state = empty_state()
    dcp.load(state, checkpoint_id=tmp_path / "c")
    assert state["step"] == 3


def test_a_state_dict_with_numbers_loads_from_a_folder_of_dcp_as_with_dcp(tmp_path: Path) -> None:
    old, new, stock = (trained(seed, steps=2) for seed in (0, 1, 2))
    torch_dcp.save({"optim": old.optimizer.state_dict()}, checkpoint_id=tmp_path / "c")
    for module, app in ((dcp, new), (torch_dcp, stock)):
        state: dict[str, Any] = {"optim": app.optimizer.state_dict()}
        module.load(state, checkpoint_id=tmp_path / "c")
        app.optimizer.load_state_dict(state["optim"])
    slots = [[bits(x) for held in app.optimizer.state.values() for x in held.values()] for app in (old, new, stock)]
    assert slots[0] == slots[1] == slots[2]


def test_a_folder_into_which_dcp_saved_later_is_refused(tmp_path: Path) -> None:
    """A load would give the older checkpoint without a word."""
    folder = tmp_path / "c"
    dcp.save({"x": torch.zeros(2)}, checkpoint_id=folder)
    torch_dcp.save({"x": torch.ones(2)}, checkpoint_id=folder)
    state: dict[str, Any] = {"x": torch.full((2,), 5.0)}
    calls = (
        lambda: dcp.load(state, checkpoint_id=folder),
        lambda: dcp.save(state, checkpoint_id=folder),
        lambda: dcp.async_save(state, checkpoint_id=folder),
        lambda: holdfast.load(folder, into=state),
        lambda: holdfast.save(folder, state, 1, takeover=True),
        lambda: holdfast.Checkpointer(folder, state).restore(),
        lambda: holdfast.Checkpointer(folder, state, memory=None, takeover=True).save(1),
        lambda: holdfast.open(folder),
        lambda: holdfast.export(folder, tmp_path / "out", to="dcp"),
    )
    for call in calls:
        with pytest.raises(ConfigurationError) as caught:
            call()
        assert caught.value.code == "config.dcp_mixed"
    assert holdfast.open(f"{folder}@step=0")["x"][...].tolist() == [0, 0]  # names the one that is meant
    assert state["x"].tolist() == [5, 5]
    (tmp_path / "torch").mkdir()
    for name in (".metadata", "__0_0.distcp"):
        (folder / name).rename(tmp_path / "torch" / name)
    for path, number in ((folder, 0.0), (tmp_path / "torch", 1.0)):
        dcp.load(state, checkpoint_id=path)
        assert state["x"].tolist() == [number, number]


def test_a_job_whose_folder_another_one_took_is_advised_what_dcp_has(tmp_path: Path) -> None:
    dcp.save({"x": 1}, checkpoint_id=tmp_path / "c")
    other = "import sys; from holdfast import dcp; dcp.save({'x': 2}, checkpoint_id=sys.argv[1])"
    assert run_script(other, str(tmp_path / "c")).status == 0
    with pytest.raises(holdfast.FencedError) as caught:
        dcp.save({"x": 3}, checkpoint_id=tmp_path / "c")
    assert caught.value.code == "fenced.newer_epoch"
    assert "takeover=" not in str(caught.value)
    assert "the first save of a new process takes the folder over" in str(caught.value)


def test_a_checkpoint_of_a_run_with_several_is_named_by_its_step(tmp_path: Path) -> None:
    for step in (4, 5, 6):
        holdfast.save(tmp_path / "ck", {"x": step}, step)
    state: dict[str, object] = {"x": 0}
    dcp.load(state, checkpoint_id=f"{tmp_path / 'ck'}@step=5")
    assert state["x"] == 5
    with pytest.raises(ConfigurationError):
        dcp.save(state, checkpoint_id=f"{tmp_path / 'ck'}@step=7")


class OwnSavePlanner(dcp.DefaultSavePlanner):
    pass


class OwnLoadPlanner(dcp.DefaultLoadPlanner):
    pass


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda c: dcp.save({}, checkpoint_id=c, planner=OwnSavePlanner()), "planner=OwnSavePlanner"),
        (
            lambda c: dcp.save({}, checkpoint_id=c, planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)),
            "dedup_save_to_lowest_rank",
        ),
        (lambda c: dcp.save({}, checkpoint_id=c, use_collectives=False), "use_collectives"),
        (lambda c: dcp.save({}, storage_writer=torch_dcp.FileSystemWriter(c)), "storage_writer=FileSystemWriter"),
        (lambda _: dcp.save({}), "neither checkpoint_id nor storage_writer"),
        (lambda _: dcp.load({}), "neither checkpoint_id nor storage_reader"),
        (lambda c: dcp.load({}, checkpoint_id=c, planner=OwnLoadPlanner()), "planner=OwnLoadPlanner"),
        (lambda c: dcp.load({}, storage_reader=torch_dcp.FileSystemReader(c)), "storage_reader=FileSystemReader"),
        (lambda c: dcp.FileSystemWriter(c, _extensions=["zstd"]), "_extensions"),
        (lambda c: dcp.FileSystemWriter(c, serialization_format="safetensors"), "serialization_format"),
        (lambda c: dcp.FileSystemReader(c, _extension_registry=1), "_extension_registry"),
        (
            lambda c: dcp.async_save({}, checkpoint_id=c, async_checkpointer_type=dcp.AsyncCheckpointerType.PROCESS),
            "async_checkpointer_type",
        ),
    ],
)
def test_an_argument_that_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, call: Callable[[Path], object], named: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        call(tmp_path / "c")
    assert caught.value.code == "config.dcp_option"
    assert named in caught.value.message
    assert not (tmp_path / "c").exists()


def test_an_argument_without_effect_is_said_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "holdfast"):
        dcp.FileSystemWriter(tmp_path, thread_count=4)
    assert "thread_count" in caplog.text


def test_planners_that_change_nothing_here_are_taken(tmp_path: Path) -> None:
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False, enable_plan_caching=True)
    dcp.save(some_state(), checkpoint_id=tmp_path / "c", planner=planner)
    state = empty_state()
    dcp.load(state, checkpoint_id=tmp_path / "c", planner=dcp.DefaultLoadPlanner())
    assert state["step"] == 3


@pytest.mark.parametrize(
    "stager", [None, BlockingAsyncStager, lambda: DefaultStager(StagingOptions(False, *[False] * 3))]
)
def test_a_save_in_the_background_has_the_state_of_the_call(tmp_path: Path, stager: Callable[[], Any] | None) -> None:
    state = some_state()
    made = None if stager is None else stager()
    future = dcp.async_save(state, checkpoint_id=tmp_path / "step-5", async_stager=made)
    state["model"]["w"].zero_()
    assert isinstance(future, Future)
    assert future.result(timeout=60).step == 5
    assert future.done()
    assert future.exception() is None
    assert holdfast.open(tmp_path / "step-5")["model/w"][:].tolist() == list(range(6))


class SlowStager(BlockingAsyncStager):
    """Copies when it is told to, in the background."""

    def __init__(self) -> None:
        super().__init__()
        self.copy: Future[Any] = Future()

    def stage(self, state_dict: Any) -> Any:
        self.state = state_dict
        return self.copy


def test_a_stager_that_copies_in_the_background_gives_two_futures(tmp_path: Path) -> None:
    stager = SlowStager()
    response = dcp.async_save(some_state(), checkpoint_id=tmp_path / "c", async_stager=stager)
    assert isinstance(response, dcp.AsyncSaveResponse)
    assert not response.staging_completion.done()
    stager.copy.set_result(some_state())
    assert response.staging_completion.result(timeout=60) is None
    response.upload_completion.result(timeout=60)
    assert holdfast.open(tmp_path / "c").value("step") == 3


def test_a_copy_that_fails_in_the_background_fails_both_futures(tmp_path: Path) -> None:
    stager = SlowStager()
    response = dcp.async_save(some_state(), checkpoint_id=tmp_path / "c", async_stager=stager)
    assert isinstance(response, dcp.AsyncSaveResponse)
    stager.copy.set_exception(RuntimeError("no memory"))
    with pytest.raises(RuntimeError, match="no memory"):
        response.staging_completion.result(timeout=60)
    with pytest.raises(dcp.CheckpointException, match="no memory"):
        response.upload_completion.result(timeout=60)


def test_a_future_raises_the_error_of_its_save_and_the_next_save_succeeds(tmp_path: Path) -> None:
    future = dcp.async_save({"strange": {1}}, checkpoint_id=tmp_path / "c")
    assert isinstance(future, Future)
    with pytest.raises(dcp.CheckpointException, match=r"state\.unsupported_leaf"):
        future.result(timeout=60)
    after = dcp.async_save({"x": 1}, checkpoint_id=tmp_path / "c")
    assert isinstance(after, Future)
    assert after.result(timeout=60).step == 0


def test_a_save_is_committed_after_the_background_saves_before_it(tmp_path: Path) -> None:
    def filled(value: float) -> dict[str, object]:
        return {"a": torch.full((1 << 16,), value)}

    futures = [dcp.async_save(filled(number), checkpoint_id=tmp_path) for number in range(3)]
    dcp.save(filled(100.0), checkpoint_id=tmp_path)
    state: dict[str, Any] = {"a": torch.zeros(1 << 16)}
    dcp.load(state, checkpoint_id=tmp_path)
    assert bool((state["a"] == 100.0).all())
    assert [cast("Future[Any]", future).done() for future in futures] == [True] * 3
    assert len(holdfast.ls(tmp_path)) == 1


def test_a_state_dict_that_raises_is_raised_by_the_call(tmp_path: Path) -> None:
    class Broken(dcp.Stateful):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("not ready")

        def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...

    for call in (dcp.save, dcp.async_save):
        with pytest.raises(dcp.CheckpointException, match="not ready"):
            call({"app": Broken()}, checkpoint_id=tmp_path / "c")


def test_the_tutorial_runs_in_one_process_as_with_dcp(tmp_path: Path) -> None:
    assert save_app(dcp, str(tmp_path / "ours")) == load_app(dcp, str(tmp_path / "ours"))
    assert save_app(torch_dcp, str(tmp_path / "theirs")) == load_app(dcp, str(tmp_path / "theirs"))


@pytest.mark.parametrize("state", [torch.nn.Linear(2, 2), [1], {1: torch.ones(2)}])
def test_a_state_that_is_no_dict_is_refused(tmp_path: Path, state: Any) -> None:
    for call in (dcp.save, dcp.async_save, dcp.load):
        with pytest.raises(holdfast.StateError) as caught:
            call(state, checkpoint_id=tmp_path / "c")
        assert caught.value.code == "state.root"


def test_modules_that_scripts_reach_through_dcp_are_those_of_torch() -> None:
    assert dcp.state_dict is importlib.import_module("torch.distributed.checkpoint.state_dict")
    with pytest.raises(AttributeError, match=r"import it from torch\.distributed\.checkpoint"):
        _ = dcp.StorageWriter
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dcp.nothing


def test_modules_and_optimizers_are_saved_by_their_state_dict(tmp_path: Path) -> None:
    app, other = trained(0, steps=2), trained(1, steps=1)
    dcp.save({"model": app.model, "optim": app.optimizer}, checkpoint_id=tmp_path / "c")
    dcp.load({"model": other.model, "optim": other.optimizer}, checkpoint_id=tmp_path / "c")
    other.step = 2
    assert contents(other) == contents(app)


#: A process in which torch lacks what version 2.6 lacked.
OLDER_TORCH = """
import sys
from pathlib import Path
import torch
from torch.distributed.checkpoint import staging, state_dict_saver
del state_dict_saver.AsyncCheckpointerType, state_dict_saver.AsyncSaveResponse
del staging.DefaultStager, staging.StagingOptions
import holdfast
assert all(getattr(holdfast, name) for name in holdfast.__all__)
from holdfast import dcp
folder, state = Path(sys.argv[1]), {"w": torch.arange(6.0)}
dcp.save(state, checkpoint_id=folder / "step-1")
into = {"w": torch.zeros(6)}
dcp.load(into, checkpoint_id=folder / "step-1")
assert torch.equal(into["w"], state["w"])
try:
    dcp.async_save(state, checkpoint_id=folder / "step-2")
except holdfast.ConfigurationError as error:
    print(error.code, error)
"""


def test_a_torch_whose_stagers_do_not_copy_saves_and_loads_and_refuses_to_save_in_the_background(
    tmp_path: Path,
) -> None:
    """`holdfast.dcp`, and `from holdfast import *` with it, could not be imported with torch 2.6."""
    command = [sys.executable, "-W", "ignore", "-c", OLDER_TORCH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "config.dcp_option" in done.stdout
    assert "do not copy the state" in done.stdout
    assert not (tmp_path / "step-2").exists()
