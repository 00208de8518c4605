"""`ExportHub`: chosen checkpoints of a loop become folders of other systems, whole or not at all; no step waits."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from threading import Event as Gate
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import holdfast
from holdfast import Checkpointer, EverySteps, ExportHub, KeepLast, Memory, exporting
from holdfast.checkpointer import export_hub
from holdfast.errors import ConfigurationError, DeadlineError, HoldfastError, IncompatibleError, StorageError
from holdfast.exporting import file_tasks
from holdfast.exporting.export_series import ExportDraft, ExportSeries
from holdfast.exporting.file_writes import write_together
from holdfast.format.records import Place
from holdfast.io import side_by_side
from holdfast.mapping import Rename
from holdfast.observing import Event, EventSource, ExportFailed, ExportFinished
from tests.store.test_posix_storage import mounted
from tests.support.models import start_new_job
from tests.support.nursery import start, until
from tests.support.ranks import run_ranks

SIZES = {"a.weight": (40, 30), "b.weight": (7,)}


class Told:
    """A listener that notes what exports did."""

    def __init__(self) -> None:
        self.finished: list[int] = []
        self.failed: list[tuple[int, str]] = []

    def hear(self, event: Event, source: EventSource) -> None:
        if isinstance(event, ExportFinished):
            assert event.nbytes > 0
            assert Path(event.path).name == f"step-{event.step:010d}"
            self.finished.append(event.step)
        elif isinstance(event, ExportFailed):
            self.failed.append((event.step, event.error.code))


def state_at(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full(size, float(step)) for name, size in SIZES.items()}


def trained(
    run: str, hub: ExportHub, *listeners: Told, total: int, waits: bool = True, memory: Memory | None = None
) -> None:
    """A loop whose state after a step is that of `state_at`, in a job of its own. It `waits` for each export."""
    start_new_job()
    model = state_at(-1)
    options: dict[str, Any] = {"memory": memory, "save": EverySteps(2), "keep": KeepLast(2)}
    with Checkpointer(run, {"model": model}, listeners=[hub, *listeners], **options) as checkpointer:
        for step in checkpointer.steps(total):
            for tensor in model.values():
                tensor.fill_(step)
            checkpointer.step(step)
            if waits:
                checkpointer.wait()


def exported(folder: Path) -> list[int]:
    """The steps of the exports, each of which holds the bits of its step; nothing else lies there."""
    steps = []
    for path in sorted(folder.iterdir()):
        steps.append(int(path.name.removeprefix("step-")))
        assert sorted(each.name for each in path.iterdir()) == [".holdfast-export-series", "model.safetensors"]
        found, wanted = load_file(path / "model.safetensors"), state_at(steps[-1])
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    return steps


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.few(1)
def test_chosen_saves_and_the_last_one_are_exported_and_the_oldest_go(
    run: str, tmp_path: Path, memory: Memory, *, in_memory: bool
) -> None:
    told = Told()
    tier = memory if in_memory else None
    trained(run, ExportHub(tmp_path / "hf", every=5, keep=2), told, total=12, memory=tier)
    assert told.finished == [6, 10, 11]  # 6 and 10 are the first saves at or after 5 and 10
    assert exported(tmp_path / "hf") == [10, 11]
    trained(run, ExportHub(tmp_path / "hf", every=5, keep=2, last=False), told, total=18, memory=tier)
    assert exported(tmp_path / "hf") == [11, 16]
    assert holdfast.load(tmp_path / "hf" / "step-0000000016", state_at(0)).loaded == ("a.weight", "b.weight")


def test_a_job_that_starts_again_exports_no_step_twice_and_one_that_was_missed(run: str, tmp_path: Path) -> None:
    told = Told()
    for total, expected in ((5, [4]), (7, [4]), (9, [4, 8])):
        trained(run, ExportHub(tmp_path / "hf", every=4, last=False), told, total=total)
        assert told.finished == expected
    trained(run, ExportHub(tmp_path / "other", every=4, last=False), told, total=11)
    assert exported(tmp_path / "other") == [10]  # no export of 8 is there


def test_a_history_that_was_rolled_back_is_replaced(run: str, tmp_path: Path) -> None:
    hub = ExportHub(tmp_path / "hf", every=2)
    trained(run, hub, total=5)
    assert exported(tmp_path / "hf") == [2, 4]
    start_new_job()
    model = state_at(-1)
    with Checkpointer(run, {"model": model}, memory=None, listeners=[hub]) as checkpointer:
        checkpointer.restore(at="step=2")
        model["a.weight"].fill_(100)
        checkpointer.save(4).durable.wait()
    found = load_file(tmp_path / "hf" / "step-0000000004" / "model.safetensors")["a.weight"]
    assert torch.equal(found, torch.full_like(found, 100))
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["step-0000000002", "step-0000000004"]


def train_divided(run: str, folder: str) -> list[list[float]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    fully_shard(model)
    hub = ExportHub(folder, every=2, last=False, dtype="bfloat16")
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    with Checkpointer(run, state, memory=None, save=EverySteps(2), listeners=[hub]) as checkpointer:
        for step in checkpointer.steps(3):
            checkpointer.step(step)
    whole = [cast("DTensor", item).full_tensor() for item in model.parameters()]
    return [item.detach().bfloat16().flatten().tolist() for item in whole]


def test_one_rank_of_several_exports_whole_tensors(run: str, tmp_path: Path) -> None:
    wanted, _ = run_ranks(2, train_divided, run, str(tmp_path / "hf"))
    (folder,) = (tmp_path / "hf").iterdir()
    found = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    names = ("0.weight", "0.bias", "1.weight", "1.bias")
    assert [found[name].flatten().tolist() for name in names] == wanted


def test_training_waits_for_no_export_and_the_newest_one_that_waits_is_next(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun, write = Gate(), Gate(), exporting.write_export

    def held(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert gate.wait(30)
        return write(*arguments, **options)

    monkeypatch.setattr(export_hub, "write_export", held)
    told, hub, model = Told(), ExportHub(tmp_path / "hf", every=1), state_at(-1)
    with Checkpointer(run, {"model": model}, memory=None, keep=KeepLast(1), listeners=[hub, told]) as checkpointer:
        for step in range(1, 5):
            for tensor in model.values():
                tensor.fill_(step)
            begun_s = time.monotonic()
            checkpointer.save(step)
            assert time.monotonic() - begun_s < 5
            assert begun.wait(30)
        with pytest.raises(DeadlineError) as caught:
            checkpointer.wait(0.2)
        assert caught.value.code == "timeout.export"
        assert not [path for path in (tmp_path / "hf").glob("*") if path.name[0] != "."]
        gate.set()
        checkpointer.wait()  # the last of a series is exported, so there is no error
    assert told.finished == [1, 4]
    assert told.failed == [(2, "storage.slow"), (3, "storage.slow")]
    assert exported(tmp_path / "hf") == [1, 4]


@pytest.mark.parametrize("wrong", ["rule", "glob"])
def test_a_wrong_option_is_told_at_the_first_commit_and_close_raises_it(
    run: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, wrong: str
) -> None:
    options: dict[str, Any] = {"mapping": [Rename("x.y", "z")]} if wrong == "rule" else {"select": "modell"}
    hub, told = ExportHub(tmp_path / "hf", every=1000, **options), Told()
    with pytest.raises(IncompatibleError) as caught:
        trained(run, hub, told, total=5, waits=False)
    assert caught.value.code == {"rule": "incompatible.mapping", "glob": "incompatible.select"}[wrong]
    assert told.failed[0] == (2, caught.value.code)
    assert [each.step for each in holdfast.ls(run)] == [4, 2]  # training went on, and all is saved
    assert not (tmp_path / "hf").exists()
    errors = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert "step 2 is not exported: [" in errors[0]


def test_a_wrong_option_is_told_once_for_each_step_and_never_as_slow_exports(run: str, tmp_path: Path) -> None:
    hub, told = ExportHub(tmp_path / "hf", every=2, select="modell"), Told()
    with pytest.raises(IncompatibleError):
        trained(run, hub, told, total=9, waits=False)
    steps = [step for step, _ in told.failed]
    assert sorted(set(steps)) == sorted(steps)
    assert {code for _, code in told.failed} == {"incompatible.select"}


def test_no_thread_of_a_hub_is_left_after_an_exception_in_the_loop(run: str, tmp_path: Path) -> None:
    hub, model = ExportHub(tmp_path / "hf", every=1), state_at(1)

    def train() -> None:
        with Checkpointer(run, {"model": model}, memory=None, listeners=[hub]) as checkpointer:
            checkpointer.save(1)
            checkpointer.wait()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    until(lambda: not [each for each in threading.enumerate() if each.name == "holdfast-export"])


def test_an_export_that_finds_the_disk_full_leaves_nothing_there(run: str, tmp_path: Path) -> None:
    told = Told()
    # Space is there when the export begins, and no inode for its third file.
    with mounted(tmp_path / "disk", "tmpfs", "size=4m,nr_inodes=5") as folder:
        with pytest.raises(StorageError):
            trained(run, ExportHub(folder / "hf", every=2), told, total=3)
        assert told.failed == [(2, "storage.full")]
        assert list((folder / "hf").iterdir()) == []


def test_a_folder_without_a_name_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="not an empty text"):
        ExportHub("")


def test_a_later_export_that_succeeds_takes_the_error_away(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, told = exporting.write_export, Told()

    def failing(*arguments: Any, **options: Any) -> Any:
        if not told.failed:
            raise OSError(5, "the disk hums")
        return write(*arguments, **options)

    monkeypatch.setattr(export_hub, "write_export", failing)
    hub, model = ExportHub(tmp_path / "hf", every=1), state_at(1)
    with Checkpointer(run, {"model": model}, memory=None, listeners=[hub, told]) as checkpointer:
        checkpointer.save(1)
        with pytest.raises(HoldfastError, match="the disk hums") as caught:
            checkpointer.wait()
        assert caught.value.code == "storage.export"
        assert hub.error is caught.value
        until(lambda: told.failed == [(1, "storage.export")])
        for tensor in model.values():
            tensor.fill_(2)
        checkpointer.save(2)
    assert exported(tmp_path / "hf") == [2]


def train_and_die(run: str, folder: str) -> None:
    """A job that is killed while it writes the second of the two files of its export of step 2."""
    files = []

    def killed(*arguments: Any, **options: Any) -> Any:
        files.append(arguments)
        if len(files) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return write_together(*arguments, **options)

    vars(file_tasks).update(write_together=killed, _RECORD_NBYTES=0)  # a record for each file
    vars(side_by_side).update(NUM_SMALL_TASKS=1)
    trained(run, ExportHub(folder, every=2, shard_nbytes=100), total=3)


@pytest.mark.parametrize("loses", [False, True])
def test_an_export_that_was_killed_is_never_visible_and_the_next_job_finishes_or_removes_it(
    run: str, tmp_path: Path, *, loses: bool
) -> None:
    folder = tmp_path / "hf"
    assert start(train_and_die, run, str(folder), err=tmp_path / "err").wait() == -signal.SIGKILL
    (draft,) = folder.iterdir()
    assert draft.name == ".step-0000000002@1.1.draft"
    assert (draft / "model-00001-of-00002.safetensors").exists()
    if loses:
        draft.rename(folder / ".step-0000000002@7.7.draft")
    (folder / ".step-0000000009.removed").mkdir()
    told = Told()
    trained(run, ExportHub(folder, every=100, shard_nbytes=100), told, total=4)
    assert told.finished == ([3] if loses else [2, 3])
    assert sorted(path.name for path in folder.iterdir()) == [f"step-{step:010d}" for step in told.finished]
    for step in told.finished:
        found = holdfast.open(folder / f"step-{step:010d}")
        assert all(torch.equal(found[name][...], tensor) for name, tensor in state_at(step).items())


def test_a_draft_that_lacks_only_its_name_gets_it(run: str, tmp_path: Path) -> None:
    hub, series = ExportHub(tmp_path / "hf", every=2), ExportSeries(tmp_path / "hf")
    trained(run, hub, total=3)
    draft = ExportDraft(2, Place(1, 1))
    series.path(2).rename(series.folder / draft.name)  # a kill before the last step
    assert series.drafts() == [draft]
    trained(run, ExportHub(tmp_path / "hf", every=100, last=False), total=4)
    assert exported(tmp_path / "hf") == [2]


def test_a_draft_of_another_choice_is_written_anew(run: str, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    assert start(train_and_die, run, str(folder), err=tmp_path / "err").wait() == -signal.SIGKILL
    trained(run, ExportHub(folder, every=100, last=False), total=4)
    assert exported(folder) == [2]


@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_what_no_hub_wrote_is_neither_replaced_nor_removed(run: str, tmp_path: Path, kind: str) -> None:
    folder, other, told = tmp_path / "hf", tmp_path / "other", Told()
    mine = folder / "step-0000000002"
    for each in (folder, other):
        each.mkdir()
    (other / "weights").write_text("mine")
    if kind == "file":
        mine.write_text("mine")
    elif kind == "folder":
        mine.mkdir()
        (mine / "model.safetensors").write_text("mine")
    else:
        mine.symlink_to(other)
    hub = ExportHub(folder, every=2, keep=1)
    with pytest.raises(ConfigurationError, match="no ExportHub wrote it") as caught:
        trained(run, hub, told, total=3)
    assert caught.value.code == "config.destination"
    trained(run, ExportHub(folder, every=2, keep=1), told, total=7)
    assert told.failed == [(2, "config.destination")]
    assert told.finished == [4, 6]
    assert sorted(path.name for path in folder.iterdir()) == ["step-0000000002", "step-0000000006"]
    kept = {"file": mine, "folder": mine / "model.safetensors", "link": mine / "weights"}[kind]
    assert kept.read_text() == "mine"


def test_a_draft_that_cannot_be_removed_is_told_and_exports_go_on(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafts = [tmp_path / "hf" / name for name in (".step-0000000001@9.3.draft", ".step-0000000002@9.4.draft")]
    for draft in drafts:
        draft.mkdir(parents=True)
    remove = shutil.rmtree

    def busy(path: Path) -> None:
        if path == drafts[0]:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", busy)  # tests run as root, whom no mode of a folder stops
    told = Told()
    trained(run, ExportHub(tmp_path / "hf", every=2), told, total=3)
    assert told.finished == [2]
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == [drafts[0].name, "step-0000000002"]
    assert len([record for record in caplog.records if "step 1, which was interrupted, is left" in record.message]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"last": False}, "nothing would be exported"),
        ({"every": 0}, "at least one step"),
        ({"keep": 0}, "the newest export stays"),
        ({"to": "dcp"}, "holdfast.export writes other formats"),
        ({"dtype": "int8"}, "floating dtype"),
    ],
)
def test_an_option_that_is_wrong_by_itself_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExportHub("hf", **options)


def test_a_folder_that_cannot_be_renamed_is_refused_at_once() -> None:
    with pytest.raises(ConfigurationError) as caught:
        ExportHub("memory://hub")
    assert caught.value.code in ("config.export", "config.scheme")


def train_in_memory(run: str, folder: str, node_dir: str, total: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    fully_shard(model)
    options: dict[str, Any] = {"memory": Memory(node_dir=Path(node_dir)), "save": EverySteps(2)}
    hub = ExportHub(folder, every=2)
    with Checkpointer(run, {"model": model}, listeners=[hub], **options) as checkpointer:
        for step in checkpointer.steps(total):
            with torch.no_grad():
                for item in model.parameters():
                    item.fill_(step)
            checkpointer.step(step)


@pytest.mark.slow
def test_exports_go_on_in_a_job_with_another_number_of_ranks(run: str, tmp_path: Path, node_dir: Path) -> None:
    for world_size, total in ((2, 4), (3, 7)):
        run_ranks(world_size, train_in_memory, run, str(tmp_path / "hf"), str(node_dir), total)
        last = ExportSeries(tmp_path / "hf").steps()[-1]
        assert last == total - 1
    for step in ExportSeries(tmp_path / "hf").steps():
        for tensor in load_file(tmp_path / "hf" / f"step-{step:010d}" / "model.safetensors").values():
            assert torch.equal(tensor, torch.full_like(tensor, step))
