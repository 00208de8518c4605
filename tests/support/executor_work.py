"""Imports and exports in several small files, whoever runs them, and what must come of them."""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

import holdfast
from holdfast.exporting import file_tasks
from holdfast.importing import first_checkpoint
from holdfast.io import side_by_side

#: Bytes of a tensor, of which each file has one.
NBYTES = 1_200_000
#: The room for values behind the tensor of the first data file, in a block that has elements, too. Each data file has
#: one tensor, so no worker needs a block of another.
VALUES_NBYTES = 4096
NAMES = [f"w{number}" for number in range(6)]


def tensors() -> dict[str, torch.Tensor]:
    """The tensors that are imported and exported."""
    return {name: torch.arange(NBYTES // 4, dtype=torch.float32) + at for at, name in enumerate(NAMES)}


def write_source(folder: Path) -> Path:
    """Write a Hugging Face folder of two files."""
    folder.mkdir()
    state = tensors()
    for number in range(2):
        save_file(
            {name: state[name] for name in NAMES[3 * number : 3 * number + 3]},
            folder / f"model-{number + 1:05d}-of-00002.safetensors",
        )
    return folder


def imported(source: Path, run: Path, executor: Executor | None = None, **options: Any) -> holdfast.ImportReport:
    """Import `source` into six data files."""
    with patch.object(first_checkpoint, "FILE_NBYTES", NBYTES):
        return holdfast.import_checkpoint(source, run, 7, executor=executor, **options)


def exported(
    run: Path, folder: Path, to: str, executor: Executor | None = None, **options: Any
) -> holdfast.ExportReport:
    """Export `run` into six files with a task and a record for each, one after another in each process."""
    with (
        patch.object(file_tasks, "_TASK_NBYTES", 0),
        patch.object(file_tasks, "_RECORD_NBYTES", 0),
        patch.object(side_by_side, "NUM_SMALL_TASKS", 1),
    ):
        return holdfast.export(run, folder, to, shard_nbytes=NBYTES, executor=executor, **options)


def check_run(run: Path) -> None:
    """Assert that a run holds the tensors, in six data files, and nothing that a worker left."""
    view, expected = holdfast.open(run), tensors()
    assert view.step == 7
    for name in NAMES:
        assert torch.equal(view[name][...], expected[name])
    (folder,) = (run / "checkpoints").iterdir()
    names = sorted(path.name for path in folder.iterdir())
    assert [name for name in names if name.startswith("data")] == [f"data-{n:05d}.safetensors" for n in range(6)]
    assert not [name for name in names if name.startswith(".tmp")]


def check_export(folder: Path) -> None:
    """Assert that a folder for Hugging Face holds the tensors, in six files, and nothing else but the index."""
    names = sorted(path.name for path in folder.iterdir())
    assert names == [*(f"model-{n:05d}-of-00006.safetensors" for n in range(1, 7)), "model.safetensors.index.json"]
    found = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors().items())


def check_work(folder: Path, executor: Executor) -> None:
    """Assert that workers of `executor` import and export what this process does, and read no byte twice."""
    source = write_source(folder / "source")
    report = imported(source, folder / "run", executor)
    check_run(folder / "run")
    assert (report.kept, report.written_nbytes) == ((), report.nbytes)
    for to in ("hf", "dcp"):
        here, there = exported(folder / "run", folder / f"{to}-here", to), folder / f"{to}-there"
        away = exported(folder / "run", there, to, executor)
        assert (away.files, away.kept, away.written_nbytes) == (here.files, (), here.written_nbytes)
        assert here.read_nbytes == away.read_nbytes == 6 * NBYTES + VALUES_NBYTES
        for path in (folder / f"{to}-here").iterdir():
            assert path.read_bytes() == (there / path.name).read_bytes()
    check_export(folder / "hf-there")
