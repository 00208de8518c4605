"""SIGKILL at every named point of a save, and at random instants: the head is the old checkpoint or the new one.

Every point is a real operation of a real save of two ranks (see `crash_points`); what a save passes and what is listed
must be the same. The rank that dies kills itself for good (exit status -9); the other one runs untouched.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import holdfast
from holdfast import DeadlineError, NotFoundError
from tests.faults.crash_points import BUFFER_NBYTES, COORDINATOR, FIRST_COORDINATOR, NUM_WRITES, OTHER, Trace, traced
from tests.support.models import start_new_job
from tests.support.ranks import RankDiedError, RanksFailedError, run_ranks

TIMEOUT_S = 3.0
WORLD_SIZE = 2
#: Elements of the tensor: each rank's half fills its last buffer but for what values need.
NUMEL = WORLD_SIZE * (NUM_WRITES * BUFFER_NBYTES - BUFFER_NBYTES // 2) // 4


@dataclass(frozen=True)
class Case:
    """`rank` dies at `point` of a save into a run that has a checkpoint, or of the `first` save of a run."""

    rank: int
    point: str
    first: bool = False

    def __str__(self) -> str:
        role = "coordinator" if self.rank == 0 else "other"
        return f"{role}-{self.point.replace(' ', '-')}{'-first' if self.first else ''}"

    @property
    def step(self) -> int:
        """The step of the head afterwards, 0 for none. One instant decides: from the moment on in which the last data
        file has its name everything that was saved is there, and the survivor commits it."""
        points = COORDINATOR if self.rank == 0 else OTHER
        if self.point in points and points.index(self.point) >= points.index("data.linked"):
            return 2
        return 0 if self.first else 1


CASES = [
    *(Case(0, point) for point in COORDINATOR),
    *(Case(1, point) for point in OTHER),
    *(Case(0, point, first=True) for point in FIRST_COORDINATOR if point not in COORDINATOR),
]
#: Killed at in every run of the tests; the others belong to the sweep.
SAMPLE = {
    Case(0, "epoch.linked"),
    Case(0, "seal.durable"),
    Case(0, "commit.linked"),
    Case(1, "data.write-1"),
    Case(1, "after write"),
}


def state(step: int | None, *, sharded: bool, numel: int = NUMEL) -> dict[str, object]:
    """The state at that step, or a blank one to load into; sharded over the ranks, or whole."""
    tensor = torch.zeros(numel, dtype=torch.int32)
    if step is not None:
        tensor = torch.arange(numel, dtype=torch.int32) * 40503 + step * 65537
    if sharded:
        size, rank = numel // WORLD_SIZE, dist.get_rank()
        local = tensor[size * rank : size * (rank + 1)].clone()
        tensor = DTensor.from_local(local, init_device_mesh("cpu", (WORLD_SIZE,)), [Shard(0)], run_check=False)
    return {"weight": tensor, "progress": {"step": step or 0, "note": "x" * ((step or 0) % 7)}}


def check_head(run: Path, *, numel: int = NUMEL) -> int:
    """The step of the head, 0 for none. One plain process loads all of it, bit for bit what that step's state was."""
    into = state(None, sharded=False, numel=numel)
    try:
        step = holdfast.load(run, into=into, continues=True).step
    except NotFoundError as error:
        assert error.code in ("not_found.run", "not_found.head")  # noqa: PT017 - another error is raised as it is
        return 0
    expected = state(step, sharded=False, numel=numel)
    weight, truth = into["weight"], expected["weight"]
    assert isinstance(weight, torch.Tensor)
    assert isinstance(truth, torch.Tensor)
    assert torch.equal(weight, truth)
    assert into["progress"] == expected["progress"]
    return step


def save_first(run: str) -> None:
    start_new_job()
    holdfast.save(run, state(1, sharded=True), 1, timeout_s=30)


