"""The harness that runs functions as ranks: what every other multi-process test relies on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from holdfast.errors import NotFoundError
from tests.support.rank_worker import RankError
from tests.support.ranks import MAX_WORKERS, RankDiedError, RankHungError, RanksFailedError, run_processes, run_ranks


def rank_and_world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def sum_over_ranks(scale: float) -> torch.Tensor:
    total = torch.full((3,), scale * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return total


def raise_on(ranks: list[int], error: Exception) -> int:
    if dist.get_rank() in ranks:
        raise error
    return dist.get_rank()


def raise_on_one_while_others_wait(failing: int) -> None:
    if dist.get_rank() == failing:
        raise ValueError("gave up")
    dist.barrier()


def raise_what_cannot_be_pickled() -> None:
    class LocalError(Exception):
        pass

    raise LocalError("only known here")


def return_what_cannot_be_pickled() -> object:
    return lambda: None


def stop_by_system_exit() -> None:
    raise SystemExit(3)


def kill_one_while_others_wait(victim: int) -> None:
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def kill_one(victim: int) -> int:
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return dist.get_rank()


def exit_with(index: int, status: int) -> None:
    os._exit(status + index)


def hang_on(ranks: list[int]) -> int:
    while dist.get_rank() in ranks:
        time.sleep(0.1)
    return dist.get_rank()


def process_id() -> int:
    return os.getpid()


def change_surroundings() -> None:
    os.environ["HOLDFAST_LEAKED"] = "1"
    os.chdir("/")
    dist.distributed_c10d._get_default_store().set("leaked", "1")
    torch.rand(1)
    random.random()


def describe_surroundings() -> tuple[bool, Path, bool, float, float]:
    store_has_it = dist.distributed_c10d._get_default_store().check(["leaked"])
    return "HOLDFAST_LEAKED" in os.environ, Path.cwd(), store_has_it, torch.rand(1).item(), random.random()


def finish_at_different_times() -> torch.Tensor:
    # Rank 0 leaves long before the others stop talking to each other.
    others = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return torch.zeros(1)
    total = torch.ones(1)
    for _ in range(5):
        time.sleep(0.02)
        dist.all_reduce(total, group=others)
    return total


def index_and_group(index: int, word: str) -> tuple[int, str, bool, int]:
    return index, word, dist.is_initialized(), torch.get_num_threads()


def warn(index: int) -> int:
    warnings.warn("old habit", DeprecationWarning, stacklevel=1)
    return index


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_rank_runs_the_function_in_a_group_of_that_size(world_size: int) -> None:
    assert run_ranks(world_size, rank_and_world) == [(rank, world_size) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_collectives_work_and_tensors_come_back(world_size: int) -> None:
    expected = torch.full((3,), 0.5 * world_size * (world_size + 1) / 2)
    for total in run_ranks(world_size, sum_over_ranks, 0.5):
        assert torch.equal(total, expected)


def test_processes_run_without_a_group_and_know_their_index() -> None:
    assert run_processes(3, index_and_group, "word") == [(index, "word", False, 1) for index in range(3)]


def test_processes_stay_warm_between_calls() -> None:
    assert run_ranks(2, process_id) == run_ranks(2, process_id)


def test_state_does_not_leak_from_one_call_into_the_next() -> None:
    before = run_ranks(2, describe_surroundings)
    run_ranks(2, change_surroundings)
    assert run_ranks(2, describe_surroundings) == before


def test_a_rank_that_is_done_keeps_its_group_for_the_others() -> None:
    totals = run_ranks(4, finish_at_different_times)
    assert [total.item() for total in totals] == [0, 3**5, 3**5, 3**5]


def test_an_exception_comes_back_with_its_rank_and_traceback() -> None:
    error = NotFoundError("No such run.", code="not-found", action="Check the path.", step=7)
    with pytest.raises(RanksFailedError, match=r"1 of 2 ranks failed: rank 1: NotFoundError: .*No such run") as failed:
        run_ranks(2, raise_on, [1], error)
    (raised,) = failed.value.exceptions
    assert isinstance(raised, NotFoundError)
    assert raised.step == 7
    assert raised.__notes__[0].startswith("rank 1:")
    assert "in raise_on\n    raise error" in raised.__notes__[0]
    assert failed.value.results == {0: 0}


def test_the_failures_of_all_ranks_are_shown() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(4, raise_on, [0, 3], ValueError("boom"))
    assert sorted(failed.value.by_rank) == [0, 3]
    assert {type(error) for error in failed.value.exceptions} == {ValueError}
    assert failed.value.results == {1: 1, 2: 2}


def test_a_failure_ends_the_wait_of_the_other_ranks_and_comes_first() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(4, raise_on_one_while_others_wait, 2)
    assert next(iter(failed.value.by_rank)) == 2
    assert ended_by_themselves(failed.value, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raise_what_cannot_be_pickled, "LocalError: only known here"),
        (stop_by_system_exit, "SystemExit: 3"),
    ],
)
def test_what_cannot_travel_as_an_exception_is_described(function: Callable[[], None], said: str) -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(1, function)
    (raised,) = failed.value.exceptions
    assert isinstance(raised, RankError)
    assert said in str(raised)


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank() -> None:
    with pytest.raises(RanksFailedError, match="rank 0"):
        run_ranks(1, return_what_cannot_be_pickled)
    assert run_ranks(1, rank_and_world) == [(0, 1)]


def test_a_killed_rank_is_reported_and_replaced() -> None:
    before = run_ranks(4, process_id)
    with pytest.raises(RanksFailedError, match="rank 3: RankDiedError: killed by SIGKILL") as failed:
        run_ranks(4, kill_one, 3)
    assert isinstance(failed.value.by_rank[3], RankDiedError)
    assert failed.value.results == {0: 0, 1: 1, 2: 2}
    after = run_ranks(4, process_id)
    assert [new == old for new, old in zip(after, before, strict=True)] == [True, True, True, False]


def test_the_death_of_a_rank_ends_the_wait_of_the_others() -> None:
    with pytest.raises(RanksFailedError) as failed:
        run_ranks(4, kill_one_while_others_wait, 0)
    assert isinstance(failed.value.by_rank[0], RankDiedError)
    assert ended_by_themselves(failed.value, [0, 1, 2, 3])
    assert len(run_ranks(4, sum_over_ranks, 1.0)) == 4


def test_an_exit_is_reported_with_its_status() -> None:
    with pytest.raises(RanksFailedError, match="exited with status 41"):
        run_processes(2, exit_with, 40)
    assert [index for index, *_ in run_processes(2, index_and_group, "")] == [0, 1]


def test_a_process_that_died_between_calls_is_replaced() -> None:
    (victim, survivor) = run_ranks(2, process_id)
    os.kill(victim, signal.SIGKILL)
    await_end(victim)
    after = run_ranks(2, process_id)
    assert after[0] != victim
    assert after[1] == survivor


def test_a_hang_ends_at_the_timeout_and_shows_the_stacks() -> None:
    before = run_ranks(2, process_id)
    started = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1: RankHungError") as failed:
        run_ranks(2, hang_on, [1], timeout_s=2)
    assert 2 <= time.monotonic() - started < 30
    assert isinstance(failed.value.by_rank[1], RankHungError)
    assert "in hang_on" in str(failed.value.by_rank[1])
    assert failed.value.results == {0: 0}
    after = run_ranks(2, process_id)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_the_warning_filters_of_the_test_hold_on_the_ranks() -> None:
    with pytest.raises(RanksFailedError, match="DeprecationWarning: old habit"):
        run_processes(1, warn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_processes(1, warn) == [0]


@pytest.mark.parametrize("world_size", [0, MAX_WORKERS + 1])
def test_a_world_that_the_pool_cannot_hold_is_refused(world_size: int) -> None:
    with pytest.raises(ValueError, match=f"{world_size} processes asked for"):
        run_ranks(world_size, rank_and_world)


@pytest.mark.parametrize(
    "ending",
    ["os.kill(os.getpid(), signal.SIGKILL)", pytest.param("raise SystemExit", marks=pytest.mark.slow)],
)
def test_no_process_outlives_the_caller(ending: str, tmp_path: Path) -> None:
    script = tmp_path / "caller.py"
    script.write_text(
        textwrap.dedent(f"""
        import os, signal
        from tests.support.ranks import run_ranks
        from tests.jobs.test_harness import process_id

        if __name__ == "__main__":
            print(*run_ranks(2, process_id), flush=True)
            {ending}
        """)
    )
    caller = subprocess.run(
        [sys.executable, str(script)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        check=False,
    )
    orphans = [int(pid) for pid in caller.stdout.split()]
    assert len(orphans) == 2
    for pid in orphans:
        await_end(pid)


def ended_by_themselves(failed: RanksFailedError, ranks: list[int]) -> bool:
    hung = [rank for rank, error in failed.by_rank.items() if isinstance(error, RankHungError)]
    return sorted(failed.by_rank) == ranks and not hung


def await_end(pid: int) -> None:
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still running"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
