"""SIGKILL in the middle of a save: the head stays loadable, the new checkpoint is committed or invisible, and committed
whenever all its data is durable.

The victim kills itself, for real, at a point inside the library; the others run untouched.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import holdfast
from holdfast import DeadlineError, StorageError
from holdfast.state.local_memory import MemorySource
from holdfast.store import posix
from holdfast.store.posix import PosixStore, PosixWriter
from tests.support.models import Cell, Kind, build, differing, filled, start_new_job, tensors
from tests.support.ranks import RankDiedError, RanksFailedError, run_processes, run_ranks

TIMEOUT_S = 3.0


@dataclass(frozen=True)
class Point:
    """The death of `rank`: before or after the first call of a method (whose key begins, or ends, as given)."""

    rank: int
    when: str
    kind: type
    method: str
    key: str = ""
    committed: bool = False

    def __str__(self) -> str:
        return f"rank{self.rank}-{self.when}-{self.key.strip('/') or self.method}"


POINTS = [
    Point(1, "before", MemorySource, "read_into"),
    Point(1, "before", PosixWriter, "write_at"),
    Point(1, "before", PosixWriter, "publish"),
    Point(1, "after", PosixWriter, "publish", committed=True),
    Point(0, "after", PosixStore, "create", "epochs/"),
    Point(0, "before", PosixStore, "create", "manifest"),
    Point(0, "after", PosixStore, "create", "manifest"),
    Point(0, "before", PosixStore, "create", "seal.json", committed=True),
    Point(0, "after", PosixStore, "create", "seal.json", committed=True),
    Point(0, "after", PosixStore, "create", "history/", committed=True),
]
#: Points that differ little from another one.
RARE = [POINTS[1], POINTS[2], POINTS[4], POINTS[5], POINTS[7]]
SUCCESSORS = [Cell("fsdp", 3), Cell("plain", 1), Cell("ddp", 2)]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: Point) -> None:
    """Have this process die at `point`."""
    method: Callable[..., object] = getattr(point.kind, point.method)

    def deadly(*args: Any, **kwargs: Any) -> object:
        hit = not point.key or point.key in str(args[1])
        if hit and point.when == "before":
            die()
        result = method(*args, **kwargs)
        if hit:
            die()
        return result

    setattr(point.kind, point.method, deadly)


def save(kind: Kind, run: str, seed: int) -> None:
    start_new_job()
    holdfast.save(run, filled(kind, seed).state, seed, timeout_s=30)


def resume_and_die(run: str, point: Point) -> None:
    """Load step 1, go on to step 2, and die in the save of it."""
    start_new_job()
    job = build("fsdp", num_steps=0)
    holdfast.load(run, into=job.state, timeout_s=30, continues=True)
    assert differing(job, 1) == []
    job = filled("fsdp", 2)
    if dist.get_rank() != point.rank:
        holdfast.save(run, job.state, 2, timeout_s=TIMEOUT_S)
    arm(point)
    try:
        holdfast.save(run, job.state, 2, timeout_s=TIMEOUT_S)
    finally:
        os._exit(7)  # the point was not reached; what was armed must not stay in a warm process


def resume_and_save(kind: Kind, run: str, seed: int) -> tuple[list[str], int, int]:
    """Load the head as a new job and save the next step: what differed, the step loaded, the epoch saved in."""
    start_new_job()
    job = build(kind, num_steps=1)
    step = holdfast.load(run, into=job.state, timeout_s=30).step
    report = holdfast.save(run, job.state, step + 1, timeout_s=30)
    return differing(job, seed), step, int(report.place.partition(".")[0])


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one checkpoint, of two ranks, at step 1."""
    run = tmp_path_factory.mktemp("kill") / "run"
    run_ranks(2, save, "fsdp", str(run), 1)
    return run


@pytest.mark.parametrize(
    ("point", "successor"),
    [
        pytest.param(point, successor, marks=pytest.mark.slow if point in RARE else (), id=f"{point}-then-{successor}")
        for point, successor in zip(POINTS, itertools.cycle(SUCCESSORS), strict=False)
    ],
)
@pytest.mark.few(2)
def test_a_rank_killed_in_a_save_leaves_a_head_that_a_new_job_goes_on_from(
    tmp_path: Path, saved_run: Path, point: Point, successor: Cell
) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved_run, run)
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(2, resume_and_die, str(run), point)
    survivor = 1 - point.rank
    dead, alive = failed.value.by_rank[point.rank], failed.value.by_rank[survivor]
    assert isinstance(dead, RankDiedError)
    assert "killed by SIGKILL" in str(dead)
    assert isinstance(alive, DeadlineError)
    assert alive.absent == (point.rank,)
    assert f"rank {point.rank}" in alive.message
    # The ranks that are left commit a step that is durable in full; nothing else becomes visible.
    assert ("Step 2 was committed all the same" in alive.message) == point.committed
    seed = 2 if point.committed else 1
    check_head(run, seed)
    for differing_names, step, epoch in run_ranks(
        successor.world_size, resume_and_save, successor.kind, str(run), seed
    ):
        assert (differing_names, step) == ([], seed)
        assert epoch > 1
    check_head(run, seed, step=seed + 1)