def resume_and_save(run: str, case: Case | None) -> list[str]:
    """Go on from the head, if there is one, and save step 2. The rank of `case` dies in that; the points passed."""
    start_new_job()
    if Path(run).exists():
        assert holdfast.load(run, into=state(None, sharded=True), timeout_s=30, continues=True).step == 1
    trace = Trace(case.point if case is not None and case.rank == dist.get_rank() else None)
    with traced(trace):
        holdfast.save(run, state(2, sharded=True), 2, timeout_s=30 if case is None else TIMEOUT_S)
    return trace.passed


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of step 1."""
    run = tmp_path_factory.mktemp("crash-points") / "run"
    run_ranks(WORLD_SIZE, save_first, str(run))
    return run


def test_a_save_passes_exactly_the_listed_points(tmp_path: Path, saved_run: Path) -> None:
    shutil.copytree(saved_run, tmp_path / "run")
    assert run_ranks(WORLD_SIZE, resume_and_save, str(tmp_path / "run"), None) == [COORDINATOR, OTHER]
    assert run_ranks(WORLD_SIZE, resume_and_save, str(tmp_path / "new"), None) == [FIRST_COORDINATOR, OTHER]
    assert check_head(tmp_path / "run") == check_head(tmp_path / "new") == 2


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in SAMPLE else pytest.mark.slow, id=str(case)) for case in CASES]
)
@pytest.mark.few(2)
def test_after_a_death_at_a_point_the_head_is_the_old_or_the_new_checkpoint(
    tmp_path: Path, saved_run: Path, case: Case
) -> None:
    run = tmp_path / "run"
    if not case.first:
        shutil.copytree(saved_run, run)
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(WORLD_SIZE, resume_and_save, str(run), case)
    dead = failed.value.by_rank.pop(case.rank)
    assert isinstance(dead, RankDiedError)
    assert "killed by SIGKILL" in str(dead)  # exit status -9
    step = check_head(run)
    assert step == case.step
    assert len(failed.value.by_rank) == (case.point != "after commit")  # then the survivor has been told already
    for error in failed.value.by_rank.values():
        assert isinstance(error, DeadlineError)
        assert error.absent == (case.rank,)
        assert f"rank {case.rank}" in error.message
        assert ("committed all the same" in str(error)) == (step == 2)
    if step == 2:
        assert len(list(Path(holdfast.open(run).path).glob("*.safetensors"))) == WORLD_SIZE
    start_new_job()
    if step:
        holdfast.load(run, into=state(None, sharded=False), continues=True)
    holdfast.save(run, state(step + 1, sharded=False), step + 1)
    assert check_head(run) == step + 1


def test_every_point_has_a_case_for_each_role_that_passes_it() -> None:
    assert {case.point for case in CASES if case.rank == 0} == set(COORDINATOR) | set(FIRST_COORDINATOR)
    assert {case.point for case in CASES if case.rank == 1} == set(OTHER)
    assert set(CASES) > SAMPLE


# Random instants.

NUM_KILLS = 300
KILLS_PER_RUN = 25
LONGEST_DELAY_S = 1.0
SMALL_NUMEL = 2**16


def keep_saving(rank: int, port: int, run: str, told: Connection) -> None:
    """Go on from the head and save step after step; tell when that begins, and each step that was saved."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=30))
    into = state(None, sharded=True, numel=SMALL_NUMEL)
    assert callable(holdfast.save)  # imported from here on
    assert callable(holdfast.load)
    told.send(0)
    step = 0
    with suppress(NotFoundError):  # nothing was committed yet
        step = holdfast.load(run, into=into, timeout_s=30, continues=True).step
    while True:
        step += 1
        holdfast.save(run, state(step, sharded=True, numel=SMALL_NUMEL), step, timeout_s=30)
        told.send(step)


@contextmanager
def saving_job(run: Path) -> Iterator[tuple[list[multiprocessing.process.BaseProcess], list[Connection]]]:
    """The processes of a job that saves until it is killed, and what they tell."""
    context = multiprocessing.get_context("forkserver")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes: list[multiprocessing.process.BaseProcess] = []
    heard = []
    try:
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe(duplex=False)
            started = context.Process(target=keep_saving, args=(rank, store.port, str(run), theirs), daemon=True)
            started.start()
            theirs.close()
            processes.append(started)
            heard.append(ours)
        yield processes, heard
    finally:
        for process in processes:
            process.kill()
            process.join()
        for connection in heard:
            connection.close()


def acknowledged(connection: Connection) -> int:
    """The last step that a dead rank said was saved; 0 for none."""
    last = 0
    try:
        while True:
            last = connection.recv()
    except EOFError:
        return last


def kill_at_random(run: Path, dice: random.Random) -> int:
    """Start a job and kill each of its ranks at an instant of its own; the last step that any of them had saved."""
    with saving_job(run) as (processes, heard):
        assert [connection.recv() for connection in heard] == [0] * WORLD_SIZE
        instant = dice.uniform(0, LONGEST_DELAY_S)
        instants = sorted((instant + dice.uniform(0, 0.05), process.pid) for process in processes)
        start = time.monotonic()
        for delay, pid in instants:
            time.sleep(max(0.0, start + delay - time.monotonic()))
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.join()
        assert [process.exitcode for process in processes] == [-signal.SIGKILL] * WORLD_SIZE
        return max(map(acknowledged, heard))


def revision() -> str:
    """The commit that is tested."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_after_deaths_at_random_instants_no_step_that_was_saved_is_lost(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = int(os.environ.get("HOLDFAST_SWEEP_SEED") or secrets.randbelow(2**32))
    dice = random.Random(seed)
    num_saved = 0
    for number in range(NUM_KILLS // KILLS_PER_RUN):
        run, head = tmp_path / f"run-{number}", 0
        for kill in range(KILLS_PER_RUN):
            known = max(head, kill_at_random(run, dice))
            head = check_head(run, numel=SMALL_NUMEL)
            assert head in (known, known + 1), f"seed {seed}, run {number}, kill {kill}"
        num_saved += head
        assert head > 0, f"seed {seed}: nothing was ever saved"
        shutil.rmtree(run)
    with capsys.disabled():
        sys.stdout.write(f"\nrandom kills: seed={seed} kills={NUM_KILLS} saves={num_saved} revision={revision()}\n")
    assert num_saved > NUM_KILLS // 4
