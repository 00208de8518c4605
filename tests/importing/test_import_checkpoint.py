"""`holdfast import` makes a run of a foreign checkpoint: verified from then on, and loaded like any other."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.importing.first_checkpoint import import_state
from holdfast.interop.formats import find_state
from holdfast.run.paths import parse
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.interop.hf_folders import some_tensors, write_sharded
from tests.support.bound import bits
from tests.support.command_line import holdfast_command
from tests.support.ranks import run_ranks


def test_a_hugging_face_folder_becomes_a_run_that_is_verified_and_loaded(tmp_path: Path) -> None:
    tensors, run = some_tensors(), tmp_path / "run"
    write_sharded(tmp_path / "hf", tensors, 3)
    done = holdfast_command("import", tmp_path / "hf", run, "--step", "40", "--json")
    assert done.status == 0, done.err
    assert {key: done.json[key] for key in ("place", "step", "kind", "num_tensors")} == {
        "place": "1.1",
        "step": 40,
        "kind": "a Hugging Face folder",
        "num_tensors": 8,
    }
    assert holdfast_command("verify", run, "--deep").status == 0
    live = {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}
    report = holdfast.load(run, live)
    assert (report.step, report.verified) == (40, True)
    assert {name: bits(tensor) for name, tensor in live.items()} == {n: bits(t) for n, t in tensors.items()}
    assert holdfast.save(run, live, 41).place == "2.1"


def test_of_two_equal_imports_at_once_one_succeeds_and_the_other_is_told_why(tmp_path: Path) -> None:
    """Each deleted the other's temporary files, so both could fail, because "somebody removed" these."""
    tensors = some_tensors()
    write_sharded(tmp_path / "hf", tensors, 3)
    for turn in range(5):
        together, run = threading.Barrier(2), tmp_path / f"run-{turn}"

        def begin(together: threading.Barrier = together, run: Path = run) -> object:
            together.wait()
            try:
                return holdfast.import_checkpoint(tmp_path / "hf", run, 3)
            except holdfast.ConfigurationError as error:
                return error.code

        with ThreadPoolExecutor(2) as pool:
            found = [each.result() for each in [pool.submit(begin) for _ in range(2)]]
        told = [each for each in found if isinstance(each, str)]
        assert told in ([], ["config.destination"])  # the later call finds all done, if it comes late enough
        live = {name: torch.full_like(tensor, 1) for name, tensor in tensors.items()}
        holdfast.load(run, live)
        assert {name: bits(tensor) for name, tensor in live.items()} == {n: bits(t) for n, t in tensors.items()}


def save_columns(folder: str) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    table = torch.arange(700 * 901, dtype=torch.float32).reshape(700, 901)
    state = {"model": {"table": distribute_tensor(table, mesh, [Shard(1)])}, "extra": {"seen": 9, "rates": [0.1, 0.2]}}
    dcp.save(state, checkpoint_id=folder)


def test_a_dcp_folder_of_columns_becomes_one_whole_file_with_its_values(tmp_path: Path) -> None:
    folder, run = tmp_path / "dcp", tmp_path / "run"
    run_ranks(3, save_columns, str(folder))
    done = holdfast_command("import", folder, run, "--step", "9")
    assert done.status == 0, done.err
    assert f"step 9 at 1.1 is what {folder} holds" in done.out.replace("\n", " ")
    live: dict[str, Any] = {"model": {"table": torch.zeros(700, 901)}, "extra": {"seen": 0, "rates": [0.0]}}
    holdfast.load(run, live)
    assert torch.equal(live["model"]["table"], torch.arange(700 * 901, dtype=torch.float32).reshape(700, 901))
    assert live["extra"] == {"seen": 9, "rates": [0.1, 0.2]}
    assert holdfast_command("verify", run, "--deep").status == 0
    assert holdfast_command("doctor", run).status == 0


def test_an_import_goes_into_a_new_run_only_and_takes_no_checkpoint_of_ours(tmp_path: Path) -> None:
    write_sharded(tmp_path / "hf", some_tensors(), 2)
    run = tmp_path / "run"
    holdfast.save(run, {"w": torch.zeros(1)}, 1)
    done = holdfast_command("import", tmp_path / "hf", run, "--step", "2", "--json")
    assert done.json["error"]["code"] == "config.unloaded_history"
    done = holdfast_command("import", run, tmp_path / "other", "--step", "2", "--json")
    assert done.json["error"]["code"] == "config.path"
    assert not (tmp_path / "other").exists()
    assert (holdfast.open(run).step, holdfast.open(run).place) == (1, "1.1")


