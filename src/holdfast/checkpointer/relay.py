"""The way of events from the threads in which they happen to the listeners of users."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Final

from holdfast.calls import LISTENER, outer
from holdfast.checkpointer.events import Event, EventListener, EventsDropped, EventSource
from holdfast.latch import Latch

#: Most events that wait for slow listeners. Later ones are dropped.
_MOST: Final = 4096

_log = logging.getLogger(__name__)


class Relay:
    """Brings events to `listeners`, in a thread of its own: whatever a listener does, training does not wait for it.

    `hear` may be called in any thread, and in the handler of a signal. The first call must have returned before there
    are others.
    """

    def __init__(self, listeners: Sequence[EventListener], source: Callable[[], EventSource]) -> None:
        self._listeners = tuple(listeners)
        self._find_source = source
        #: A queue whose `put` is one call into C, so that no exception in the middle of it can leave a lock taken.
        self._events: SimpleQueue[Event | Latch | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._num_dropped = 0
        self._told = set[tuple[int, type[BaseException]]]()

    @property
    def is_in_use(self) -> bool:
        """Whether there was an event."""
        return self._thread is not None

    def hear(self, event: Event) -> None:
        """Pass on `event`. Drops it where too many events wait."""
        if self._thread is None:
            thread = Thread(target=self._run, args=(self._find_source(),), name="holdfast-events", daemon=True)
            thread.start()
            self._thread = thread
        if self._events.qsize() < _MOST:
            self._events.put(event)
        else:
            self._num_dropped += 1

    def flush(self, timeout_s: float) -> None:
        """Wait until the listeners have heard all events so far, for `timeout_s` at most."""
        if self._thread is not None and self._thread.is_alive():
            heard = Latch()
            self._events.put(heard)
            heard.wait(timeout_s)

    def close(self, patience_s: float) -> None:
        """Wait until the listeners have heard all events, for `patience_s` at most."""
        if self._thread is None:
            return
        self._events.put(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            _log.warning("listeners of events are too slow: after %s s they have not heard all of them", patience_s)

    def _run(self, source: EventSource) -> None:
        while (event := self._events.get()) is not None:
            if isinstance(event, Latch):
                event.set()
                continue
            self._tell(event, source)
            if self._events.empty():
                self._tell_dropped(source)
        self._tell_dropped(source)

    def _tell_dropped(self, source: EventSource) -> None:
        number, self._num_dropped = self._num_dropped, 0
        if number:
            _log.warning("listeners of events are too slow: %d events were dropped", number)
            self._tell(EventsDropped(number), source)

    @outer(LISTENER)
    def _tell(self, event: Event, source: EventSource) -> None:
        for number, listener in enumerate(self._listeners):
            try:
                listener.hear(event, source)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is, the other listeners go on
                if (number, type(error)) not in self._told:
                    self._told.add((number, type(error)))
                    _log.warning("%r failed to hear %s", listener, type(event).__name__, exc_info=error)
