"""Events as metrics of Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from holdfast.checkpointer.events import Event, EventSource
from holdfast.observing.extras import imported_for
from holdfast.observing.measures import MEASURES, Measure, Reading, Readings

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

#: From a millisecond, as a save into memory takes, to the hour of a slow store.
_BUCKETS_S: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800, 3600)


class PrometheusMetrics:
    """Keeps metrics of Prometheus, called ``holdfast_...``, in `registry` (default: the global one), with the label
    ``rank``. Your program serves them (``prometheus_client.start_http_server``) or writes them to a file of the node
    exporter. Needs the package ``prometheus_client``, as in ``pip install holdfast[prometheus]``;
    without it, this raises `ConfigurationError`, code ``config.extra``.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        with imported_for("PrometheusMetrics", extra="prometheus"):
            from prometheus_client import REGISTRY
        to = REGISTRY if registry is None else registry
        self._readings = Readings()
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        for each in MEASURES:
            try:
                self._metrics[each.name] = self._registered(each, to)
            except ValueError as error:
                raise ValueError(
                    f"the registry has a metric holdfast_{each.name} already, probably of another PrometheusMetrics; "
                    "give that one to both Checkpointers, or each a registry of its own: "
                    "PrometheusMetrics(prometheus_client.CollectorRegistry())"
                ) from error

    @staticmethod
    def _registered(measure: Measure, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
        from prometheus_client import Counter, Gauge, Histogram

        name, labels = f"holdfast_{measure.name}", ("rank", *measure.labels)
        if measure.kind == "duration":
            return Histogram(name, measure.meaning, labels, unit=measure.unit, registry=registry, buckets=_BUCKETS_S)
        kind = Counter if measure.kind == "counter" else Gauge
        return kind(name, measure.meaning, labels, unit=measure.unit, registry=registry)

    def hear(self, event: Event, source: EventSource) -> None:
        """Update the metrics with the readings of `event`."""
        for reading in self._readings.of(event, source):
            self._note(reading, source)

    def _note(self, reading: Reading, source: EventSource) -> None:
        from prometheus_client import Counter, Gauge

        metric = self._metrics[reading.measure.name].labels(str(source.rank), *reading.labels)
        if isinstance(metric, Counter):
            metric.inc(reading.value)
        elif isinstance(metric, Gauge):
            metric.set(reading.value)
        else:
            metric.observe(reading.value)