def test_a_folder_of_no_known_system_is_told_what_an_import_takes_and_not_only_that_it_is_no_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("nothing")
    for name in ("notes", "typo"):
        with pytest.raises(holdfast.NotFoundError, match="An import takes what safetensors, Hugging Face, peft, DCP"):
            holdfast.import_checkpoint(tmp_path / name, tmp_path / "run", 1)
    holdfast.save(tmp_path / "saved", {"w": some_tensors()["model.embed.weight"]}, 1)
    with pytest.raises(holdfast.NotFoundError) as error:
        holdfast.import_checkpoint(f"{tmp_path / 'saved'}@step=7", tmp_path / "run", 1)
    assert "An import" not in error.value.action


def test_an_import_that_failed_leaves_no_checkpoint_and_can_be_done_again(tmp_path: Path) -> None:
    files = write_sharded(tmp_path / "hf", some_tensors(), 2)
    run = open_store(Location(str(tmp_path / "run")))
    state = find_state(parse(tmp_path / "hf")).state
    file = tmp_path / "hf" / files["model.embed.weight"]
    whole = file.read_bytes()
    file.write_bytes(whole[:100_000])
    with pytest.raises(holdfast.CorruptError):
        import_state(state, run, 3)
    with pytest.raises(holdfast.NotFoundError):
        holdfast.open(tmp_path / "run")
    file.write_bytes(whole)
    state = find_state(parse(tmp_path / "hf")).state  # the file is another one now
    assert import_state(state, run, 3).commit.step == 3
    assert bits(holdfast.open(tmp_path / "run")["model.embed.weight"][...]) == bits(
        some_tensors()["model.embed.weight"]
    )


class Unwilling(Executor):
    """An executor without workers."""

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[Any]:
        raise RuntimeError("no worker")


class Silent(Executor):
    """An executor whose author forgot to return the future."""

    def submit(self, fn: Callable[..., object], /, *args: object, **kwargs: object) -> Future[Any]:
        return None  # type: ignore[return-value]


def test_an_executor_that_returns_no_future_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path / "hf", some_tensors(), 2)
    with pytest.raises(holdfast.ConfigurationError, match=r"config\.executor.*submit of a Silent returned None"):
        holdfast.import_checkpoint(tmp_path / "hf", tmp_path / "run", 3, executor=Silent())


def test_an_import_that_is_repeated_with_another_step_names_the_files_of_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_sharded(tmp_path / "hf", some_tensors(), 2)
    with pytest.raises(holdfast.StorageError, match="no worker"):
        holdfast.import_checkpoint(tmp_path / "hf", tmp_path / "run", 3, executor=Unwilling())
    assert "goes on if it is repeated" in holdfast_command("ls", tmp_path / "run").out.replace("\n", " ")
    assert "goes on if it is repeated" in holdfast_command("doctor", tmp_path / "run").out.replace("\n", " ")
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    holdfast.import_checkpoint(tmp_path / "hf", tmp_path / "run", 4)
    assert "the files of an interrupted import of another step or source" in caplog.text
    assert folder.name in caplog.text


def test_an_import_that_a_full_disk_stopped_was_called_one_of_another_source(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_sharded(tmp_path / "hf", some_tensors(), 2)
    with pytest.raises(holdfast.StorageError, match="no worker"):
        holdfast.import_checkpoint(tmp_path / "hf", tmp_path / "run", 3, executor=Unwilling())
    (folder,) = (tmp_path / "run" / "checkpoints").iterdir()
    for file in folder.iterdir():  # the disk had room for the folder, and for nothing in it
        file.unlink()
    holdfast.import_checkpoint(tmp_path / "hf", tmp_path / "run", 3)
    assert "another step or source" not in caplog.text


def test_an_import_takes_little_memory_and_no_torch(tmp_path: Path) -> None:
    write_sharded(tmp_path / "hf", {"w": torch.zeros(24 << 20), "v": torch.ones(3)}, 1)  # 96 MiB
    script = (
        "import resource, sys\n"
        "from holdfast.cli.importing_command import import_checkpoint\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "import_checkpoint(sys.argv[1], sys.argv[2], step=1, as_json=True)\n"
        "assert 'torch' not in sys.modules\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "assert grown < 48 << 10, grown\n"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "hf", tmp_path / "run"], check=True, capture_output=True)


def test_tied_weights_of_a_torch_file_stay_tied_in_the_run(tmp_path: Path) -> None:
    weight, run = torch.arange(12.0).reshape(3, 4), tmp_path / "run"
    torch.save({"embed": weight, "head": weight}, tmp_path / "tied.pt")
    assert holdfast_command("import", tmp_path / "tied.pt", run, "--step", "1").status == 0
    view = holdfast.open(run)
    assert (view.names(), dict(view.aliases)) == (["embed"], {"head": "embed"})
    tied = torch.zeros(3, 4)
    holdfast.load(run, {"embed": tied, "head": tied})
    assert bits(tied) == bits(weight)
