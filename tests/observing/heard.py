"""Events for listeners: one save that became durable, one that failed, steps, and a restore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from holdfast.errors import StorageError
from holdfast.format.records import Place
from holdfast.observing import (
    Event,
    EventListener,
    EventsDropped,
    EventSource,
    Moment,
    SaveBegun,
    SaveCommitted,
    SaveDelayed,
    SaveFailed,
    SavePlaced,
    SaveReturned,
    SaveSealed,
    SaveStaged,
    StepsTimed,
)

SOURCE: Final = EventSource("/runs/gpt", 0, 2, "node0", 41)
FULL: Final = StorageError("the disk is full.", code="storage.full", action="Make room.")


def at(seconds: float) -> Moment:
    """The moment so many seconds after the first event."""
    return Moment(1_790_000_000.0 + seconds, 50.0 + seconds)


DURABLE_SAVE: Final[Sequence[Event]] = (
    SaveBegun(99, "node memory", is_first_rank=True, at=at(0)),
    SaveReturned(99, 0.004, at=at(0.004)),
    SavePlaced(99, Place(1, 2), at=at(0.01)),
    SaveStaged(99, 1000, at=at(0.5)),
    SaveSealed(99, at=at(0.75)),
    SaveDelayed(99, "no answer", at=at(1)),
    SaveCommitted(99, 1000, at=at(2)),
)
FAILED_SAVE: Final[Sequence[Event]] = (
    SaveBegun(199, "node memory", is_first_rank=True, at=at(60)),
    SaveFailed(199, FULL, at=at(61)),
)
STEPS: Final = StepsTimed(99, 90, 0.5, 10, 0.625, 45.0, 6.25, at=at(0))
EVENTS: Final[Sequence[Event]] = (STEPS, *DURABLE_SAVE, *FAILED_SAVE, EventsDropped(3, at=at(62)))


def tell(listener: EventListener, events: Sequence[Event] = EVENTS, source: EventSource = SOURCE) -> None:
    """Tell `listener` events, as a `Checkpointer` does."""
    for event in events:
        listener.hear(event, source)
