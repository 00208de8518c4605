"""What happens to saves and restores, as it is told to listeners: handles and the log, and whoever comes later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.checkpointer.restore_report import RestoreReport, Tier
from holdfast.errors import HoldfastError
from holdfast.format.records import Place
from holdfast.store.base import Location


@dataclass(frozen=True, slots=True)
class SaveBegun:
    """A save goes to `tier`. A save that falls back from memory to storage begins twice."""

    step: int
    tier: Tier
    is_first_rank: bool


@dataclass(frozen=True, slots=True)
class SavePlaced:
    """All ranks have agreed on a plan, and on the place in the history of the run."""

    step: int
    place: Place


@dataclass(frozen=True, slots=True)
class SaveSkipped:
    """No slot of memory was free, and the job does not wait for one; `error` says so."""

    step: int
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class SaveStaged:
    """The part of this rank, of `nbytes`, is copied: it survives this process."""

    step: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SaveSealed:
    """The keeper has hashed the part of this rank, and its header is written."""

    step: int


@dataclass(frozen=True, slots=True)
class SaveDelayed:
    """The last try to make it durable failed; `trouble` says why. It is tried again."""

    step: int
    trouble: str


@dataclass(frozen=True, slots=True)
class SaveCommitted:
    """The checkpoint is durable, of all ranks, and committed; `nbytes` are this rank's, as far as it knows."""

    step: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SaveUnwatched:
    """Nobody in this process hears any more how it ends; `error` says so. The keeper goes on."""

    step: int
    error: HoldfastError


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """Nothing will come of it. `is_raised`: the call of `save` raises `error`. `cause` is a defect behind it."""

    step: int
    error: HoldfastError
    is_raised: bool = False
    cause: BaseException | None = None


@dataclass(frozen=True, slots=True)
class StateRestored:
    """`restore` has filled the state from a checkpoint of `run`, or found that there is none yet, as `report` says."""

    run: Location
    report: RestoreReport
    is_first_rank: bool


SaveEvent = (
    SaveBegun
    | SavePlaced
    | SaveSkipped
    | SaveStaged
    | SaveSealed
    | SaveDelayed
    | SaveCommitted
    | SaveUnwatched
    | SaveFailed
)

#: Is called in the thread in which the event happens, which may be any, and must not raise. An exception in that thread
#: (Ctrl-C, say) may have it called again with the same event.
Listener = Callable[[SaveEvent], None]
