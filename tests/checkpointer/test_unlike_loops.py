"""Ranks whose loops would save after different steps hear of it at once, and do not wait for each other."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist

from holdfast import Auto, Checkpointer, ConfigurationError, DeadlineError, EverySteps, EveryTime, OnRequest, SavePolicy
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


def train(run: str, policies: Sequence[SavePolicy], totals: Sequence[int], how: str) -> str:
    """Train on two ranks, each with its own policy and total, and return the code of the error, with its message."""
    start_new_job()
    rank = dist.get_rank()
    takeover, timeout_s = how == "takeover and step", 3 if how == "restore and step" else 60
    state = {"w": torch.zeros(10)}
    own = Checkpointer(run, state, memory=None, save=policies[rank], takeover=takeover, timeout_s=timeout_s)
    if "restore" in how:
        own.restore()
    try:
        for step in own.steps(totals[rank]) if "steps" in how else range(totals[rank]):
            own.step(step)
    except ConfigurationError as error:
        return f"{error.code}: {error.message}"
    except DeadlineError as error:
        return f"{error.code}: {error.action}"
    finally:
        own.__exit__(RuntimeError, RuntimeError(), None)
    return ""


@pytest.mark.parametrize("how", ["steps", "restore and steps", "step", "takeover and step"])
def test_ranks_with_other_intervals_are_told_and_do_not_wait_for_each_other(run: str, how: str) -> None:
    """They waited for `timeout_s`, and were told to make a call that they had made."""
    first, second = run_ranks(2, train, run, (EverySteps(3), EverySteps(4) | OnRequest()), (9, 9), how)
    assert first == second
    assert first.startswith("config.unlike_loops: ")
    assert "rank 0 has EverySteps(3)" in first
    assert "rank 1 has EverySteps(4)" in first


@pytest.mark.parametrize("how", ["steps", "restore and steps"])
def test_ranks_with_other_totals_are_told(run: str, how: str) -> None:
    first, second = run_ranks(2, train, run, (EverySteps(100), EverySteps(100)), (8, 9), how)
    assert first == second
    assert "steps(8), and rank 1 has EverySteps(100) and steps(9)" in first


def test_numbers_beyond_every_step_mean_never(run: str) -> None:
    """They ended in `[unexpected]`: a message between ranks has no room for them."""
    with Checkpointer(run, {"w": torch.zeros(10)}, memory=None, save=EverySteps(10**30)) as own:
        for step in own.steps(10**40):
            assert own.step(step) is None
            if step == 3:
                break


def test_what_one_rank_decides_for_all_may_differ(run: str) -> None:
    policies = EverySteps(4) | EverySteps(6) | EveryTime(60), EverySteps(6) | EverySteps(4) | Auto()
    assert run_ranks(2, train, run, policies, (9, 9), "steps") == ["", ""]


@pytest.mark.slow
def test_a_timeout_of_a_save_that_a_policy_asked_for_names_the_suspicion(run: str) -> None:
    told = run_ranks(2, train, run, (EverySteps(3), EverySteps(100)), (5, 5), "restore and step")
    assert told[0].startswith("timeout.ranks: ")
    assert "all ranks need the same policy" in told[0]
