"""Workers take little memory, and read and write each byte once."""

from __future__ import annotations

import multiprocessing
import re
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file

import holdfast
from holdfast.exporting import file_tasks
from holdfast.importing import first_checkpoint

NBYTES = 1 << 30


class Used(NamedTuple):
    """The memory that a worker used at most, and the bytes that it read and wrote."""

    pid: int
    peak: int
    read: int
    written: int


def used(_: int) -> Used:
    time.sleep(0.2)  # so that each worker answers
    peak = re.search(r"VmHWM:\s+([0-9]+) kB", Path("/proc/self/status").read_text())
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    assert peak is not None
    pid = multiprocessing.current_process().pid or 0
    return Used(pid, 1024 * int(peak[1]), int(counted["rchar"]), int(counted["wchar"]))


def by_worker(pool: ProcessPoolExecutor) -> dict[int, Used]:
    return {each.pid: each for each in pool.map(used, range(6))}


@pytest.mark.slow
@pytest.mark.parametrize("work", ["import", "hf", "dcp"])
def test_workers_stay_below_512_mib_and_move_each_byte_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: str
) -> None:
    monkeypatch.setattr(first_checkpoint, "FILE_NBYTES", NBYTES // 4)
    tensors = {f"w{at}": torch.full((NBYTES // 64,), float(at)) for at in range(16)}
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    if work != "import":
        holdfast.import_checkpoint(tmp_path / "source", tmp_path / "run", 1)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        before = by_worker(pool)
        if work == "import":
            holdfast.import_checkpoint(tmp_path / "source", tmp_path / "run", 1, executor=pool)
        else:
            monkeypatch.setattr(file_tasks, "_TASK_NBYTES", 0)
            holdfast.export(tmp_path / "run", tmp_path / "new", work, shard_nbytes=NBYTES // 4, executor=pool)
        after = by_worker(pool)
    assert len(after) == 2
    assert max(each.peak for each in after.values()) < 512 << 20
    read = sum(each.read - before[pid].read for pid, each in after.items())
    written = sum(each.written - before[pid].written for pid, each in after.items())
    assert NBYTES <= read < 1.02 * NBYTES
    assert NBYTES <= written < 1.001 * NBYTES
