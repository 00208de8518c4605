"""The guard: nobody changes what a save is still copying.

A `Hold` is one save's claim on the memory that it copies after it has returned. Exactly one thread answers for a hold:
first the thread that saves; when `save` returns, the thread that copies. A hold is over when it is released, and also

- when the thread that answers for it has ended, and
- when the thread that saved waits for its own hold: then an exception took it out of the save, and `pass_on` was never
  reached.

So no exception leaves a hold behind, not even one that comes in the middle of the clean-up, and none of this needs a
lock: each step is one operation of a set, or one assignment.

A thread that changes what is guarded says so for as long as it does (`changing`). It enters when nothing is held, and a
save of another thread begins when nobody changes anything: each says what it is about to do before it looks at the
other. Where both did, the change is taken back. So a save waits for those that change something already, and keeps all
others out meanwhile: blocks of several threads that overlap without end do not hold it up. Until a save has begun, its
hold keeps nobody else waiting, for they may be in such a block.
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

from holdfast.errors import DeadlineError
from holdfast.latch import Latch

#: How often a thread that waits looks whether the thread that answers for a hold is alive.
_LOOK_S: Final = 0.05

#: All holds of this process that are not over. One registry for the process, because live state belongs to the process:
#: `load` and `transfer` are given a state, and must wait for whoever copies it, in whichever `Checkpointer` that is. A
#: hold stays here for as long as a save copies, no longer.
_live: Final[set[Hold]] = set()
#: All blocks of this process in which a thread changes what is guarded.
_changes: Final[set[_Change]] = set()


class Hold:
    """One save's claim on the memory that it is copying. Made by the thread that saves."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        #: The thread that answers for it, by its number in the kernel.
        self._owner = get_native_id()
        self._decided = Latch()
        self._over = Latch()
        #: Whether it waits no more for those that change what is guarded.
        self.is_begun = False

    @property
    def is_over(self) -> bool:
        """Whether it keeps nobody waiting any more."""
        return self._over.is_set

    def pass_on(self, copier: int) -> None:
        """Have the thread `copier` answer for it from now on. The last step of a save: everything else is set aside."""
        self._owner = copier
        self._decided.set()

    def is_passed_on(self, timeout_s: float) -> bool:
        """Whether the save ended well, and left the hold to this thread, which copies. Waits until that is known."""
        end_s = time.monotonic() + timeout_s
        while not self._decided.wait(_LOOK_S) and is_alive(self._owner) and time.monotonic() < end_s:
            pass
        return self._owner == get_native_id() and not self._over.is_set

    def release(self) -> None:
        """End it."""
        self._over.set()
        self._decided.set()
        _live.discard(self)

    def drop(self) -> None:
        """End it if this thread, which saves, still answers for it."""
        if self._owner == get_native_id():
            self.release()

    def wait(self, timeout_s: float = float("inf")) -> bool:
        """Return when it is over, and after `timeout_s` even if it is not. Whether it is."""
        self.drop()
        end_s = time.monotonic() + timeout_s
        while not self._over.wait(min(_LOOK_S, max(end_s - time.monotonic(), 0))):
            if not is_alive(self._owner):
                self.release()
            elif time.monotonic() >= end_s:
                break
        return self._over.is_set

    def is_of(self, guard: Guard) -> bool:
        """Whether `guard` made it."""
        return self._guard is guard


class _Change:
    """A block in which this thread changes what is guarded."""

    def __init__(self) -> None:
        self._thread = get_native_id()
        self._over = Latch()

    @property
    def is_mine(self) -> bool:
        """Whether it is a block of this thread."""
        return self._thread == get_native_id()

    def end(self) -> None:
        """Let saves begin."""
        self._over.set()
        _changes.discard(self)

    def wait(self, timeout_s: float) -> bool:
        """Return when it is over, and after `timeout_s` even if it is not. Whether it is; for its own thread it is."""
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
    """Has the steps of hooked optimizers, and whoever else asks, wait for the holds of one `Checkpointer`. Safe for
    several threads."""

    def __init__(self) -> None:
        self._hooks: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()
        #: Seconds that steps, and others, have waited altogether.
        self.waited_s = 0.0

    def hold(self, *, timeout_s: float) -> Hold:
        """Keep others waiting; this thread answers for it, until it passes it on. Waits until no other thread changes
        what is guarded.

        Raises:
            DeadlineError: one still does after `timeout_s`.
        """
        for left in tuple(_live):
            left.drop()  # an exception took this thread out of an earlier save
        end_s = time.monotonic() + timeout_s
        hold = Hold(self)
        _live.add(hold)
        try:
            while changes := [change for change in tuple(_changes) if not change.wait(0)]:
                if not all(change.wait(max(end_s - time.monotonic(), 0)) for change in changes):
                    raise DeadlineError(
                        f"another thread was under the guard of a Checkpointer for {timeout_s:.0f} s: no save could "
                        "begin.",
                        code="timeout.guard",
                        action="Have it end its `with checkpointer.guard():` before the next save.",
                    )
        except BaseException:
            hold.release()
            raise
        hold.is_begun = True
        return hold

    def holds(self) -> list[Hold]:
        """What is held, or about to be."""
        return [hold for hold in tuple(_live) if hold.is_of(self)]

    def wait(self) -> None:
        """Return when nothing is held: at once, mostly."""
        if not _live:
            return
        start_s = time.perf_counter()
        for hold in self.holds():
            if hold.is_begun:
                hold.wait()
        self.waited_s += time.perf_counter() - start_s

    def hook(self, optimizers: Iterable[Optimizer]) -> None:
        """Have steps of `optimizers` wait, those that do not yet."""
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(lambda *_: self.wait())

    def unhook(self) -> None:
        """Have no steps wait any more."""
        for handle in self._hooks.values():
            handle.remove()
        self._hooks.clear()


@contextmanager
def changing(guards: Sequence[Guard]) -> Iterator[None]:
    """A ``with`` block that is entered when `guards` hold nothing, and during which no save of another thread begins in
    this process."""
    # In a block within a block nothing can have begun, and what waits to begin waits for the outer one.
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
    """Whether this process has the thread with this number. The kernel's word: `Thread.is_alive` is wrong for good when
    an exception came in the middle of a `join` (bpo-45274), and after a fork the child has none of its parent's."""
    return os.path.exists(f"/proc/self/task/{thread}")  # noqa: PTH110 - every step of a loop that waits comes here


def await_copies(*, timeout_s: float) -> bool:
    """Return when no save in this process is copying any more, whichever `Checkpointer` made it, and after `timeout_s`
    even if one is. Whether live state may be changed.

    For whoever fills live state by other means than a step: `load`, `restore`, `transfer`. They wait for all saves, not
    only for those that copy their targets: an object that fills itself (``load_state_dict``) does not say what memory
    it has, and a copy takes less time than a load.
    """
    end_s = time.monotonic() + timeout_s
    return all(hold.wait(max(end_s - time.monotonic(), 0)) for hold in tuple(_live) if hold.is_begun)
