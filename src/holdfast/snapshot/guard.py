"""The guard: it delays changes to memory that a save is still copying.

A `Hold` is one save's claim on the memory that it copies after it has returned. Exactly one thread is responsible for a
hold: first the saving thread; when `save` returns, the copying thread. A hold is over when that thread releases it, and
also

- when that thread has ended, and
- when the saving thread waits for its own hold: then an exception has left the save before it reached `pass_on`.

So no exception leaves a hold behind, not even one in the middle of the clean-up. None of this needs a lock: each step
is one operation on a set, or one assignment.

A thread that changes guarded memory registers the change for as long as it lasts (`changing`). It enters the block when
there is no hold, and a save of another thread begins when there is no change. Each registers its intention before it
looks for the other's; where both have registered, the change withdraws. So a save waits for the changes that have
begun, and keeps all new ones out meanwhile: blocks of several threads that overlap without end cannot starve it. Until
a save has begun, steps and other waiters do not wait for its hold, for their thread may be inside such a block.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_native_id
from typing import Final
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holdfast.calls import ALL, CHECKPOINTER_SAVE, refuse_nested
from holdfast.errors import DeadlineError
from holdfast.latch import Latch

#: Interval at which a waiting thread checks that the thread it waits for is alive.
_LOOK_S: Final = 0.05

#: All holds of this process that are not over. There is one registry per process, because live state belongs to the
#: process: `load` and `transfer` are given a state, and must wait for any `Checkpointer` that copies it. A hold stays
#: here only as long as its save copies.
_live: Final[set[Hold]] = set()
#: All blocks of this process in which a thread changes guarded memory.
_changes: Final[set[_Change]] = set()


class Hold:
    """One save's claim on the memory that it is copying. The saving thread makes it."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        #: The kernel's number of the responsible thread.
        self._owner = get_native_id()
        self._decided = Latch()
        self._over = Latch()
        #: Whether the save has begun: it no longer waits for changes of other threads.
        self.is_begun = False

    @property
    def is_over(self) -> bool:
        """Whether the hold is over, so that no thread waits for it."""
        return self._over.is_set

    def pass_on(self, copier: int) -> None:
        """Make the thread `copier` responsible from now on. The last step of a save, when all unguarded state is
        copied."""
        self._owner = copier
        self._decided.set()

    def is_passed_on(self, timeout_s: float) -> bool:
        """Whether the save succeeded and passed the hold on to the calling thread, which copies. Waits for up to
        `timeout_s` until that is known."""
        end_s = time.monotonic() + timeout_s
        while not self._decided.wait(_LOOK_S) and is_alive(self._owner) and time.monotonic() < end_s:
            pass
        return self._owner == get_native_id() and not self._over.is_set

    def release(self) -> None:
        """End the hold."""
        self._over.set()
        self._decided.set()
        _live.discard(self)

    def drop(self) -> None:
        """End the hold if the calling thread is responsible for it."""
        if self._owner == get_native_id():
            self.release()

    def wait(self, timeout_s: float = float("inf")) -> bool:
        """Wait until the hold is over, for `timeout_s` at most. Returns whether it is over. Ends the hold where its
        responsible thread is the calling one or has ended.

        Raises:
            ConfigurationError: code ``config.nested``: the calling thread is still inside the save of the hold.
        """
        if self._owner == get_native_id() and not self.is_over:
            refuse_nested("a step of an optimizer, or another change to the state,", allowed=ALL - {CHECKPOINTER_SAVE})
        self.drop()
        end_s = time.monotonic() + timeout_s
        while not self._over.wait(min(_LOOK_S, max(end_s - time.monotonic(), 0))):
            if not is_alive(self._owner):
                self.release()
            elif time.monotonic() >= end_s:
                break
        return self._over.is_set

    def is_of(self, guard: Guard) -> bool:
        """Whether `guard` made this hold."""
        return self._guard is guard


