"""From events to the records that files and logs hold."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.checkpointer.events import (
    CheckpointerClosed,
    CheckpointerOpened,
    Event,
    EventsDropped,
    EventSource,
    ExportFailed,
    ExportFinished,
    IntervalChosen,
    ProtectionDelayed,
    RecoveryPointAged,
    RestoreFailed,
    RestoreReturned,
    SaveBegun,
    SaveCommitted,
    SaveDelayed,
    SaveFailed,
    SaveHeld,
    SaveMemoryReady,
    SavePlaced,
    SaveReturned,
    SaveSkipped,
    SaveStaged,
    SaveUnprotected,
    SaveUnwatched,
    SaveWaiting,
    StateRestored,
    StepLess,
    StepsTimed,
)
from holdfast.errors import HoldfastError
from holdfast.telemetry.event_record import LONGEST_S, EventRecord


def record_of(event: Event, source: EventSource) -> EventRecord:
    """The record of `event`."""
    place, tier = _where(event)
    error, message = _trouble(event)
    return EventRecord(
        event=type(event).__name__,
        unix_s=event.at.unix_s,
        clock_s=event.at.clock_s,
        run=source.run,
        rank=source.rank,
        world_size=source.world_size,
        host=source.host,
        process=source.process,
        step=step_of(event),
        place=place,
        tier=tier,
        seconds=dict(_seconds(event)),
        numbers=_numbers(event),
        error=error,
        message=message,
    )


def step_of(event: Event) -> int | None:
    """The step that `event` is about; None if it is about none."""
    if isinstance(event, StepLess):
        return None
    return event.report.step if isinstance(event, StateRestored) else event.step


def _where(event: Event) -> tuple[str, str]:
    """The place of the checkpoint, and the tier, as far as `event` tells them."""
    match event:
        case SaveBegun():
            return "", event.tier
        case SavePlaced():
            return str(event.place), ""
        case StateRestored():
            return event.report.place or "", event.report.tier or ""
        case _:
            return "", ""


def _seconds(event: Event) -> Mapping[str, float]:
    match event:
        case SaveMemoryReady():
            return {"memory": event.waited_s}
        case SaveReturned():
            return {"blocked": event.blocked_s}
        case SaveCommitted():
            return event.seconds
        case StateRestored() if event.report.load is not None:
            return event.report.load.seconds
        case _:
            return _seconds_of_job(event)


def _seconds_of_job(event: Event) -> Mapping[str, float]:
    match event:
        case StepsTimed():
            totals = {"quiet_total": event.quiet_total_s, "saving_total": event.saving_total_s}
            return {"quiet": event.quiet_s, "saving": event.saving_s, **totals}
        case CheckpointerOpened():
            return {"age": event.age_s}
        case CheckpointerClosed():
            return {"waited": event.waited_s}
        case RecoveryPointAged():
            return {"age": event.age_s}
        case RestoreReturned() | RestoreFailed() | ExportFinished():
            return {"took": event.took_s}
        case IntervalChosen():
            return {"interval": min(event.interval_s, LONGEST_S), "mttf": min(event.mttf_s, LONGEST_S)}
        case _:
            return {}


def _numbers(event: Event) -> dict[str, int]:
    match event:
        case SaveBegun(memory_only=True):
            return {"memory_only": 1}
        case SaveStaged() | SaveCommitted() | SaveHeld() | ExportFinished():
            referenced = event.referenced_nbytes if isinstance(event, SaveCommitted) else 0
            return {"nbytes": event.nbytes} | ({"referenced": referenced} if referenced else {})
        case StepsTimed():
            return {"quiet": event.num_quiet, "saving": event.num_saving}
        case EventsDropped():
            return {"dropped": event.number}
        case _:
            return _numbers_of_job(event)


def _numbers_of_job(event: Event) -> dict[str, int]:
    match event:
        case RecoveryPointAged():
            return {"durable_step": event.durable_step, "missed": event.num_missed}
        case CheckpointerClosed():
            return {"early": int(event.is_early)}
        case IntervalChosen():
            return {"wasted_ppm": round(1e6 * event.wasted)}
        case StateRestored() if event.report.load is not None:
            return {"nbytes": event.report.load.read_nbytes}
        case _:
            return {}


def _trouble(event: Event) -> tuple[str, str]:
    """The code and the message of the trouble that `event` tells of."""
    match event:
        case SaveDelayed() | ProtectionDelayed():
            return "", event.trouble
        case SaveWaiting():
            return "", event.why
        case SaveSkipped() | SaveUnwatched() | SaveFailed() | SaveUnprotected() | ExportFailed():
            return event.error.code, event.error.message
        case RestoreFailed(error=HoldfastError() as error):
            return error.code, error.message
        case RestoreFailed():
            return type(event.error).__name__, str(event.error)
        case _:
            return "", ""
