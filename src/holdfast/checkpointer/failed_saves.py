"""The saves of one `Checkpointer` that fail: whether training goes on, and how old the newest durable checkpoint is."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Literal, NamedTuple

from torch.distributed import ProcessGroup

from holdfast.checkpointer.events import (
    Event,
    RecoveryPointAged,
    SaveBegun,
    SaveCommitted,
    SaveEvent,
    SaveFailed,
    SaveSkipped,
    SaveUnwatched,
)
from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.restore_report import RestoreReport
from holdfast.checkpointer.save_errors import stopped
from holdfast.checkpointer.save_machine import SaveMachine
from holdfast.control.deadline import Deadline
from holdfast.control.torch_store import default_channel
from holdfast.errors import DeadlineError, HoldfastError
from holdfast.policy.stop import StopAfter
from holdfast.store.trouble import is_store_trouble
from holdfast.wording import count, duration

#: Errors of ranks that waited in vain for the store, all of them alike.
_WAITED: Final = frozenset({"timeout.slot", "timeout.commit"})

_log = logging.getLogger(__name__)


class _DurableState(NamedTuple):
    """The newest durable checkpoint: its step, and when its state was taken, by the clock of events."""

    step: int
    taken_s: float


class FailedSaves:
    """Follows the saves of one `Checkpointer` on this rank, and judges failed ones by `policy`. `tell` brings events to
    the listeners. Saves to memory alone do not count.

    A failure counts against the store once something has worked: a job whose first save fails has a mistake in its
    set-up, and training must not go on for days beside it. The first rank alone decides to stop, and tells the others
    in an exchange, because ranks hear of the keeper's work at different times.
    """

    def __init__(self, policy: Literal["warn"] | StopAfter, tell: Callable[[Event], None]) -> None:
        self._policy = policy
        self._tell = tell
        self._durable: _DurableState | None = None
        #: When the saves began that are under way, by step; and the first one since the newest durable one.
        self._begun: dict[int, float] = {}
        self._waits_since_s: float | None = None
        self._num_missed = 0
        self._last_error = ""
        #: Whether a call of `save` has succeeded, or a checkpoint was restored.
        self._has_worked = False
        self._is_first_rank = False

    def note_restored(self, report: RestoreReport) -> None:
        """Training goes on from the checkpoint of `report`."""
        self._has_worked |= report.load is not None
        if report.step is not None and report.tier == "storage":
            self._durable = _DurableState(report.step, time.perf_counter())

    def hear(self, event: SaveEvent) -> None:
        """Note an event of a save. Any thread may call this."""
        match event:
            case SaveBegun(memory_only=False) if event.step not in self._begun:
                self._begun[event.step] = event.at.clock_s
                if self._waits_since_s is None:
                    self._waits_since_s = event.at.clock_s
                self._is_first_rank = event.is_first_rank
                self._tell_age(event.step)
            case SaveCommitted():
                taken_s = self._begun.pop(event.step, event.at.clock_s)
                if self._durable is None or taken_s >= self._durable.taken_s:
                    self._durable = _DurableState(event.step, taken_s)
                self._num_missed, self._last_error = 0, ""
                self._waits_since_s = min(self._begun.values(), default=None)
            case SaveSkipped() if not _is_held_up(event.error):
                self._begun.pop(event.step, None)
            case SaveFailed() | SaveSkipped() if event.step in self._begun:
                del self._begun[event.step]
                self._num_missed += 1
                self._last_error = str(event.error)
            case SaveUnwatched():
                self._begun.pop(event.step, None)

    def tolerates(self, error: HoldfastError, machine: SaveMachine) -> bool:
        """Whether training may go on after a save that has failed with `error` on all ranks alike; `settle` decides."""
        if not self._has_worked or machine.memory_only or error.code == "storage.stopped":
            return False
        return is_store_trouble(error) or (isinstance(error, DeadlineError) and error.code in _WAITED)

    def settle(self, handle: Handle, *, has_failed: bool, group: ProcessGroup | None, timeout_s: float) -> None:
        """The call of a save has ended, on all ranks alike. If it `has_failed`, or was skipped because the store is in
        trouble, warn, or raise the error that ends training, on all ranks. Collective."""
        if handle.memory_only:
            return
        is_skipped = handle.skipped and handle.durable.error is not None and _is_held_up(handle.durable.error)
        self._has_worked |= not (has_failed or is_skipped)
        if has_failed or is_skipped:
            self._settle_missed(handle.step, group, timeout_s)

    def _settle_missed(self, step: int, group: ProcessGroup | None, timeout_s: float) -> None:
        self._tell_age(step)
        if self._policy != "warn":
            deadline = Deadline(timeout_s)
            channel = default_channel(f"verdict on the save of step {step}", group, deadline=deadline, step=step)
            channel.exchange("verdict", b"", lambda _: self._judged(step), deadline)
            channel.await_readers(deadline)
        if self._is_first_rank:
            _log.warning(
                "training goes on without a checkpoint of step %d (%s in a row): %s",
                step,
                count(self._num_missed, "missed save"),
                self._told_age(step),
            )

    def check(self, step: int, held_up: str) -> None:
        """On the first rank, in an exchange: raise the error that ends training, if it is time. `held_up` is the reason
        why the keeper of some rank could not make a snapshot durable."""
        self._judged(step, held_up)

    def _judged(self, step: int, held_up: str = "") -> bytes:
        if isinstance(self._policy, StopAfter):
            since_s = self._waits_since_s
            waited_s = 0.0 if since_s is None else time.perf_counter() - since_s
            why = self._policy.why(num_missed=self._num_missed, waited_s=waited_s)
            if why:
                raise stopped(step, why, self._told_age(step), self._last_error or held_up)
        return b""

    def _told_age(self, step: int) -> str:
        durable = self._durable
        if durable is None:
            return "no checkpoint of this job is durable yet"
        age_s = time.perf_counter() - durable.taken_s
        return (
            f"the newest durable checkpoint is that of step {durable.step}, {duration(age_s)} and "
            f"{count(max(step - durable.step, 0), 'step')} old"
        )

    def _tell_age(self, step: int) -> None:
        durable = self._durable
        if durable is not None:
            age_s = time.perf_counter() - durable.taken_s
            self._tell(RecoveryPointAged(step, durable.step, age_s, self._num_missed))


def _is_held_up(error: HoldfastError) -> bool:
    """Whether the `error` of a save that found no slot says that the keeper has failed, and is not only slow."""
    return bool(error.details)
