"""The complete example, `examples/train.py`: it loses nothing, whatever ends it."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

import holdfast
from tests.support import nursery
from tests.support.keepers import kill
from tests.support.nursery import until
from tests.support.rank_worker import HOST, environment_of

SCRIPT = Path(__file__).parents[2] / "examples" / "train.py"

pytestmark = pytest.mark.usefixtures("memory_is_given_back")


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts a job in a folder of its own. Jobs that still run at the end of the test are killed, with their ranks."""
    monkeypatch.chdir(tmp_path)
    jobs = []

    def start(num_ranks: int, *, num_steps: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
        command += [str(SCRIPT), "runs/demo", str(num_steps)]
        jobs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return jobs[-1]

    yield start
    for job in jobs:
        if job.poll() is None:
            ranks = ranks_of(job)
            job.kill()
            for pid in ranks:
                kill(pid)
        job.communicate()


def ranks_of(job: subprocess.Popen[str]) -> list[int]:
    """The processes of a job's ranks."""
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text()
    return [int(pid) for pid in children.split()]


def committed() -> list[int]:
    return [each.step for each in holdfast.ls("runs/demo")] if Path("runs/demo/holdfast.json").exists() else []


def run_rank(folder: Path, environment: dict[str, str], num_steps: int) -> None:
    os.chdir(folder)
    os.environ |= environment
    sys.argv = [str(SCRIPT), "runs/demo", str(num_steps)]
    runpy.run_path(str(SCRIPT), run_name="__main__")


@contextmanager
def forked(num_ranks: int, *, num_steps: int) -> Iterator[list[nursery.Process]]:
    """Ranks of a job, which start in an instant. Those that still run at the end are killed."""
    store, ranks, folder = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False), [], Path.cwd()
    try:
        for rank in range(num_ranks):
            environment = environment_of(rank, num_ranks, store.port)
            ranks.append(nursery.start(run_rank, folder, environment, num_steps, err=folder / f"err-{rank}"))
        yield ranks
    finally:
        for process in ranks:
            process.kill()


@pytest.mark.slow
def test_it_goes_on_after_a_kill_of_all_ranks_on_another_number_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with forked(2, num_steps=100_000):
        until(lambda: bool(committed()), timeout_s=60)
    killed = holdfast.open("runs/demo").step
    with forked(3, num_steps=killed + 20) as ranks:
        assert [rank.wait() for rank in ranks] == [0] * 3, [rank.err for rank in ranks]
    check_end(killed)


@pytest.mark.slow
def test_it_goes_on_after_a_kill_on_another_number_of_ranks(train: Callable[..., subprocess.Popen[str]]) -> None:
    job = train(2, num_steps=100_000)
    until(lambda: bool(committed()), timeout_s=60)
    os.kill(ranks_of(job)[0], signal.SIGKILL)
    job.communicate(timeout=60)
    assert job.returncode != 0
    killed = holdfast.open("runs/demo").step

    job = train(3, num_steps=killed + 20)
    out, _ = job.communicate(timeout=120)
    assert job.returncode == 0, out
    check_end(killed)


def check_end(killed: int) -> None:
    """Check the end of a job that trained 20 steps more than one that was killed after the step `killed`."""
    view = holdfast.open("runs/demo")
    assert view.step == killed + 19
    # Each step has trained on its 24 samples, whatever the number of ranks.
    assert view.value("data/position") == 24 * (killed + 20)
    assert len(committed()) <= 3 + 2 + (killed + 20) // 100


@pytest.mark.slow
def test_sigterm_leaves_the_last_step(train: Callable[..., subprocess.Popen[str]]) -> None:
    job = train(2, num_steps=100_000)
    until(lambda: bool(committed()), timeout_s=60)
    before = committed()[0]
    time.sleep(0.5)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert holdfast.open("runs/demo").step > before


@pytest.mark.slow
def test_it_resumes_bit_for_bit_in_spite_of_dropout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "holdfast", "prove", "--nproc", "2", "--kills", "1", str(SCRIPT), "runs/demo", "8"]
    proof = subprocess.run(command, capture_output=True, text=True, check=False)
    assert proof.returncode == 0, proof.stdout + proof.stderr
