"""The listeners of one `Checkpointer`, and their view of its loop."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from torch.distributed import ProcessGroup

from holdfast.checkpointer.events import (
    CheckingListener,
    CheckpointerClosed,
    CheckpointerOpened,
    Event,
    EventListener,
    EventSource,
    FirstStepEnded,
    IntervalChosen,
    RestoreFailed,
    RestoreReturned,
    WorkingListener,
)
from holdfast.checkpointer.option_checks import check_listeners
from holdfast.checkpointer.relay import Relay
from holdfast.checkpointer.step_times import StepTimes
from holdfast.control.processes import age_s
from holdfast.control.torch_store import global_rank, group_ranks
from holdfast.policy.pace import Choice
from holdfast.store.base import Location
from holdfast.store.urls import text_of

#: Longest time that the end of a `Checkpointer` waits for listeners.
_PATIENCE_S: Final = 5.0


class Observers:
    """The listeners of a `Checkpointer`, and the times of the steps of its loop. `run` returns the run, as it is known
    when the first event happens. Without listeners, nothing here takes time."""

    def __init__(
        self, listeners: Sequence[EventListener], run: Callable[[], Location], group: ProcessGroup | None
    ) -> None:
        check_listeners(listeners)
        for each in listeners:
            if isinstance(each, CheckingListener):
                each.check(text_of(run()))
        self._relay = Relay(listeners, lambda: _source(run(), group)) if listeners else None
        self._working = [each for each in listeners if isinstance(each, WorkingListener)]
        for each in self._working:
            each.begin(self.hear)
        self._group = group
        self._times = StepTimes()
        self._ended_s = 0.0
        #: The newest choice of the policy `Auto` that listeners know.
        self._choice: Choice | None = None

    @property
    def listeners(self) -> tuple[Callable[[Event], None], ...]:
        """The functions that hear the events of saves."""
        return () if self._relay is None else (self._relay.hear,)

    def hear(self, event: Event) -> None:
        """Tell an event."""
        if self._relay is not None:
            self._relay.hear(event)

    def open(self) -> None:
        """The first call of the `Checkpointer`."""
        if self._relay is not None:
            self._times.is_reported_often = group_ranks(self._group)[0] == global_rank()
            self._relay.hear(CheckpointerOpened(age_s()))

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """A ``with`` block that restores. Nothing says when the step after it begins."""
        self.tell_steps()
        self._times.forget_begin()
        begun_s = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self.hear(RestoreFailed(time.perf_counter() - begun_s, error))
            raise
        self.hear(RestoreReturned(time.perf_counter() - begun_s))

    def step_begins(self, *, is_saving: Callable[[], bool]) -> None:
        """A step of the loop begins. `is_saving` says whether a save is under way."""
        if self._relay is not None:
            self._times.begin(is_saving=is_saving())

    def step_ends(self, step: int) -> None:
        """A step of the loop has ended."""
        if self._relay is None:
            return
        if not self._times.end(step):
            self._relay.hear(FirstStepEnded(step))
        elif self._times.is_full:
            self.tell_steps()

    def note_choice(self, choice: Choice | None) -> None:
        """The present choice of the policy `Auto`; None if there is none. Tells it if it is a new one."""
        if choice is not self._choice and choice is not None and self._relay is not None:
            self._choice = choice
            self._relay.hear(IntervalChosen(choice.interval_s, choice.mttf_s, choice.wasted))

    def tell_steps(self) -> None:
        """Tell the times of the steps since the last call."""
        if self._relay is not None and (event := self._times.take()) is not None:
            self._relay.hear(event)

    def training_ends(self) -> None:
        """Training has ended, and the `Checkpointer` waits for its saves."""
        self.tell_steps()
        self._ended_s = time.perf_counter()

    def finish(self, timeout_s: float, *, is_last: bool = False) -> None:
        """Wait for the work of listeners on all events so far, as `WorkingListener.finish` does."""
        if self._relay is None or not self._working:
            return
        end_s = time.monotonic() + timeout_s
        self._relay.flush(timeout_s)
        for each in self._working:
            each.finish(max(end_s - time.monotonic(), 0), is_last=is_last)

    def close(self, *, is_early: bool) -> None:
        """The `Checkpointer` is closed; `is_early`: training ended before its time. Wait until the listeners have heard
        everything, for `_PATIENCE_S` at most."""
        if self._relay is not None and self._relay.is_in_use:
            self._relay.hear(CheckpointerClosed(time.perf_counter() - self._ended_s, is_early))
            self._relay.close(_PATIENCE_S)


def _source(run: Location, group: ProcessGroup | None) -> EventSource:
    return EventSource(text_of(run), global_rank(), len(group_ranks(group)), socket.gethostname(), os.getpid())
