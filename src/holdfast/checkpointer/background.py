"""The part of a save that goes on when training does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Final

#: How long a busy thread keeps the interpreter from the one that copies, which needs it again after every call of torch
#: and of the system: beside a loop of Python, Python's own 5 ms make a minute of a second.
_TURN_S: Final = 1e-4


class Background:
    """Does `work` in a thread of its own, which keeps no process alive.

    `work` calls `settle` when all ranks have agreed on a plan and a place and this one has a slot: until then the next
    save has to wait. What it raises is `error`, and settles it too.
    """

    def __init__(self, work: Callable[[Background], None]) -> None:
        self.error: Exception | None = None
        self._work = work
        self._begun = Event()
        self._settled = Event()
        self._thread = Thread(target=self._run, name="holdfast-stage", daemon=True)
        self._thread.start()
        # Only now: a thread that begins to work takes the interpreter from whoever waits for it to have started.
        self._begun.set()

    @property
    def is_settled(self) -> bool:
        """Whether the next save may come."""
        return self._settled.is_set()

    def settle(self) -> None:
        """Note that the next save may come."""
        self._settled.set()

    def wait(self) -> None:
        """Return when it is settled; that has the deadline of its save."""
        self._settled.wait()

    def join(self, timeout_s: float | None = None) -> bool:
        """Return when all is done, and after `timeout_s` even if it is not. Whether it is."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        self._begun.wait()
        work, self._work = self._work, _nothing  # it holds the state
        try:
            with _turns.quick():
                work(self)
        except Exception as error:  # noqa: BLE001 - whoever waits for it raises it, or it is told in the handle
            self.error = error
        finally:
            self._settled.set()


def _nothing(_: Background) -> None:
    """What is left to do."""


class _Turns:
    """How long threads of Python keep the interpreter from others. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_quick = 0
        self._before_s = 0.0

    @contextmanager
    def quick(self) -> Iterator[None]:
        """Have all threads of this process take quick turns meanwhile."""
        with self._lock:
            self._num_quick += 1
            if self._num_quick == 1:
                self._before_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before_s, _TURN_S))
        try:
            yield
        finally:
            with self._lock:
                self._num_quick -= 1
                if not self._num_quick:
                    sys.setswitchinterval(self._before_s)


_turns = _Turns()
