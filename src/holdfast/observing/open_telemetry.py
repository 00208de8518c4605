"""Events as metrics of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast.checkpointer.events import Event, EventSource
from holdfast.observing.measures import MEASURES, Measure, Readings

_Attributes = dict[str, str | int]


class _Histogram(Protocol):
    def record(self, amount: float, attributes: _Attributes) -> None: ...


class _Counter(Protocol):
    def add(self, amount: float, attributes: _Attributes) -> None: ...


class _Gauge(Protocol):
    def set(self, amount: float, attributes: _Attributes) -> None: ...


class _InstrumentMaker(Protocol):
    def create_histogram(self, name: str, unit: str, description: str) -> _Histogram: ...
    def create_counter(self, name: str, unit: str, description: str) -> _Counter: ...
    def create_gauge(self, name: str, unit: str, description: str) -> _Gauge: ...


class OpenTelemetryMetrics:
    """Records metrics called ``holdfast.save.blocked`` and so on with `meter`, which your program gets from
    ``opentelemetry.metrics.get_meter``. They have the attributes ``rank`` and ``run``. Needs no package beyond the one
    that the meter is from.
    """

    def __init__(self, meter: _InstrumentMaker) -> None:
        self._readings = Readings()
        self._record = {each.name: _instrument(meter, each) for each in MEASURES}

    def hear(self, event: Event, source: EventSource) -> None:
        """Record the readings of `event`."""
        for reading in self._readings.of(event, source):
            attributes: _Attributes = {"rank": source.rank, "run": source.run}
            attributes |= dict(zip(reading.measure.labels, reading.labels, strict=True))
            self._record[reading.measure.name](reading.value, attributes)


def _instrument(meter: _InstrumentMaker, measure: Measure) -> Callable[[float, _Attributes], None]:
    """The function that records a reading of `measure`."""
    name = f"holdfast.{measure.name.replace('_', '.')}"
    unit = {"seconds": "s", "bytes": "By", "": "1"}[measure.unit]
    if measure.kind == "duration":
        return meter.create_histogram(name, unit, measure.meaning).record
    if measure.kind == "counter":
        return meter.create_counter(name, unit, measure.meaning).add
    return meter.create_gauge(name, unit, measure.meaning).set
