"""The part of a save that runs in a background thread while training goes on."""

from __future__ import annotations

import time
from threading import Thread
from typing import Final, Protocol

from holdfast.latch import Latch
from holdfast.snapshot.guard import is_alive

#: Interval at which a waiting thread checks that the background thread is alive.
_LOOK_S: Final = 0.05
#: The same interval once the background thread has done its work and only has to end.
_UNWIND_S: Final = 0.0005


class Work(Protocol):
    """The work of a background thread."""

    def run(self, background: Background) -> None:
        """Do the work. Calls `Background.settle` when all ranks have agreed on a plan and a place and this one has a
        slot: the next save waits for that."""

    def end(self, error: BaseException | None) -> None:
        """Release everything that the work still holds. `error` is the exception that ended `run`, if one did. Another
        thread may call this again, because an exception may have interrupted the first call."""


class Background:
    """Does `work` in a daemon thread. `error` is the exception that `work` raised.

    The thread's last act is `Work.end`. If an exception interrupts that act, a thread that waits here finds the
    background thread dead and repeats the act. So once a background is over, its work holds nothing.
    """

    def __init__(self, work: Work) -> None:
        self.error: BaseException | None = None
        self._work: Work | None = work
        self._begun = Latch()
        self._settled = Latch()
        self._ended = Latch()
        self._thread = Thread(target=self._run, args=(work,), name="holdfast-stage", daemon=True)

    def start(self) -> int:
        """Start the work, and return the thread's kernel number."""
        self._thread.start()
        # Only now may it work: earlier, it would take the interpreter from this thread, which waits for its start.
        self._begun.set()
        assert self._thread.native_id is not None
        return self._thread.native_id

    @property
    def is_settled(self) -> bool:
        """Whether the next save may begin."""
        return self._settled.is_set

    @property
    def is_over(self) -> bool:
        """Whether the work has ended and holds nothing any more. Ends the work of a dead thread."""
        work, thread = self._work, self._thread.native_id
        if work is not None and (thread is None or not is_alive(thread)):
            self._end(work)
        return self._work is None

    def settle(self) -> None:
        """Record that the next save may begin."""
        self._settled.set()

    def wait(self) -> None:
        """Wait until this is settled, or over. That takes no longer than the deadline of its save."""
        self.wait_for(self._settled)

    def wait_for(self, latch: Latch, timeout_s: float | None = None) -> bool:
        """Wait until `work` has set `latch`, or is over, for `timeout_s` at most. Returns False when that time
        passed."""
        while not latch.wait(_LOOK_S if timeout_s is None else min(timeout_s, _LOOK_S)):
            if self.is_over:
                break
            if timeout_s is not None and (timeout_s := timeout_s - _LOOK_S) <= 0:
                return False
        return True

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until the work is over and the thread has ended, for `timeout_s` at most. Returns whether the work is
        over."""
        is_over = self.wait_for(self._ended, timeout_s)
        # Until the thread has ended, its frames refer to the slot and keep it mapped.
        while is_over and self._thread.native_id is not None and is_alive(self._thread.native_id):
            time.sleep(_UNWIND_S)
        return is_over

    def _run(self, work: Work) -> None:
        try:
            self._begun.wait(_LOOK_S)
            work.run(self)
        except BaseException as error:  # noqa: BLE001 - a waiting save raises it, or the handle tells it
            self.error = error
        finally:
            self._end(work)

    def _end(self, work: Work) -> None:
        work.end(self.error)
        self._work = None  # it holds the state
        self._settled.set()
        self._ended.set()
