"""Imports and exports on workers of the real Ray, through the adapter of the guide."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path

import pytest

import holdfast
from tests.support.executor_work import check_export, check_work, exported, imported, write_source

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def workers() -> Iterator[Executor]:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        yield ray_executor()
    finally:
        ray.shutdown()


def ray_executor() -> Executor:
    """The adapter of the guide."""
    guide = (Path(__file__).parents[2] / "docs/guides/foreign.md").read_text()
    (text,) = [part.partition("```")[0] for part in guide.split("```py\n") if "class RayExecutor" in part]
    names: dict[str, type[Executor]] = {}
    exec(text, names)
    return names["RayExecutor"]()


def test_ray_writes_what_this_process_writes(tmp_path: Path, workers: Executor) -> None:
    check_work(tmp_path, workers)


def test_an_error_in_a_worker_of_ray_is_ours(tmp_path: Path, workers: Executor) -> None:
    imported(write_source(tmp_path / "source"), tmp_path / "run")
    (data,) = (tmp_path / "run").glob("checkpoints/*/data-00002.safetensors")
    os.truncate(data, 5000)
    with pytest.raises(holdfast.CorruptError) as caught:
        exported(tmp_path / "run", tmp_path / "hf", "hf", workers)
    assert caught.value.path == str(data)


class Mortal(Executor):
    """The workers of another executor, which kill themselves in the second task."""

    def __init__(self, workers: Executor) -> None:
        self._workers = workers
        self._number = 0

    def submit(self, fn, /, *args, **kwargs):  # type: ignore[no-untyped-def]
        self._number += 1
        if self._number == 2:
            return self._workers.submit(die)
        return self._workers.submit(fn, *args, **kwargs)


def die() -> None:
    """End this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_of_ray_that_dies_is_an_error_and_the_call_goes_on(tmp_path: Path, workers: Executor) -> None:
    imported(write_source(tmp_path / "source"), tmp_path / "run")
    with pytest.raises(holdfast.StorageError, match="model-00002-of-00006") as caught:
        exported(tmp_path / "run", tmp_path / "hf", "hf", Mortal(workers))
    assert caught.value.code == "storage.worker"
    exported(tmp_path / "run", tmp_path / "hf", "hf", workers)
    check_export(tmp_path / "hf")
