"""A latch: an event that happens once, and that other threads wait for.

An exception may come between any two steps of Python code: Ctrl-C raises KeyboardInterrupt in the main thread, at
whatever step it is. `threading.Event` and `threading.Condition` take and release a lock in steps of Python. An
exception between two of these steps leaves the lock taken, and every thread that sets or waits later hangs. A latch has
no such lock: each of its steps is one call into C. An exception that skips a step only delays waiting threads by
`_LOOK_S`.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

#: Longest time between two looks of a waiting thread at the latch.
_LOOK_S: Final = 0.02


class Latch:
    """A latch: open at first, and closed for good by `set`. Safe for threads, and for exceptions at any point."""

    def __init__(self) -> None:
        self._is_set = False
        self._bell: SimpleQueue[None] = SimpleQueue()

    @property
    def is_set(self) -> bool:
        """Whether the event has happened."""
        return self._is_set

    def set(self) -> None:
        """Note that the event has happened, and wake all waiting threads. May be called more than once."""
        self._is_set = True
        self._bell.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until the event has happened, at most `timeout_s` seconds. Returns whether it has happened."""
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_set and (left_s := end_s - time.monotonic()) > 0:
            with suppress(Empty):
                self._bell.get(timeout=min(left_s, _LOOK_S))
                self._bell.put(None)  # for the next thread that waits
        return self._is_set
