"""The events of saves and restores. Listeners, such as handles and the log, hear of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.checkpointer.restore_report import RestoreReport, Tier
from holdfast.errors import HoldfastError
from holdfast.format.records import Place
from holdfast.store.base import Location


@dataclass(frozen=True, slots=True)
class SaveBegun:
    """The save starts on `tier`. A save that falls back from memory to storage starts twice."""

    step: int
    tier: Tier
    is_first_rank: bool


@dataclass(frozen=True, slots=True)
class SaveMemoryReady:
    """The memory for the save's plan, a new one, is ready on all ranks. This rank waited for it for `waited_s`."""

    step: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class SavePlaced:
    """All ranks have agreed on a plan, and on the checkpoint's place in the history of the run."""

    step: int
    place: Place


@dataclass(frozen=True, slots=True)
class SaveSkipped:
    """The save was skipped, because no slot of memory was free; `error` says so."""

    step: int
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class SaveStaged:
    """This rank's part, of `nbytes`, is copied, and survives this process."""

    step: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SaveSealed:
    """The keeper has hashed this rank's part and written its header."""

    step: int


@dataclass(frozen=True, slots=True)
class SaveDelayed:
    """The last try to make the checkpoint durable failed; `trouble` says why. The keeper tries again."""

    step: int
    trouble: str


@dataclass(frozen=True, slots=True)
class SaveCommitted:
    """The checkpoint of all ranks is durable and committed. `nbytes` is the size of this rank's part, as far as this
    rank knows it."""

    step: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SaveUnwatched:
    """This process no longer watches the save, and will not hear how it ends; `error` says so. The keeper goes on."""

    step: int
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """The save failed. With `is_raised`, the call of `save` raises `error`. `cause` is the unexpected exception behind
    it, if there is one."""

    step: int
    error: HoldfastError
    is_raised: bool = False
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StateRestored:
    """`restore` has filled the state from a checkpoint of `run`, or has found none; `report` says which."""

    run: Location
    report: RestoreReport
    is_first_rank: bool


SaveEvent = (
    SaveBegun
    | SaveMemoryReady
    | SavePlaced
    | SaveSkipped
    | SaveStaged
    | SaveSealed
    | SaveDelayed
    | SaveCommitted
    | SaveUnwatched
    | SaveFailed
)

#: A function that hears events. It is called in the thread of the event, which may be any thread, and must not raise.
#: After an exception in that thread (Ctrl-C, say) it may be called again with the same event.
Listener = Callable[[SaveEvent], None]
