"""Loops whose first call in a process group is not a restore: the ranks agree on saves there too."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from holdfast import Checkpointer, EveryTime, OnPreemption, save
from holdfast.errors import DeadlineError
from tests.checkpointer.test_policies import committed
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks

WORLD_SIZE = 2
#: Longer than an agreement takes, and far shorter than a rank waits for one that it does not get.
ENOUGH_S = 5.0
NUM_STEPS = 60


def new_process_group(folder: str) -> None:
    """Leave the process group for another one of the same ranks."""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}-store", -1), rank=rank, world_size=WORLD_SIZE)


def evaluate_first(own: Checkpointer, run: str) -> None:
    assert list(own.interruptible(range(3))) == [0, 1, 2]


def restore_in_another_group(own: Checkpointer, run: str) -> None:
    own.restore()
    new_process_group(run)


def train(run: str, begin: Callable[[Checkpointer, str], None]) -> float:
    """A loop that saves every 0.1 s; returns the seconds that it took."""
    start_new_job()
    start_s = time.monotonic()
    with Checkpointer(run, {"w": torch.zeros(5)}, memory=None, save=EveryTime(0.1)) as own:
        begin(own, run)
        for step in range(NUM_STEPS):
            time.sleep(0.02)
            own.step(step)
    return time.monotonic() - start_s


@pytest.mark.parametrize("begin", [evaluate_first, restore_in_another_group])
def test_a_rank_that_wants_a_save_does_not_ask_before_the_others_can_hear_it(
    run: str, begin: Callable[[Checkpointer, str], None]
) -> None:
    """Nothing was ever saved, and rank 0 waited 10 s at each step that it had proposed."""
    seconds = run_ranks(WORLD_SIZE, train, run, begin)
    assert committed(run)
    assert all(each < NUM_STEPS * 0.02 + ENOUGH_S for each in seconds)


def evaluate_in_a_new_group(run: str) -> tuple[int, float]:
    """An evaluation that a notice of rank 0 breaks off; returns the number of its parts, and its seconds."""
    start_new_job()
    told: list[str] = []
    policy = OnPreemption((), notice=lambda: told[0] if told else None, poll_s=0.01)
    with Checkpointer(run, {"w": torch.zeros(5)}, memory=None, save=policy, timeout_s=30.0) as own:
        own.restore()
        own.step(0)
        new_process_group(run)
        start_s, num_parts = time.monotonic(), 0
        for _ in own.interruptible(range(400)):
            num_parts += 1
            if num_parts == 10 and dist.get_rank() == 0:
                told.append("now")
            time.sleep(0.01)
        seconds = time.monotonic() - start_s
        own.step(1)
        assert own.preempted
    return num_parts, seconds


def test_a_notice_breaks_off_an_evaluation_in_a_new_process_group(run: str) -> None:
    """Rank 0 waited in the evaluation for ranks that did not hear it, and these in the next step for rank 0."""
    first, second = run_ranks(WORLD_SIZE, evaluate_in_a_new_group, run)
    assert first[0] == second[0] < 400
    assert max(first[1], second[1]) < ENOUGH_S
    assert committed(run) == [1]


def evaluate_after_a_call_that_one_rank_missed(run: str) -> float:
    """The other ranks have joined in that call; returns the seconds of the evaluation and the steps after it."""
    start_new_job()
    state = {"w": torch.zeros(5)}
    if dist.get_rank() != 2:
        with pytest.raises(DeadlineError):
            save(run, state, 0, timeout_s=1.0)
    dist.barrier()
    start_s = time.monotonic()
    with Checkpointer(run, state, memory=None, save=EveryTime(0.1), timeout_s=20.0) as own:
        assert list(own.interruptible(range(3))) == [0, 1, 2]
        for step in range(NUM_STEPS):
            time.sleep(0.02)
            own.step(step)
    return time.monotonic() - start_s


def test_ranks_that_joined_in_a_call_that_another_one_missed_do_not_leave_it_out_of_the_loop(run: str) -> None:
    """They went on alone, and rank 0 and the other one waited for them in each step until the deadline."""
    seconds = run_ranks(3, evaluate_after_a_call_that_one_rank_missed, run)
    assert committed(run)
    assert max(seconds) < NUM_STEPS * 0.02 + ENOUGH_S
