"""Retries of failed work: never beyond its time, after pauses that are random within their limits."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.store.retry_budget import RetryBudget, repeated

seconds = st.floats(0.001, 1e6)
draws = st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=50)


@given(total_s=seconds, first_s=seconds, longest_s=seconds, draws=draws, work_s=st.floats(0, 10))
def test_pauses_end_before_the_time_is_up_and_lie_within_their_limits(
    total_s: float, first_s: float, longest_s: float, draws: list[float], work_s: float
) -> None:
    budget = RetryBudget(total_s=total_s, first_s=first_s, longest_s=longest_s)
    used_s = 0.0
    for number, drawn in enumerate(draws):
        pause_s = budget.pause_s(number, left_s=total_s - used_s, draw=lambda drawn=drawn: drawn)  # type: ignore[misc]
        if pause_s is None:
            assert total_s - used_s <= first_s
            return
        limit_s = min(first_s * 2**number, longest_s)
        assert 0 <= pause_s <= limit_s
        assert pause_s >= drawn * min(limit_s, total_s - used_s) * (1 - 1e-9)
        used_s += pause_s
        assert used_s <= total_s
        used_s += work_s


@given(number=st.integers(0, 10**9))
def test_limits_grow_up_to_the_longest_pause(number: int) -> None:
    budget = RetryBudget(total_s=60, first_s=0.1, longest_s=5)
    assert budget.limit_s(number) <= budget.limit_s(number + 1) <= 5


class PassingError(Exception):
    pass


def is_passing(error: Exception) -> bool:
    return isinstance(error, PassingError)


def test_work_is_repeated_until_it_succeeds() -> None:
    tries = itertools.count(1)

    def work() -> int:
        if (number := next(tries)) < 4:
            raise PassingError
        return number

    budget = RetryBudget(total_s=60, first_s=0.001, longest_s=0.002)
    assert repeated(work, lambda: budget, is_passing=is_passing) == 4


def test_an_error_that_does_not_pass_ends_it_at_once() -> None:
    tries = itertools.count()

    def work() -> int:
        next(tries)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        repeated(work, lambda: RetryBudget(total_s=60), is_passing=is_passing)
    assert next(tries) == 1


@pytest.mark.parametrize(("total_s", "left_s"), [(0.3, 60.0), (60.0, 0.3)])
def test_it_ends_with_its_budget_or_with_the_time_of_its_caller(total_s: float, left_s: float) -> None:
    begun_s = time.monotonic()

    def work() -> int:
        raise PassingError

    with pytest.raises(PassingError):
        repeated(
            work,
            lambda: RetryBudget(total_s=total_s, first_s=0.01, longest_s=0.02),
            is_passing=is_passing,
            left_s=lambda: begun_s + left_s - time.monotonic(),
        )
    assert time.monotonic() - begun_s < 10
