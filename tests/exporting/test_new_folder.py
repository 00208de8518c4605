"""The folder of an export: durable file by file, continued after a kill, never mixed with anything else."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import holdfast
from holdfast import progress
from holdfast.errors import ConfigurationError, CorruptError, StorageError
from holdfast.exporting import file_tasks
from holdfast.exporting.file_tasks import RECORD_NAME
from holdfast.io.meter import Meter
from holdfast.store import posix
from holdfast.store.posix import PosixStore
from tests.exporting.exported_runs import bits
from tests.support.command_line import ENVIRONMENT, damage

#: An export that kills itself when it begins the third file.
KILLED = """
import os, signal, sys
import holdfast
from holdfast.exporting import file_tasks
from holdfast.io import side_by_side
write, begun = file_tasks.write_together, []
def killed(files, *arguments):
    begun.append(files)
    if len(begun) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(files, *arguments)
file_tasks.write_together = killed
file_tasks._RECORD_NBYTES, side_by_side.NUM_SMALL_TASKS = 0, 1
holdfast.export(sys.argv[1], sys.argv[2], shard_nbytes=1_000_000)
"""
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
STATE = {f"w{number}": torch.full((200_000,), float(number)) for number in range(4)}


@pytest.fixture(autouse=True)
def _record_for_each_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_tasks, "_RECORD_NBYTES", 0)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    holdfast.save(tmp_path / "run", STATE, 1)
    return tmp_path / "run"


def killed(run: Path, folder: Path) -> None:
    """Begin an export of four files, and kill it in the third."""
    command = [sys.executable, "-c", KILLED, str(run), str(folder)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr


def when_written(path: Path) -> tuple[int, int]:
    """Numbers that change when a file is written again, but not when it is read."""
    return path.stat().st_ino, path.stat().st_mtime_ns


def is_whole(folder: Path) -> bool:
    """Whether a folder holds the four files and the index, and nothing else, and all tensors of the state."""
    names = sorted(path.name for path in folder.iterdir())
    found = {name: bits(tensor) for file in SHARDS for name, tensor in load_file(folder / file).items()}
    return names == [*SHARDS, INDEX] and found == {name: bits(tensor) for name, tensor in STATE.items()}


def test_an_export_that_was_killed_shows_it_and_goes_on_with_the_files_that_lack(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    killed(run, folder)
    found = sorted(path.name for path in folder.iterdir() if path.name[0] != ".")
    records = [r"holdfast-export-00000[01]-\w{16}\.json"] * 2 + [r"holdfast-export-call-\w{16}\.json", RECORD_NAME]
    assert len(found) == 6
    assert all(re.fullmatch(*each) for each in zip([*records, *SHARDS[:2]], found, strict=True))
    written = [when_written(folder / name) for name in SHARDS[:2]]
    report = holdfast.export(run, folder, shard_nbytes=1_000_000)
    assert report.kept == tuple(SHARDS[:2])
    assert report.read_nbytes < 3 << 20
    assert [when_written(folder / name) for name in SHARDS[:2]] == written
    assert is_whole(folder)


def test_the_progress_counts_every_byte_of_the_new_folder_once_also_those_that_were_there(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meters = []

    @contextmanager
    def shown(description: str, *, shown: bool, after_s: float) -> Iterator[Meter]:
        meters.append(Meter())
        yield meters[-1]

    monkeypatch.setattr(progress, "progress", shown)
    killed(run, tmp_path / "hf")
    for folder in (tmp_path / "hf", tmp_path / "other"):
        holdfast.export(run, folder, shard_nbytes=1_000_000)
    needed = sum(tensor.nbytes for tensor in STATE.values())
    assert [(meter.total, meter.done) for meter in meters] == [(needed, needed)] * 2


def test_a_kill_while_the_records_are_removed_loses_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PulledError(Exception):
        pass

    delete, whole = PosixStore.delete, {"export": 0}

    def pulled(store: PosixStore, key: str) -> bool:
        if key.startswith("holdfast-export"):
            whole["export"] += 1
            if whole["export"] == 5:
                raise PulledError
        return delete(store, key)

    monkeypatch.setattr(PosixStore, "delete", pulled)
    with pytest.raises(PulledError):
        holdfast.export(run, tmp_path / "hf", shard_nbytes=1_000_000)
    assert len(list((tmp_path / "hf").glob("holdfast-export*"))) == 2
    report = holdfast.export(run, tmp_path / "hf", shard_nbytes=1_000_000)
    assert (report.kept, report.written_nbytes, report.read_nbytes) == ((*SHARDS, INDEX), 0, 0)
    assert is_whole(tmp_path / "hf")


def test_a_finished_file_that_rotted_is_written_again(run: Path, tmp_path: Path) -> None:
    killed(run, tmp_path / "hf")
    damage(tmp_path / "hf" / SHARDS[0], 0.5)
    report = holdfast.export(run, tmp_path / "hf", shard_nbytes=1_000_000)
    assert report.kept == (SHARDS[1],)
    assert is_whole(tmp_path / "hf")


@pytest.mark.parametrize("other", ["size", "dtype", "checkpoint", "short file", "file of somebody", "broken record"])
def test_a_part_of_another_export_is_refused_and_stays(run: Path, tmp_path: Path, other: str) -> None:
    folder, shard_nbytes = tmp_path / "hf", 1_000_000
    killed(run, folder)
    if other == "size":
        shard_nbytes = 2_000_000
    elif other == "checkpoint":
        holdfast.save(run, STATE, 2)
    elif other == "short file":
        os.truncate(folder / SHARDS[0], 800)
    elif other == "file of somebody":
        (folder / "notes.txt").write_text("mine")
    elif other == "broken record":
        (folder / RECORD_NAME).write_text("{")
    found = sorted(folder.iterdir())
    with pytest.raises(ConfigurationError, match="a part of another export") as caught:
        holdfast.export(run, folder, dtype="bfloat16" if other == "dtype" else None, shard_nbytes=shard_nbytes)
    assert caught.value.code == "config.destination"
    assert sorted(folder.iterdir()) == found


def test_a_folder_that_holds_something_else_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"is not empty: it holds notes\.txt") as caught:
        holdfast.export(run, tmp_path / "hf")
    assert caught.value.code == "config.destination"
    assert [path.name for path in (tmp_path / "hf").iterdir()] == ["notes.txt"]
    with pytest.raises(StorageError) as not_a_folder:
        holdfast.export(run, tmp_path / "hf" / "notes.txt")
    assert not_a_folder.value.code == "storage.not_a_folder"


def test_a_disk_without_room_is_refused_before_anything_is_written(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=3_000_000))
    with pytest.raises(StorageError, match=r"needs 3\.1 MiB, but its disk has only 2\.9 MiB free") as caught:
        holdfast.export(run, tmp_path / "new" / "hf")
    assert caught.value.code == "storage.full"
    assert not (tmp_path / "new").exists()


def test_a_damaged_block_ends_the_export_with_an_error_that_names_it(run: Path, tmp_path: Path) -> None:
    (data,) = run.glob("checkpoints/*/data-00000.safetensors")
    damage(data, 0.8)
    with pytest.raises(CorruptError, match="block 2 of its data"):
        holdfast.export(run, tmp_path / "hf", shard_nbytes=1_000_000)
    assert not (tmp_path / "hf" / INDEX).exists()


def test_wrong_options_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'onnx' is no format that holdfast writes") as caught:
        holdfast.export(tmp_path / "none", tmp_path / "hf", "onnx")
    assert caught.value.code == "config.export"
    with pytest.raises(ValueError, match="dtype must be a floating dtype"):
        holdfast.export(tmp_path / "none", tmp_path / "hf", dtype="int8")
    with pytest.raises(ValueError, match="shard_nbytes is 0"):
        holdfast.export(tmp_path / "none", tmp_path / "hf", shard_nbytes=0)
    with pytest.raises(TypeError, match="a list of rules"):
        holdfast.export(tmp_path / "none", tmp_path / "hf", mapping=["a"])  # type: ignore[list-item]


def test_of_two_equal_exports_at_once_one_succeeds_and_the_other_is_told_why(tmp_path: Path) -> None:
    holdfast.save(tmp_path / "run", {"model": {f"w{n}": torch.full((300, 300), float(n)) for n in range(20)}}, 1)
    for turn in range(3):
        together, dst = threading.Barrier(2), tmp_path / f"new-{turn}"

        def export(together: threading.Barrier = together, dst: Path = dst) -> object:
            together.wait()
            try:
                return holdfast.export(tmp_path / "run", dst, shard_nbytes=400_000)
            except holdfast.ConfigurationError as error:
                return error.code

        with ThreadPoolExecutor(2) as pool:
            found = [each.result() for each in [pool.submit(export) for _ in range(2)]]
        assert sorted(map(str, map(type, found))) == sorted(map(str, (str, holdfast.ExportReport)))
        assert "config.destination" in found
        assert sum(len(load_file(file)) for file in dst.glob("*.safetensors")) == 20


def test_of_two_exports_that_made_one_folder_one_ended_in_an_error_about_files_that_are_no_folders(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one had taken the temporary file of the first record for that of a dead call."""
    give_name = posix._give_name

    def deleted(temporary: str, path: str) -> bool:
        monkeypatch.undo()
        os.unlink(temporary)
        return give_name(temporary, path)

    monkeypatch.setattr(posix, "_give_name", deleted)
    holdfast.export(run, tmp_path / "hf", shard_nbytes=1_000_000)
    assert is_whole(tmp_path / "hf")


def test_an_export_was_told_to_check_its_path_where_another_one_had_just_ended(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hf"
    killed(run, folder)
    listed = PosixStore.list

    def ends(store: PosixStore, *arguments: Any, **options: Any) -> list[str]:
        names = listed(store, *arguments, **options)
        if store.location.folder == folder:
            monkeypatch.undo()
            for path in folder.glob("holdfast-export*"):  # the last step of the other call, after this one has looked
                path.unlink()
        return names

    monkeypatch.setattr(PosixStore, "list", ends)
    with pytest.raises(ConfigurationError, match="another call writes an export to") as caught:
        holdfast.export(run, folder, shard_nbytes=1_000_000)
    assert caught.value.code == "config.destination"
