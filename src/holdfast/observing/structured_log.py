"""Events as lines of a log, with fields for programs."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from holdfast.checkpointer.events import (
    Event,
    EventsDropped,
    EventSource,
    RestoreFailed,
    SaveDelayed,
    SaveFailed,
    SaveSkipped,
)
from holdfast.observing.recording import record_of
from holdfast.telemetry.event_record import EventRecord

_TROUBLE: Final = (SaveDelayed, SaveSkipped, SaveFailed, RestoreFailed, EventsDropped)


class StructuredLog:
    """Logs each event to `logger` (default: ``holdfast.events``), at the level WARNING if it tells of trouble, else at
    INFO.

    The message is ``event=SaveStaged rank=3 step=1200 nbytes=...``; the record has the same fields, as a dict, in its
    attribute ``holdfast``, for formatters that write JSON.
    """

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logging.getLogger("holdfast.events") if logger is None else logger

    def hear(self, event: Event, source: EventSource) -> None:
        """Log the event."""
        level = logging.WARNING if isinstance(event, _TROUBLE) else logging.INFO
        if self._logger.isEnabledFor(level):
            record = record_of(event, source)
            self._logger.log(level, "%s", _logfmt(record), extra={"holdfast": msgspec.to_builtins(record)})


def _logfmt(record: EventRecord) -> str:
    """The fields that tell of the event, not of its process, on one line."""
    told: dict[str, object] = {"event": record.event, "rank": record.rank}
    if record.step is not None:
        told["step"] = record.step
    told |= {name: text for name, text in (("place", record.place), ("tier", record.tier)) if text}
    told |= {f"{name}_s": f"{seconds:.4g}" for name, seconds in record.seconds.items()}
    told |= record.numbers
    told |= {name: text for name, text in (("error", record.error), ("message", record.message)) if text}
    return " ".join(f"{name}={_quoted(str(value))}" for name, value in told.items())


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode() if set(text) & set(' "=\n\t') else text