def check_head(run: Path, seed: int, *, step: int | None = None) -> None:
    """The head is of that step, loads in full into one process, and holds what `seed` says."""
    job = build("plain", num_steps=0)
    assert holdfast.load(run, into=job.state).step == (seed if step is None else step)
    assert differing(job, seed) == []


def be_rank(index: int, run: str, port_file: str, point: Point) -> str:
    """One of two ranks whose store lives in the process of rank 0, as it usually does."""
    start_new_job()
    path = Path(port_file)
    if index == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path.with_suffix(".new").write_text(str(store.port))
        path.with_suffix(".new").rename(path)
    else:
        while not path.exists():
            time.sleep(0.01)
        store = dist.TCPStore("127.0.0.1", int(path.read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=index, world_size=2, timeout=timedelta(seconds=30))
    job = filled("fsdp", 2)
    if index == 0:
        arm(point)
    start = time.monotonic()
    with pytest.raises(StorageError) as raised:
        holdfast.save(run, job.state, 2, takeover=True, timeout_s=20)
    assert time.monotonic() - start < 15
    return raised.value.code


def test_the_death_of_the_rank_with_the_store_is_told_at_once(tmp_path: Path, saved_run: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved_run, run)
    point = Point(0, "after", PosixStore, "create", "manifest")
    with pytest.raises(RanksFailedError) as failed:
        run_processes(2, be_rank, str(run), str(tmp_path / "port"), point)
    assert isinstance(failed.value.by_rank[0], RankDiedError)
    assert failed.value.results == {1: "storage.control"}
    check_head(run, 1)


class CountedCalls:
    """The `os` module, where the call with number `deadly` of those that touch files is one too many."""

    NAMES = frozenset({"close", "fsync", "ftruncate", "link", "listdir", "mkdir", "open", "pwrite", "stat", "unlink"})

    def __init__(self, deadly: int | None) -> None:
        self.deadly = deadly
        self.count = 0
        self._numbers = itertools.count()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.NAMES:
            return real

        def counted(*args: Any, **kwargs: Any) -> object:
            number = next(self._numbers)
            self.count = number + 1
            if number == self.deadly:
                die()
            return real(*args, **kwargs)

        return counted


def save_counting_calls(index: int, run: str, deadly: int | None) -> int:
    """Resume and save step 2 in one process; die at file-system call number `deadly`. Returns how many there are."""
    start_new_job()
    holdfast.load(run, into=build("plain", num_steps=0).state, continues=True)
    job = filled("plain", 2)
    calls = CountedCalls(deadly)
    posix.__dict__["os"] = calls
    try:
        holdfast.save(run, job.state, 2)
    finally:
        posix.__dict__["os"] = os
    return calls.count


def kill_at_call(saved_run: Path, run: Path, deadly: int) -> int:
    """The step of the head after a death at that call. In any case it loads, and a new job goes on from it."""
    shutil.copytree(saved_run, run)
    with pytest.raises(RanksFailedError, match="killed by SIGKILL"):
        run_processes(1, save_counting_calls, str(run), deadly)
    step = holdfast.open(run).step
    check_head(run, step)
    start_new_job()
    assert resume_and_save("plain", str(run), step)[:2] == ([], step)
    check_head(run, step, step=step + 1)
    return step


def sweep(saved_run: Path, folder: Path, deaths: Callable[[int], range]) -> list[int]:
    """The steps of the heads after deaths at those of all the calls of a save."""
    shutil.copytree(saved_run, folder / "whole")
    (total,) = run_processes(1, save_counting_calls, str(folder / "whole"), None)
    assert total > 30
    return [kill_at_call(saved_run, folder / f"run-{deadly}", deadly) for deadly in deaths(total)]


def test_a_process_killed_at_some_calls_of_a_save_leaves_a_sound_run(tmp_path: Path, saved_run: Path) -> None:
    steps = sweep(saved_run, tmp_path, lambda total: range(total - 1, 0, -(total // 4))[::-1])
    assert steps == sorted(steps)  # invisible up to the commit, and committed from there on
    assert set(steps) == {1, 2}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_process_killed_at_any_call_of_a_save_leaves_a_sound_run(tmp_path: Path, saved_run: Path) -> None:
    steps = sweep(saved_run, tmp_path, range)
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def test_what_a_killed_save_left_behind_is_neither_named_nor_in_the_way(tmp_path: Path, saved_run: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(saved_run, run)
    with pytest.raises(RanksFailedError):
        run_ranks(2, resume_and_die, str(run), Point(1, "before", PosixWriter, "publish"))
    leftovers = sorted(path.name for path in run.glob("checkpoints/*") if not (path / "seal.json").exists())
    assert len(leftovers) == 1
    view = holdfast.open(run)
    assert view.names() == sorted(name for name, _, _ in tensors(build("plain")))
    with pytest.raises(holdfast.NotFoundError, match=r"Choose one of its steps: 1\b"):
        holdfast.open(f"{run}@step=2")
