"""A job is told once, with numbers, how many more saves its disk has room for. Real tmpfs and ext2 mounts."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast import Checkpointer, EverySteps, KeepLast, StorageError
from holdfast.policy.keep import KeepPolicy
from holdfast.store.posix import PosixStore
from tests.store.test_posix_storage import mounted
from tests.support.models import start_new_job

#: The elements of the state, which take 2 MB.
NUM_ELEMENTS = 500_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "disk", "tmpfs", "size=9m") as folder:
        yield folder


def train(run: str, total: int, keep: KeepPolicy | None) -> None:
    state = {"w": torch.zeros(NUM_ELEMENTS)}
    with Checkpointer(run, state, save=EverySteps(1), keep=keep, memory=None) as checkpointer:
        for step in checkpointer.steps(total):
            checkpointer.step(step)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if "space_forecast" in record.name]
    caplog.clear()
    return texts


def test_a_loop_without_keep_is_told_once_when_its_disk_will_be_full(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = str(disk / "run")
    train(run, 3, None)
    (text,) = warnings(caplog)
    size = holdfast.ls(run)[0].nbytes
    # A save may be under way when a look counts, and may have taken its space or not: the number may be one too large.
    # Four fit before the first save, and two after the second one; rounds that come late are one round.
    assert re.match(f"the disk of '{run}' will be full after [2-5] more saves: a checkpoint takes {size:,} bytes", text)
    assert "has no `keep`" in text
    assert "holdfast prune" in text

    start_new_job()
    train(run, 4, None)  # the next job is told when it begins, as the first one was
    (text,) = warnings(caplog)
    assert re.search("will be full after ([23] more saves|1 more save):", text)

    start_new_job()
    with pytest.raises(StorageError, match="holdfast prune") as error:
        train(run, 6, None)
    assert error.value.code == "storage.full"
    assert not [path for path in disk.rglob("*") if "step-0000000005" in str(path) and "safetensors" in path.name]


def test_a_policy_that_fits_is_no_trouble_and_one_that_does_not_is_told_with_both_numbers(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = str(disk / "run")
    train(run, 6, KeepLast(3))
    assert warnings(caplog) == []
    start_new_job()
    train(run, 7, KeepLast(5))
    (text,) = warnings(caplog)
    assert re.search("full after (1 more save|2 more saves):|no room for the next save:", text)
    assert re.search(r"This counts the deletions of keep=KeepLast\(number=5\); without them it would be [012]\.", text)


def test_a_file_that_does_not_fit_is_refused_before_a_byte_also_where_no_space_can_be_reserved(tmp_path: Path) -> None:
    """ext2 has no fallocate: the file was written until the disk was full."""
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(4 << 20)
    subprocess.run(["mkfs.ext2", "-q", str(image)], check=True, capture_output=True)
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-o", "loop", str(image), str(folder)], check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount")
    try:
        store = PosixStore(str(folder / "run"))
        with pytest.raises(StorageError) as error:
            store.writer("checkpoints/x", nbytes=16 << 20)
        assert error.value.code == "storage.full"
        assert "bytes are missing" in error.value.message
        assert os.listdir(folder / "run" / "checkpoints") == []
        writer = store.writer("checkpoints/x", nbytes=1 << 20)
        writer.write_at(0, np.ones(1 << 20, np.uint8))
        writer.publish(1 << 20)
        assert store.nbytes("checkpoints/x") == 1 << 20
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
