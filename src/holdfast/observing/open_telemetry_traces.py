"""Saves and restores as spans of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.checkpointer.events import (
    CheckpointerClosed,
    Event,
    EventSource,
    RestoreFailed,
    RestoreReturned,
    SaveBegun,
    SaveCommitted,
    SaveFailed,
    SaveHeld,
    SaveSkipped,
    SaveUnwatched,
    StateRestored,
)
from holdfast.observing.extras import imported_for
from holdfast.observing.recording import record_of
from holdfast.telemetry.event_record import EventRecord
from holdfast.telemetry.rank_saves import PhaseSpan, job_events

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_ENDS: Final = (SaveCommitted, SaveHeld, SaveSkipped, SaveFailed, SaveUnwatched)
_Attributes = dict[str, str | int]


class OpenTelemetryTraces:
    """Makes a span of each save and of each restore of this rank, called ``holdfast.save`` and ``holdfast.restore``,
    with a child for each phase (``holdfast.save.copy`` and so on), and their real times.

    Both have the attributes ``run``, ``rank``, ``step``, ``place``, ``tier``, ``nbytes`` and ``outcome``; of a save,
    ``delays`` counts the failed tries to make it durable. The outcome of a save is "committed", "held", "skipped",
    "failed" or "unwatched", or "under way" if the `Checkpointer` was closed before; that of a restore is "restored",
    "nothing to restore" or "failed". A span whose outcome is "failed" has the status ERROR, with the message of the
    error, and its code as ``error.type``.

    A span is made when its save or restore has ended; of a process that is killed meanwhile, there is none. It has no
    parent: each is a trace of its own.

    `tracer_provider` is the one to make spans with (default: the global one of ``opentelemetry.trace``). Needs the
    package ``opentelemetry-api``, as in ``pip install holdfast[opentelemetry]``, and an SDK that exports. Raises
    `ConfigurationError`, code ``config.extra``, without that package.
    """

    def __init__(self, tracer_provider: TracerProvider | None = None) -> None:
        with imported_for("OpenTelemetryTraces", extra="opentelemetry"):
            from opentelemetry import trace
        self._tracer = trace.get_tracer("holdfast", tracer_provider=tracer_provider)
        #: The known facts of the saves that are under way, and of the restore.
        self._saves: dict[tuple[EventSource, int], list[EventRecord]] = {}
        self._restored: dict[EventSource, EventRecord] = {}

    def hear(self, event: Event, source: EventSource) -> None:
        """Make a span, if `event` ends a save or a restore."""
        record = record_of(event, source)
        match event:
            case SaveBegun():
                self._saves.setdefault((source, event.step), []).append(record)
            case StateRestored():
                self._restored[source] = record
            case RestoreReturned() | RestoreFailed():
                self._end_restore(record, self._restored.pop(source, None), event.took_s)
            case CheckpointerClosed():
                for key in [key for key in self._saves if key[0] == source]:
                    self._end_save(self._saves.pop(key))
            case _ if record.step is not None and (source, record.step) in self._saves:
                self._saves[source, record.step].append(record)
                if isinstance(event, _ENDS):
                    self._end_save(self._saves.pop((source, record.step)))

    def _end_save(self, records: Sequence[EventRecord]) -> None:
        (save,) = job_events(records).saves
        attributes: _Attributes = {
            **_origin(records[0]),
            "step": save.step,
            "place": save.place,
            "tier": save.tier,
            "nbytes": save.nbytes,
            "outcome": save.outcome,
            "delays": save.num_delays,
        }
        last = records[-1]
        ended_s = records[0].unix_s + last.clock_s - records[0].clock_s
        error = last if save.outcome == "failed" else None
        self._span("holdfast.save", save.begun_s, ended_s, attributes, save.spans, error)

    def _end_restore(self, end: EventRecord, restored: EventRecord | None, took_s: float) -> None:
        has_failed = end.event == RestoreFailed.__name__
        attributes: _Attributes = dict(_origin(end))
        phases: list[PhaseSpan] = []
        if restored is not None:
            (restore,) = job_events([restored]).restores
            attributes |= {"place": restore.place, "tier": restore.tier, "nbytes": restore.nbytes}
            attributes |= {} if restore.step is None else {"step": restore.step}
            phases = restore.spans
        done = "restored" if "step" in attributes else "nothing to restore"
        attributes["outcome"] = "failed" if has_failed else done
        error = end if has_failed else None
        self._span("holdfast.restore", end.unix_s - took_s, end.unix_s, attributes, phases, error)

    def _span(
        self,
        name: str,
        begun_s: float,
        ended_s: float,
        attributes: Mapping[str, str | int],
        phases: Sequence[PhaseSpan],
        error: EventRecord | None,
    ) -> None:
        """Make a span and those of its `phases`, which lie within it."""
        from opentelemetry.context import Context
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        span = self._tracer.start_span(name, context=Context(), attributes=attributes, start_time=_nanoseconds(begun_s))
        for phase in phases:
            begins_s, ends_s = (min(max(at_s, begun_s), ended_s) for at_s in (phase.begun_s, _end_of(phase)))
            child = self._tracer.start_span(
                f"{name}.{phase.phase}", context=set_span_in_context(span, Context()), start_time=_nanoseconds(begins_s)
            )
            child.end(_nanoseconds(ends_s))
        if error is not None:
            span.set_attribute("error.type", error.error)
            span.set_status(Status(StatusCode.ERROR, error.message))
        span.end(_nanoseconds(ended_s))


def _origin(record: EventRecord) -> dict[str, str | int]:
    return {"run": record.run, "rank": record.rank}


def _end_of(phase: PhaseSpan) -> float:
    return phase.begun_s + phase.seconds


def _nanoseconds(unix_s: float) -> int:
    # Seconds of this size are exact to less than a microsecond.
    return 1000 * round(1e6 * unix_s)
