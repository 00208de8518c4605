"""Events as numbers over steps, for TensorBoard, Weights & Biases and MLflow. The user gives the object to write with,
so that none of them is imported here."""

from __future__ import annotations

from typing import Protocol

from holdfast.checkpointer.events import Event, EventSource
from holdfast.observing.measures import Reading, Readings
from holdfast.observing.recording import step_of


class _ScalarWriter(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float) -> None: ...


class _WandbRun(Protocol):
    def define_metric(self, name: str, step_metric: str | None = None) -> object: ...
    def log(self, data: dict[str, float], *, commit: bool) -> None: ...


class _MetricClient(Protocol):
    def log_metric(self, run_id: str, key: str, value: float, timestamp: int, step: int) -> object: ...


class _Series:
    """The numbers of each step: durations and gauges as they are, counters as their sums."""

    def __init__(self) -> None:
        self._readings = Readings()
        self._sums: dict[str, float] = {}

    def of(self, event: Event, source: EventSource) -> tuple[int, dict[str, float]]:
        """The step that `event` is about, and its numbers by name."""
        return step_of(event) or 0, {_name(each): self._value(each) for each in self._readings.of(event, source)}

    def _value(self, reading: Reading) -> float:
        if reading.measure.kind != "counter":
            return reading.value
        name = _name(reading)
        self._sums[name] = self._sums.get(name, 0.0) + reading.value
        return self._sums[name]


class TensorBoard:
    """Writes scalars called ``holdfast/save_blocked_seconds`` and so on with a ``SummaryWriter``."""

    def __init__(self, writer: _ScalarWriter) -> None:
        self._writer = writer
        self._series = _Series()

    def hear(self, event: Event, source: EventSource) -> None:
        """Write the scalars of `event`."""
        step, numbers = self._series.of(event, source)
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, walltime=event.at.unix_s)


class WeightsAndBiases:
    """Adds numbers to a run of Weights & Biases, as returned by ``wandb.init``, with ``holdfast/step`` as their axis.
    They come with the row that the program itself logs next, so that they do not move its step."""

    def __init__(self, run: _WandbRun) -> None:
        run.define_metric("holdfast/step")
        run.define_metric("holdfast/*", step_metric="holdfast/step")
        self._run = run
        self._series = _Series()

    def hear(self, event: Event, source: EventSource) -> None:
        """Add the numbers of `event`."""
        step, numbers = self._series.of(event, source)
        if numbers:
            self._run.log({"holdfast/step": step, **numbers}, commit=False)


class MLflow:
    """Logs metrics to the run `run_id` of MLflow with `client`, an ``mlflow.MlflowClient``: one that is the active run
    of the thread that trains is not that of this listener's thread."""

    def __init__(self, client: _MetricClient, run_id: str) -> None:
        self._client = client
        self._run_id = run_id
        self._series = _Series()

    def hear(self, event: Event, source: EventSource) -> None:
        """Log the metrics of `event`."""
        step, numbers = self._series.of(event, source)
        for name, value in numbers.items():
            self._client.log_metric(self._run_id, name, value, int(1000 * event.at.unix_s), step)


def _name(reading: Reading) -> str:
    parts = (reading.measure.name, *(label.replace(" ", "_") for label in reading.labels), reading.measure.unit)
    return "holdfast/" + "_".join(filter(None, parts))
