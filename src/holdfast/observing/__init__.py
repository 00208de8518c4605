"""Listeners for the events of a `Checkpointer`: to files, logs, metrics and dashboards.

    >>> from holdfast.observing import JsonLines, PrometheusMetrics
    >>> Checkpointer("runs/gpt", state, listeners=[JsonLines(), PrometheusMetrics()])

A listener is an object with the method ``hear(event, source)``; write your own as easily. Ranks may have different
listeners.
"""

from __future__ import annotations

from holdfast.checkpointer.events import (
    CheckpointerClosed,
    CheckpointerOpened,
    Event,
    EventListener,
    EventsDropped,
    EventSource,
    ExportFailed,
    ExportFinished,
    FirstStepEnded,
    IntervalChosen,
    Moment,
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
    SaveProtected,
    SaveReturned,
    SaveSealed,
    SaveSkipped,
    SaveStaged,
    SaveUnprotected,
    SaveUnwatched,
    SaveWaiting,
    StateRestored,
    StepsTimed,
)
from holdfast.observing.json_lines import JsonLines
from holdfast.observing.open_telemetry import OpenTelemetryMetrics
from holdfast.observing.open_telemetry_traces import OpenTelemetryTraces
from holdfast.observing.prometheus import PrometheusMetrics
from holdfast.observing.scalars import MLflow, TensorBoard, WeightsAndBiases
from holdfast.observing.structured_log import StructuredLog
from holdfast.observing.terminal_line import TerminalLine

__all__ = [
    "CheckpointerClosed",
    "CheckpointerOpened",
    "Event",
    "EventListener",
    "EventSource",
    "EventsDropped",
    "ExportFailed",
    "ExportFinished",
    "FirstStepEnded",
    "IntervalChosen",
    "JsonLines",
    "MLflow",
    "Moment",
    "OpenTelemetryMetrics",
    "OpenTelemetryTraces",
    "PrometheusMetrics",
    "ProtectionDelayed",
    "RecoveryPointAged",
    "RestoreFailed",
    "RestoreReturned",
    "SaveBegun",
    "SaveCommitted",
    "SaveDelayed",
    "SaveFailed",
    "SaveHeld",
    "SaveMemoryReady",
    "SavePlaced",
    "SaveProtected",
    "SaveReturned",
    "SaveSealed",
    "SaveSkipped",
    "SaveStaged",
    "SaveUnprotected",
    "SaveUnwatched",
    "SaveWaiting",
    "StateRestored",
    "StepsTimed",
    "StructuredLog",
    "TensorBoard",
    "TerminalLine",
    "WeightsAndBiases",
]
