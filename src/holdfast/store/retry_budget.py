"""Budgets for repeats of failed work: a stated time, and pauses with jitter. Pure, but for `repeated`, which waits.

Whoever tries something again takes its pauses from here: the requests to an object store, the files of a save, and the
keeper.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec

T = TypeVar("T")

Draw = Callable[[], float]

#: A pause stops growing long before this number of doublings.
_MAX_DOUBLINGS: Final = 60


class RetryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """For how long failed work is tried again, in total, and the limits of the pauses between the tries: the first
    pause is ``first_s`` at most, and the limit doubles with each, up to ``longest_s``.

    A pause is a random part of its limit, between nothing and all of it ("full jitter"): thousands of ranks that fail
    at one moment come back one by one.
    """

    total_s: float
    first_s: float = 0.1
    longest_s: float = 5.0

    def limit_s(self, number: int) -> float:
        """The limit of the pause after failure `number`, from 0."""
        return min(self.first_s * 2.0 ** min(number, _MAX_DOUBLINGS), self.longest_s)

    def pause_s(self, number: int, *, left_s: float = math.inf, draw: Draw = random.random) -> float | None:
        """The pause after failure `number`, if ``left_s`` are left for further tries; None if there is no time for one.
        A pause always ends before the time is up. `draw` gives numbers from 0 to 1, without 1."""
        if left_s <= self.first_s:
            return None
        return draw() * min(self.limit_s(number), left_s)


def repeated(
    work: Callable[[], T],
    budget: Callable[[], RetryBudget],
    *,
    is_passing: Callable[[Exception], bool],
    left_s: Callable[[], float] = lambda: math.inf,
) -> T:
    """The result of `work`, which is tried again after each error that `is_passing`, as long as the present `budget`
    and the caller's own time (``left_s``) allow. Raises the last error, and at once each other one."""
    begun_s, number = time.monotonic(), 0
    while True:
        try:
            return work()
        except Exception as error:
            if not is_passing(error):
                raise
            allowed, used_s = budget(), time.monotonic() - begun_s
            pause_s = allowed.pause_s(number, left_s=min(allowed.total_s - used_s, left_s()))
            if pause_s is None:
                raise
        time.sleep(pause_s)
        number += 1
