"""Threads that make calls for others, who may stop waiting: no system call on a file or a socket has a deadline."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Final, TypeAlias, TypeVar

T = TypeVar("T")

#: Makes a call; returns what tells the outcome.
_Call: TypeAlias = Callable[[], Callable[[], None]]
_Inbox: TypeAlias = "SimpleQueue[_Call | None]"

#: After so long without work a helper ends.
_IDLE_S: Final = 10.0


class Helpers:
    """Daemon threads, as many as there are calls at once: a call that hangs keeps no process alive."""

    def __init__(self) -> None:
        #: Where each idle helper waits for work. The last one is taken first: callers in turn keep to one helper.
        self._idle: deque[_Inbox] = deque()
        self._closed = False

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Have a helper make `call`, at once."""
        request: Future[T] = Future()
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            Thread(target=self._help, args=(inbox,), name="holdfast-helper", daemon=True).start()
        inbox.put(partial(_made, call, request))
        return request

    def close(self) -> None:
        """End the helpers, each when it has no work any more. Returns at once."""
        self._closed = True
        self._dismiss()

    def _help(self, inbox: _Inbox) -> None:
        while (work := self._next(inbox)) is not None:
            tell = work()
            # Idle before the caller goes on, so that its next call finds this helper. Looking for the end comes last:
            # of a helper that becomes idle and a `close` at the same time, one sees the other.
            self._idle.append(inbox)
            tell()
            del work, tell  # an idle helper must not hold buffers
            if self._closed:
                self._dismiss()

    def _next(self, inbox: _Inbox) -> _Call | None:
        """The next call to make; None when there will be none.

        An exception (Ctrl-C) can keep a caller from closing this, or from giving work to the helper that it has just
        taken. So a helper that had no work for a while ends.
        """
        with suppress(Empty):
            return inbox.get(timeout=_IDLE_S)
        with suppress(ValueError):
            self._idle.remove(inbox)
            return None
        with suppress(Empty):  # a caller has taken it: it gives work now, or never
            return inbox.get(timeout=_IDLE_S)
        return None

    def _dismiss(self) -> None:
        while True:
            try:
                self._idle.pop().put(None)
            except IndexError:
                return


def _made(call: Callable[[], T], request: Future[T]) -> Callable[[], None]:
    """Make `call`; returns what tells the outcome."""
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - it is raised to whoever asked
        return partial(request.set_exception, error)
    return partial(request.set_result, result)
