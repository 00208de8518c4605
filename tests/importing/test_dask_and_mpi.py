"""Imports and exports on workers of the real Dask and of the real MPI."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holdfast
from tests.support.executor_work import check_export, check_work, exported, imported, write_source

pytestmark = [pytest.mark.executors, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]
ROOT = Path(__file__).parents[2]

MPI = """
import sys
from pathlib import Path
from mpi4py.futures import MPIPoolExecutor
from tests.support.executor_work import check_work

if __name__ == "__main__":
    with MPIPoolExecutor() as workers:
        check_work(Path(sys.argv[1]), workers)
        print("worked with", workers.num_workers)
"""


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    import dask
    from distributed import Client, LocalCluster

    dask.config.set({"distributed.scheduler.allowed-failures": 1})
    with LocalCluster(2, threads_per_worker=1, dashboard_address=None) as cluster, Client(cluster) as connected:
        yield connected


def test_dask_writes_what_this_process_writes(tmp_path: Path, client: Any) -> None:
    check_work(tmp_path, client.get_executor())


def die_once(mark: str) -> None:
    """End the first process that does this."""
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_of_dask_that_dies_is_replaced_and_the_export_is_whole(tmp_path: Path, client: Any) -> None:
    imported(write_source(tmp_path / "source"), tmp_path / "run")
    workers = client.get_executor()
    workers.submit(die_once, str(tmp_path / "mark"))
    exported(tmp_path / "run", tmp_path / "hf", "hf", workers)
    assert (tmp_path / "mark").exists()
    check_export(tmp_path / "hf")


def test_an_error_in_a_worker_of_dask_is_ours(tmp_path: Path, client: Any) -> None:
    imported(write_source(tmp_path / "source"), tmp_path / "run")
    (data,) = (tmp_path / "run").glob("checkpoints/*/data-00002.safetensors")
    os.truncate(data, 5000)
    with pytest.raises(holdfast.CorruptError) as caught:
        exported(tmp_path / "run", tmp_path / "hf", "hf", client.get_executor())
    assert caught.value.path == str(data)


def test_mpi_writes_what_one_process_writes(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(MPI)
    launcher = Path(sys.executable).parent / "mpiexec"
    command = [str(launcher), "-n", "3", sys.executable, "-m", "mpi4py.futures", str(script), str(tmp_path)]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "worked with 2"
