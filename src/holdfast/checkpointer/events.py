"""The events of saves, of restores, and of the steps between them. Listeners, such as handles, hear them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from holdfast.checkpointer.restore_report import RestoreReport, Tier
from holdfast.errors import HoldfastError
from holdfast.format.records import Place
from holdfast.store.base import Location


class Moment(NamedTuple):
    """A moment: in unix seconds, which can be compared between nodes, and by a clock of this process that never jumps,
    which durations are made of."""

    unix_s: float
    clock_s: float

    @staticmethod
    def now() -> Moment:
        """The present moment."""
        return Moment(time.time(), time.perf_counter())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """The base of all events: the moment at which this rank saw it happen. Events that differ only there are equal."""

    at: Moment = field(default_factory=Moment.now, compare=False)


@dataclass(frozen=True, slots=True)
class SaveBegun(_Timed):
    """The save starts on `tier`. A save that falls back from memory to storage starts twice. With `memory_only`, it is
    to stay in memory."""

    step: int
    tier: Tier
    is_first_rank: bool
    memory_only: bool = False


@dataclass(frozen=True, slots=True)
class SaveMemoryReady(_Timed):
    """The memory for the save's plan, a new one, is ready on all ranks. This rank waited for it for `waited_s`."""

    step: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class SavePlaced(_Timed):
    """All ranks have agreed on a plan, and on the checkpoint's place in the history of the run."""

    step: int
    place: Place


@dataclass(frozen=True, slots=True)
class SaveWaiting(_Timed):
    """The save has waited for a slot of memory for some seconds, and goes on to wait; `why` says what keeps them."""

    step: int
    why: str


@dataclass(frozen=True, slots=True)
class SaveSkipped(_Timed):
    """The save was skipped, because no slot of memory was free; `error` says so."""

    step: int
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class SaveStaged(_Timed):
    """This rank's part, of `nbytes`, is copied, and survives this process."""

    step: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SaveSealed(_Timed):
    """The keeper has hashed this rank's part and written its header."""

    step: int


@dataclass(frozen=True, slots=True)
class SaveProtected(_Timed):
    """All files of the checkpoint have their copies on other nodes."""

    step: int


@dataclass(frozen=True, slots=True)
class ProtectionDelayed(_Timed):
    """The last try to protect the checkpoint failed; `trouble` says why. The keeper tries again."""

    step: int
    trouble: str


@dataclass(frozen=True, slots=True)
class SaveUnprotected(_Timed):
    """The checkpoint will not be protected by copies on other nodes; `error` says why. The save goes on."""

    step: int
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class SaveHeld(_Timed):
    """A save to memory alone has succeeded: this rank's part is sealed, and stays in memory until a newer checkpoint is
    there too. If the job ends before, the keeper makes it durable."""

    step: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SaveDelayed(_Timed):
    """The last try to make the checkpoint durable failed; `trouble` says why. The keeper tries again."""

    step: int
    trouble: str


@dataclass(frozen=True, slots=True)
class SaveCommitted(_Timed):
    """The checkpoint of all ranks is durable and committed. `nbytes` are the bytes of this rank that went to storage,
    and ``referenced_nbytes`` those that did not, because an earlier checkpoint has them there; as far as this rank
    knows them. For a save to storage, ``seconds`` says how long each phase took on this rank, in their order."""

    step: int
    nbytes: int
    seconds: Mapping[str, float] = field(default_factory=dict)
    referenced_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class SaveUnwatched(_Timed):
    """This process no longer watches the save, and will not hear how it ends; `error` says so. The keeper goes on."""

    step: int
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class SaveFailed(_Timed):
    """The save failed. With `is_raised`, the call of `save` raises `error`. `cause` is the unexpected exception behind
    it, if there is one."""

    step: int
    error: HoldfastError
    is_raised: bool = False
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True)
class SaveReturned(_Timed):
    """The call of `save` has returned, and training goes on: it was blocked for ``blocked_s``. The save may have ended
    before."""

    step: int
    blocked_s: float


@dataclass(frozen=True, slots=True)
class StepsTimed(_Timed):
    """The median time of the steps up to `step` since the last such event: ``quiet_s`` of the `num_quiet` steps at
    whose beginning no save was under way, ``saving_s`` of the `num_saving` others; and the sums of their times. (A
    median of no steps is 0.) The time that `Checkpointer.step` takes is no part of a step."""

    step: int
    num_quiet: int
    quiet_s: float
    num_saving: int
    saving_s: float
    quiet_total_s: float
    saving_total_s: float


@dataclass(frozen=True, slots=True)
class FirstStepEnded(_Timed):
    """`step` has ended, the first one of this `Checkpointer`, or the first one since a restore. `StepsTimed` does not
    count it, because nothing says when it began."""

    step: int


