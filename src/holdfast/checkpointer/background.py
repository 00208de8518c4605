"""The part of a save that goes on when training does."""

from __future__ import annotations

import time
from threading import Thread
from typing import Final, Protocol

from holdfast.latch import Latch
from holdfast.snapshot.guard import is_alive

#: How often a thread that waits looks whether the one it waits for is alive.
_LOOK_S: Final = 0.05
#: How often it looks when that one has nothing more to do than to end.
_UNWIND_S: Final = 0.0005


class Work(Protocol):
    """What a background does."""

    def run(self, background: Background) -> None:
        """Do it. Calls `Background.settle` when all ranks have agreed on a plan and a place and this one has a slot:
        until then the next save has to wait."""

    def end(self, error: BaseException | None) -> None:
        """Give back everything that this still holds; `error` is what ended `run`. May be called again, by another
        thread, because an exception may have come in the middle of the first call."""


class Background:
    """Does `work` in a thread of its own, which keeps no process alive. What `work` raises is `error`.

    The last act of the thread is `Work.end`. Whoever waits here and finds the thread dead, and that act cut short by an
    exception, repeats it: when a background is over, its work holds nothing.
    """

    def __init__(self, work: Work) -> None:
        self.error: BaseException | None = None
        self._work: Work | None = work
        self._begun = Latch()
        self._settled = Latch()
        self._ended = Latch()
        self._thread = Thread(target=self._run, args=(work,), name="holdfast-stage", daemon=True)

    def start(self) -> int:
        """Begin the work; the number of the thread in the kernel."""
        self._thread.start()
        # Only now: a thread that begins to work takes the interpreter from whoever waits for it to have started.
        self._begun.set()
        assert self._thread.native_id is not None
        return self._thread.native_id

    @property
    def is_settled(self) -> bool:
        """Whether the next save may come."""
        return self._settled.is_set

    @property
    def is_over(self) -> bool:
        """Whether the work has ended, and holds nothing any more."""
        work, thread = self._work, self._thread.native_id
        if work is not None and (thread is None or not is_alive(thread)):
            self._end(work)
        return self._work is None

    def settle(self) -> None:
        """Note that the next save may come."""
        self._settled.set()

    def wait(self) -> None:
        """Return when it is settled; that has the deadline of its save."""
        self.wait_for(self._settled)

    def wait_for(self, latch: Latch, timeout_s: float | None = None) -> bool:
        """Return when `latch` is set, which `work` does, or when the work is over, and after `timeout_s` even if
        neither is so. Whether one is."""
        while not latch.wait(_LOOK_S if timeout_s is None else min(timeout_s, _LOOK_S)):
            if self.is_over:
                break
            if timeout_s is not None and (timeout_s := timeout_s - _LOOK_S) <= 0:
                return False
        return True

    def join(self, timeout_s: float | None = None) -> bool:
        """Return when all is done, and after `timeout_s` even if it is not. Whether it is."""
        is_over = self.wait_for(self._ended, timeout_s)
        # Until then the frames of the thread refer to the slot, and keep it mapped.
        while is_over and self._thread.native_id is not None and is_alive(self._thread.native_id):
            time.sleep(_UNWIND_S)
        return is_over

    def _run(self, work: Work) -> None:
        try:
            self._begun.wait(_LOOK_S)
            work.run(self)
        except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it, or it is told in the handle
            self.error = error
        finally:
            self._end(work)

    def _end(self, work: Work) -> None:
        work.end(self.error)
        self._work = None  # it holds the state
        self._settled.set()
        self._ended.set()