class _Change:
    """A block in which the thread that made this object changes guarded memory."""

    def __init__(self) -> None:
        self._thread = get_native_id()
        self._over = Latch()

    @property
    def is_mine(self) -> bool:
        """Whether it is a block of the calling thread."""
        return self._thread == get_native_id()

    def end(self) -> None:
        """End the block, so that saves can begin."""
        self._over.set()
        _changes.discard(self)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the block is over, for `timeout_s` at most. Returns whether it is over; to its own thread it
        always is."""
        end_s = time.monotonic() + timeout_s
        if self.is_mine:
            return True
        while not self._over.wait(min(_LOOK_S, max(end_s - time.monotonic(), 0))):
            if not is_alive(self._thread):
                self.end()
            elif time.monotonic() >= end_s:
                return False
        return True


class Guard:
    """The guard of one `Checkpointer`: steps of hooked optimizers, and other callers of `wait`, wait for its holds.
    Safe for several threads."""

    def __init__(self) -> None:
        self._hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
        #: Seconds that steps and other callers have waited in total.
        self.waited_s = 0.0

    def hold(self, *, timeout_s: float) -> Hold:
        """Make a hold, for which the calling thread is responsible until it passes it on. Waits until no other thread
        changes guarded memory.

        Raises:
            DeadlineError: a thread still does after `timeout_s`.
        """
        for left in tuple(_live):
            left.drop()  # an exception ended an earlier save of this thread before it passed its hold on
        end_s = time.monotonic() + timeout_s
        hold = Hold(self)
        _live.add(hold)
        try:
            while changes := [change for change in tuple(_changes) if not change.wait(0)]:
                if not all(change.wait(max(end_s - time.monotonic(), 0)) for change in changes):
                    raise DeadlineError(
                        f"another thread held the guard of a Checkpointer for {timeout_s:.0f} s, so no save could "
                        "begin.",
                        code="timeout.guard",
                        action="Let that thread leave its `with checkpointer.guard():` block before the next save.",
                    )
        except BaseException:
            hold.release()
            raise
        hold.is_begun = True
        return hold

    def holds(self) -> list[Hold]:
        """The holds of this guard, including those whose save has not begun yet."""
        return [hold for hold in tuple(_live) if hold.is_of(self)]

    def wait(self) -> None:
        """Wait until every hold of this guard whose save has begun is over. Usually returns at once."""
        if not _live:
            return
        start_s = time.perf_counter()
        for hold in self.holds():
            if hold.is_begun:
                hold.wait()
        self.waited_s += time.perf_counter() - start_s

    def hook(self, optimizers: Iterable[Optimizer]) -> None:
        """Make the steps of `optimizers` wait for holds, where they do not yet."""
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(lambda *_: self.wait())

    def unhook(self) -> None:
        """Make steps stop waiting for holds."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()


@contextmanager
def changing(guards: Sequence[Guard]) -> Iterator[None]:
    """A ``with`` block in which the calling thread changes guarded memory. It is entered when `guards` have no holds,
    and no save of another thread begins in this process while it lasts."""
    # Inside an outer block of this thread no save can have begun, and one that waits to begin waits for the outer one.
    is_inner = any(change.is_mine for change in tuple(_changes))
    change = _Change()
    try:
        _changes.add(change)
        while not is_inner and (holds := [hold for guard in guards for hold in guard.holds()]):
            change.end()
            for hold in holds:
                hold.wait()
            change = _Change()
            _changes.add(change)
        yield
    finally:
        change.end()


def is_alive(thread: int) -> bool:
    """Whether this process has the thread with this kernel number. Asks the kernel, because `Thread.is_alive` stays
    wrong after an exception in the middle of a `join` (bpo-45274), and a forked child has no threads of its parent."""
    return os.path.exists(f"/proc/self/task/{thread}")  # noqa: PTH110 - fast, because waiting loops call it often


def await_copies(*, timeout_s: float) -> bool:
    """Wait until no save in this process is copying, of whichever `Checkpointer`, for `timeout_s` at most. Returns
    whether live state may be changed now.

    For `load`, `restore` and `transfer`, which fill live state by other means than a step. They wait for all saves, not
    only for those that copy their targets: an object that fills itself (``load_state_dict``) does not tell which memory
    it has, and a copy takes less time than a load.
    """
    end_s = time.monotonic() + timeout_s
    return all(hold.wait(max(end_s - time.monotonic(), 0)) for hold in tuple(_live) if hold.is_begun)