@dataclass(frozen=True, slots=True)
class CheckpointerOpened(_Timed):
    """The first call of a `Checkpointer`, in a process that was started ``age_s`` before."""

    age_s: float


@dataclass(frozen=True, slots=True)
class CheckpointerClosed(_Timed):
    """The end of a `Checkpointer`, which waited ``waited_s`` for its saves. `is_early`: a preemption or an exception
    ended training."""

    waited_s: float
    is_early: bool


@dataclass(frozen=True, slots=True)
class EventsDropped(_Timed):
    """The listeners are so slow that `number` events before this one were dropped."""

    number: int


@dataclass(frozen=True, slots=True)
class StateRestored(_Timed):
    """`restore` has filled the state from a checkpoint of `run`, or has found none; `report` says which."""

    run: Location
    report: RestoreReport
    is_first_rank: bool


@dataclass(frozen=True, slots=True)
class RestoreReturned(_Timed):
    """The call of `restore` has returned, after ``took_s``."""

    took_s: float


@dataclass(frozen=True, slots=True)
class RestoreFailed(_Timed):
    """The call of `restore` has raised `error`, after ``took_s``."""

    took_s: float
    error: BaseException


@dataclass(frozen=True, slots=True)
class IntervalChosen(_Timed):
    """The policy `Auto` saves every ``interval_s`` from now on. It expects a failure every ``mttf_s``, and that saves
    and the work that failures undo take the share `wasted` of the time of training."""

    interval_s: float
    mttf_s: float
    wasted: float


@dataclass(frozen=True, slots=True)
class RecoveryPointAged(_Timed):
    """A save of `step` began, or failed. The newest durable checkpoint is that of `durable_step`, whose state was taken
    ``age_s`` before, or restored then. `num_missed` saves in a row have made no checkpoint since."""

    step: int
    durable_step: int
    age_s: float
    num_missed: int


@dataclass(frozen=True, slots=True)
class ExportFinished(_Timed):
    """`ExportHub` has written the checkpoint of `step` into the folder `path`, which is whole and durable: `nbytes` in
    ``took_s``."""

    step: int
    path: str
    nbytes: int
    took_s: float


@dataclass(frozen=True, slots=True)
class ExportFailed(_Timed):
    """`ExportHub` could not write the checkpoint of `step`, or gave it up for a newer one; `error` says why."""

    step: int
    error: HoldfastError


SaveEvent = (
    SaveBegun
    | SaveMemoryReady
    | SavePlaced
    | SaveWaiting
    | SaveSkipped
    | SaveStaged
    | SaveSealed
    | SaveProtected
    | ProtectionDelayed
    | SaveUnprotected
    | SaveHeld
    | SaveDelayed
    | SaveCommitted
    | SaveUnwatched
    | SaveFailed
    | SaveReturned
)
#: Events that are about no step.
StepLess = CheckpointerOpened | CheckpointerClosed | RestoreReturned | RestoreFailed | IntervalChosen | EventsDropped
ExportEvent = ExportFinished | ExportFailed
Event = SaveEvent | ExportEvent | StateRestored | StepsTimed | FirstStepEnded | RecoveryPointAged | StepLess

#: A function that hears events. It is called in the thread of the event, which may be any thread, and must not raise.
#: After an exception in that thread (Ctrl-C, say) it may be called again with the same event.
Listener = Callable[[SaveEvent], None]


class EventSource(NamedTuple):
    """The origin of events: a rank of a job of `world_size` ranks, and what it saves into. `host` is the name of its
    machine, `process` the number of its process."""

    run: str
    rank: int
    world_size: int
    host: str
    process: int


class EventListener(Protocol):
    """A listener that users give to a `Checkpointer`."""

    def hear(self, event: Event, source: EventSource) -> None:
        """Hear an event. A thread of the `Checkpointer` calls this, one event at a time, in their order; training does
        not wait for it. If it raises, the log says so once for each kind of exception, and it hears the next event."""


@runtime_checkable
class CheckingListener(EventListener, Protocol):
    """A listener that not every run suits."""

    def check(self, run: str) -> None:
        """The listener was given to a `Checkpointer` of `run`. Raises `ConfigurationError` if it could hear none of its
        events: later errors would only be in the log."""


@runtime_checkable
class WorkingListener(EventListener, Protocol):
    """A listener that works in a thread of its own on what it hears, and whose work users wait for."""

    def begin(self, tell: Callable[[Event], None]) -> None:
        """The listener was given to a `Checkpointer`. `tell` brings events of its own to all listeners."""

    def finish(self, timeout_s: float, *, is_last: bool) -> None:
        """Return when the work on all events that were heard is done; `is_last` says that there will be no others.

        Raises the error of work that failed, unless later work succeeded, and `DeadlineError` after `timeout_s`.
        """
