"""The time limit of an operation, and how its parts share it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from holdfast.options import check_timeout

#: Stores take 0 as "no limit".
_LEAST_S: Final = 0.001

Clock = Callable[[], float]


class Deadline:
    """A point in time, `timeout_s` from now, by a monotonic clock."""

    def __init__(self, timeout_s: float, *, clock: Clock = time.monotonic) -> None:
        check_timeout(timeout_s)
        self.timeout_s = timeout_s
        self._clock = clock
        self._end_s = clock() + timeout_s
        self._grace_s = min(max(0.1 * timeout_s, 1.0), 30.0)

    @property
    def for_storage_s(self) -> float:
        """Seconds that a store may take from now on. They end after nine tenths of the timeout, whenever somebody asks,
        so that a rank whose store hangs has time to tell the others. A store that is opened later than that gets the
        last tenth."""
        left_s = self._end_s - self._clock() - 0.1 * self.timeout_s
        return max(left_s, 0.1 * self.timeout_s)

    def remaining_s(self, *, graces: int = 0) -> float:
        """Seconds that are left, at least 1 ms.

        Each grace adds a tenth of the timeout, at least 1 s and at most 30 s. A rank that waits for a rank that itself
        waits for others takes one grace more, so that the rank nearest to the absent ones fails first and names them.
        """
        left_s = self._end_s + graces * self._grace_s - self._clock()
        return max(_LEAST_S, left_s)
