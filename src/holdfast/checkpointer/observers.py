"""The listeners of one `Checkpointer`, and their view of its loop."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Final

from torch.distributed import ProcessGroup

from holdfast.checkpointer.events import Event, EventListener, EventSource
from holdfast.checkpointer.relay import Relay
from holdfast.checkpointer.step_times import StepTimes
from holdfast.control.torch_store import global_rank, group_ranks
from holdfast.store.base import Location

#: Longest time that the end of a `Checkpointer` waits for listeners.
_PATIENCE_S: Final = 5.0


class Observers:
    """The listeners of a `Checkpointer`, and the times of the steps of its loop. `run` returns the run, as it is known
    when the first event happens. Without listeners, nothing here takes time."""

    def __init__(
        self, listeners: Sequence[EventListener], run: Callable[[], Location], group: ProcessGroup | None
    ) -> None:
        if not isinstance(listeners, Sequence):
            raise TypeError(f"listeners is a list of objects that hear events, not {listeners!r}")
        for listener in listeners:
            if not callable(getattr(listener, "hear", None)):
                raise TypeError(f"a listener has a method hear(event, source), which {listener!r} lacks")
        self._relay = Relay(listeners, lambda: _source(run(), group)) if listeners else None
        self._times = StepTimes()

    @property
    def listeners(self) -> tuple[Callable[[Event], None], ...]:
        """The functions that hear the events of saves."""
        return () if self._relay is None else (self._relay.hear,)

    def hear(self, event: Event) -> None:
        """Tell an event."""
        if self._relay is not None:
            self._relay.hear(event)

    def step_begins(self, *, is_saving: Callable[[], bool]) -> None:
        """A step of the loop begins. `is_saving` says whether a save is under way."""
        if self._relay is not None:
            self._times.begin(is_saving=is_saving())

    def step_ends(self, step: int) -> None:
        """A step of the loop has ended."""
        if self._relay is not None:
            self._times.end(step)
            if self._times.is_full:
                self.tell_steps()

    def tell_steps(self) -> None:
        """Tell the times of the steps since the last call."""
        if self._relay is not None and (event := self._times.take()) is not None:
            self._relay.hear(event)

    def close(self) -> None:
        """Wait until the listeners have heard everything, for `_PATIENCE_S` at most."""
        if self._relay is not None:
            self.tell_steps()
            self._relay.close(_PATIENCE_S)


def _source(run: Location, group: ProcessGroup | None) -> EventSource:
    return EventSource(run.url, global_rank(), len(group_ranks(group)), socket.gethostname(), os.getpid())
