"""Helper threads that make calls for callers who may stop waiting: system calls on files have no deadline."""

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

#: Makes a call, and returns the function that tells its outcome to the caller.
_Call: TypeAlias = Callable[[], Callable[[], None]]
_Inbox: TypeAlias = "SimpleQueue[_Call | None]"

#: A helper without work ends after this time.
_IDLE_S: Final = 10.0


class Helpers:
    """A pool of daemon threads, as many as there are calls at once. A call that hangs keeps no process alive."""

    def __init__(self) -> None:
        #: The inboxes of idle helpers. The last one is taken first, so that calls in sequence use one helper.
        self._idle: deque[_Inbox] = deque()
        self._closed = False

    def start(self, call: Callable[[], T]) -> Future[T]:
        """Let a helper make `call` at once. Returns its future without waiting."""
        request: Future[T] = Future()
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue()
            Thread(target=self._help, args=(inbox,), name="holdfast-helper", daemon=True).start()
        inbox.put(partial(_made, call, request))
        return request

    def close(self) -> None:
        """End each helper as soon as it has no work. Returns at once."""
        self._closed = True
        self._dismiss()

    def _help(self, inbox: _Inbox) -> None:
        while (work := self._next(inbox)) is not None:
            tell = work()
            # Become idle before the caller continues, so that its next call finds this helper. Check for the end last:
            # where a helper becomes idle while another thread calls `close`, one of the two sees the other.
            self._idle.append(inbox)
            tell()
            del work, tell  # an idle helper must not hold buffers
            if self._closed:
                self._dismiss()

    def _next(self, inbox: _Inbox) -> _Call | None:
        """Wait for the next call to make; None when the helper should end.

        An exception (Ctrl-C) can keep a caller from closing the pool, or from giving work to a helper that it has just
        taken. So a helper that has had no work for a while ends.
        """
        with suppress(Empty):
            return inbox.get(timeout=_IDLE_S)
        with suppress(ValueError):
            self._idle.remove(inbox)
            return None
        with suppress(Empty):  # a caller has taken this helper: it gives work now, or never
            return inbox.get(timeout=_IDLE_S)
        return None

    def _dismiss(self) -> None:
        while True:
            try:
                self._idle.pop().put(None)
            except IndexError:
                return


def _made(call: Callable[[], T], request: Future[T]) -> Callable[[], None]:
    """Make `call`, and return the function that sets the outcome of `request`."""
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - it is raised to whoever asked
        return partial(request.set_exception, error)
    return partial(request.set_result, result)
