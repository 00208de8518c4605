"""A latch: something that happens once, and that other threads wait for.

An exception may come between any two steps of Python code: Ctrl-C raises KeyboardInterrupt in the main thread, wherever
that is. `threading.Event` and `threading.Condition` take and release a lock in steps of Python; an exception between
two of them leaves the lock taken, and every thread that sets or waits later hangs. A latch has no such lock: each of
its steps is one call into C, and a step that is left out only delays others by `_LOOK_S`.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final

#: How long a thread waits at most before it looks again.
_LOOK_S: Final = 0.02


class Latch:
    """Open at first; `set` closes it for good. Safe for several threads, and for exceptions at any point."""

    def __init__(self) -> None:
        self._is_set = False
        self._bell: SimpleQueue[None] = SimpleQueue()

    @property
    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._is_set

    def set(self) -> None:
        """Note that it has happened, and wake all that wait. May be called again."""
        self._is_set = True
        self._bell.put(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when it has happened, and after `timeout_s` even if it has not. Whether it has."""
        end_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not self._is_set and (left_s := end_s - time.monotonic()) > 0:
            with suppress(Empty):
                self._bell.get(timeout=min(left_s, _LOOK_S))
                self._bell.put(None)  # for the next thread that waits
        return self._is_set
