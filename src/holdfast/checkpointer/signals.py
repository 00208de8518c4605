"""Notes of signals: the handler of a signal only sets a flag, which the training loop reads at the end of a step."""

from __future__ import annotations

import atexit
import math
import os
import signal
import time
from collections.abc import Callable, Iterable
from threading import current_thread, main_thread
from types import FrameType
from typing import Final
from weakref import WeakKeyDictionary, WeakSet, ref

from holdfast.errors import ConfigurationError
from holdfast.policy.when import OnPreemption, OnRequest, SavePolicy, signal_name

#: Time for which a job that ended for a preemption ignores its signals: ranks end at different times, and a launcher or
#: a scheduler sends them a signal, or another one, while they leave. torchrun gives them as long.
LEAVING_SIGNALS_S: Final = 30.0

Handler = Callable[[int, FrameType | None], object]


class SignalNote:
    """Notes that the signal `signum` came, and then calls the handler that was there before.

    Once `is_armed`, and until `remove`, the signal does not end the process; a second SIGINT (Ctrl-C) does. A child
    that is forked from this process has the earlier handler. Make it in the main thread; else it raises
    `ConfigurationError`, code ``config.signal``.
    """

    def __init__(self, signum: int, *, is_armed: bool = True) -> None:
        if current_thread() is not main_thread():
            raise ConfigurationError(
                f"a handler of {signal_name(signum)} can be set only in the main thread.",
                code="config.signal",
                action="Make the Checkpointer in the main thread, or leave the signal out of its policy.",
            )
        for each in tuple(_leaving):  # the job before this one in the process has ended
            each.remove()
        self.name = signal_name(signum)
        #: The time (of `time.monotonic`) at which the signal first came; None if it did not since `forget`.
        self.noted_s: float | None = None
        #: The time at which it last came.
        self.newest_s: float | None = None
        #: Until this is True, the signal does what it did before.
        self.is_armed = is_armed
        #: The time from which on the signal does again what it did before.
        self.until_s = math.inf
        self._signum = signum
        self._before = signal.getsignal(signum)
        self._handler = _handler(ref(self), self._before)
        _notes.add(self)
        signal.signal(signum, self._handler)

    @property
    def is_replaced(self) -> bool:
        """Whether other code has set a handler since, which may not call this one. Those of other notes do."""
        current = signal.getsignal(self._signum)
        while current is not self._handler and callable(current) and current in _before:
            current = _before[current]
        return current is not self._handler

    def forget(self, before_s: float) -> None:
        """Forget the signals that came before the time `before_s`."""
        self.noted_s = None  # a signal that comes from here on is noted by its handler
        if self.newest_s is not None and self.newest_s > before_s:
            self.noted_s = self.newest_s

    def remove(self, *, ignores_s: float = 0.0) -> None:
        """Bring back the handler that was there before. If another one was set since, that one stays, and finds the
        earlier handler behind it. For `ignores_s` seconds more, the signal does nothing."""
        if self not in _notes:
            return
        if ignores_s > 0:
            now_s = time.monotonic()
            self.until_s = now_s + ignores_s
            _leaving.difference_update([each for each in _leaving if each.until_s < now_s])
            _leaving.add(self)
            return
        _notes.discard(self)
        _leaving.discard(self)
        self.restore()

    def outlast_python(self) -> None:
        """Ignore the signal for what is left of the process, if the note is about to leave. A second SIGINT (Ctrl-C)
        still interrupts."""
        is_leaving = self in _leaving and time.monotonic() < self.until_s
        if is_leaving and self._signum != signal.SIGINT and signal.getsignal(self._signum) is self._handler:
            signal.signal(self._signum, signal.SIG_IGN)

    def restore(self) -> None:
        """As `remove`, in this process alone."""
        if signal.getsignal(self._signum) is self._handler and current_thread() is main_thread():
            # A handler that was not set from Python is None here, and cannot be brought back.
            signal.signal(self._signum, signal.SIG_DFL if self._before is None else self._before)


def note_signals(policies: Iterable[SavePolicy]) -> dict[int, SignalNote]:
    """Begin to note the signals that `policies` wait for."""
    notes: dict[int, SignalNote] = {}
    for policy in policies:
        match policy:
            case OnRequest(signum=int(signum)):
                notes[signum] = SignalNote(signum)
            case OnPreemption():
                # Before the first step there is nothing to save: this rank ends, rather than wait for others that end.
                notes |= {signum: SignalNote(signum, is_armed=False) for signum in policy.signums}
    return notes


#: The handler that each handler of a note calls, because it was there before; also of notes that are removed.
_before: Final[WeakKeyDictionary[Handler, Handler | int | None]] = WeakKeyDictionary()
#: All notes of this process that are not removed, for children to forget.
_notes: Final[WeakSet[SignalNote]] = WeakSet()
#: Those that nobody else keeps alive, and that ignore their signal for a while.
_leaving: Final[set[SignalNote]] = set()


def _handler(note: ref[SignalNote], before: Handler | int | None) -> Handler:
    """The handler for `note`. It does not keep the note alive: where the note is gone, the handler behaves as the one
    `before` it."""

    def handle(signum: int, frame: FrameType | None) -> None:
        alive = note()
        is_wanted = alive is not None and alive in _notes and alive.is_armed and time.monotonic() < alive.until_s
        is_first = alive is not None and alive.noted_s is None
        if alive is not None and is_wanted:
            alive.newest_s = time.monotonic()
            alive.noted_s = alive.newest_s if is_first else alive.noted_s
        if before is signal.default_int_handler and is_wanted and is_first:
            return  # Python's own handler of Ctrl-C would end the loop in the middle of a step
        if callable(before):
            before(signum, frame)
        elif not is_wanted and before != signal.SIG_IGN and signal.getsignal(signum) is handle:
            # Nobody wants the signal. (A handler that was set later calls this one, and does want it.)
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)

    _before[handle] = before
    return handle


def _forget_in_child() -> None:
    for note in tuple(_notes):
        note.restore()
    _notes.clear()
    _leaving.clear()


def _outlast_python() -> None:
    # While the interpreter ends, which can take seconds, Python gives every signal that has a handler of its own back
    # to the system, which would end the process with another exit code than that of its `sys.exit`.
    for note in tuple(_leaving):
        note.outlast_python()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_outlast_python)
