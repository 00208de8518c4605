"""Listeners that keep metrics, with the real packages where they are installed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.observing import MLflow, OpenTelemetryMetrics, PrometheusMetrics, TensorBoard, WeightsAndBiases
from holdfast.observing.measures import MEASURES
from tests.observing.heard import EVENTS, tell

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "observability.md"
#: The numbers of all events, as series over steps.
SERIES = {
    "holdfast/step_no_seconds": 0.5,
    "holdfast/step_yes_seconds": 0.625,
    "holdfast/save_blocked_seconds": 0.004,
    "holdfast/save_staged_seconds": 0.5,
    "holdfast/save_delays": 1.0,
    "holdfast/saves_committed": 1.0,
    "holdfast/saved_bytes": 1000.0,
    "holdfast/durable_step": 99.0,
    "holdfast/save_durable_seconds": 2.0,
    "holdfast/recovery_point_timestamp_seconds": 1_790_000_000.0,
    "holdfast/memory_recovery_point_timestamp_seconds": 1_790_000_000.0,
    "holdfast/saves_failed": 1.0,
    "holdfast/events_dropped": 3.0,
}


def test_the_guide_has_a_row_for_every_measure() -> None:
    rows = re.findall(r"^\| `holdfast_([a-z_]+)` \|", PAGE.read_text(), re.MULTILINE)
    units = {"": "", "seconds": "_seconds", "bytes": "_bytes"}
    ends = {"counter": "_total", "gauge": "", "duration": ""}
    assert rows == [f"{each.name}{units[each.unit]}{ends[each.kind]}" for each in MEASURES]


def test_prometheus_serves_the_metrics() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    tell(PrometheusMetrics(registry))
    text = prometheus.generate_latest(registry).decode()
    for line in (
        'holdfast_save_blocked_seconds_sum{rank="0"} 0.004',
        'holdfast_save_staged_seconds_sum{rank="0"} 0.5',
        'holdfast_save_durable_seconds_bucket{le="3.0",rank="0"} 1.0',
        'holdfast_save_durable_seconds_bucket{le="1.0",rank="0"} 0.0',
        'holdfast_saves_total{outcome="committed",rank="0"} 1.0',
        'holdfast_saves_total{outcome="failed",rank="0"} 1.0',
        'holdfast_saved_bytes_total{rank="0"} 1000.0',
        'holdfast_durable_step{rank="0"} 99.0',
        'holdfast_recovery_point_timestamp_seconds{rank="0"} 1.79e+09',
        'holdfast_memory_recovery_point_timestamp_seconds{rank="0"} 1.79e+09',
        'holdfast_step_seconds{rank="0",saving="yes"} 0.625',
        'holdfast_events_dropped_total{rank="0"} 3.0',
    ):
        assert line in text.splitlines()


def test_a_second_object_in_one_registry_is_told_what_to_do() -> None:
    """It was a bare error about a duplicated timeseries."""
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    tell(PrometheusMetrics(registry))
    with pytest.raises(ValueError, match="give that one to both Checkpointers, or each a registry of its own"):
        PrometheusMetrics(registry)


def test_prometheus_metrics_have_the_names_of_the_guide() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    PrometheusMetrics(registry)
    described = re.findall(r"^# HELP (\w+) ", prometheus.generate_latest(registry).decode(), re.MULTILINE)
    rows = re.findall(r"^\| `(holdfast_[a-z_]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(described) == sorted(rows)


def test_open_telemetry_exports_the_metrics() -> None:
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    export = importlib.import_module("opentelemetry.sdk.metrics.export")
    reader = export.InMemoryMetricReader()
    provider = metrics.MeterProvider(metric_readers=[reader])
    tell(OpenTelemetryMetrics(provider.get_meter("test")))
    found = {
        metric.name: (metric.unit, metric.data.data_points)
        for resource in reader.get_metrics_data().resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    provider.shutdown()
    unit, (point,) = found["holdfast.save.durable"]
    assert (unit, point.sum, point.attributes) == ("s", 2.0, {"rank": 0, "run": "/runs/gpt"})
    assert {point.attributes["outcome"]: point.value for point in found["holdfast.saves"][1]} == {
        "committed": 1,
        "failed": 1,
    }
    assert [point.value for point in found["holdfast.durable.step"][1]] == [99]


def test_tensorboard_reads_the_scalars(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    with importlib.import_module("torch.utils.tensorboard").SummaryWriter(str(tmp_path)) as writer:
        tell(TensorBoard(writer))
    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]} == pytest.approx(SERIES)
    (durable,) = events.Scalars("holdfast/save_durable_seconds")
    assert (durable.step, durable.wall_time) == (99, pytest.approx(1_790_000_002.0))


@pytest.mark.slow
def test_weights_and_biases_records_the_numbers_with_the_rows_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = wandb.init(project="test", dir=str(tmp_path))
    run.log({"loss": 2.0})
    tell(WeightsAndBiases(run))
    run.log({"loss": 1.0})
    summary = dict(run.summary)
    rows = run.step
    run.finish()
    assert rows == 2
    assert summary["holdfast/save_durable_seconds"] == 2.0
    assert summary["loss"] == 1.0


@pytest.mark.slow
def test_mlflow_logs_the_metrics_of_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no other store
    client = mlflow.MlflowClient(tracking_uri=str(tmp_path / "mlruns"))
    run_id = client.create_run(client.create_experiment("test")).info.run_id
    tell(MLflow(client, run_id))
    assert client.get_run(run_id).data.metrics == pytest.approx(SERIES)
    (durable,) = client.get_metric_history(run_id, "holdfast/save_durable_seconds")
    assert (durable.step, durable.timestamp) == (99, 1_790_000_002_000)


class Table:
    """Stands for a run of Weights & Biases and for a client of MLflow."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.logged: dict[str, float] = {}
        self.defined: list[tuple[str, str | None]] = []

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.defined.append((name, step_metric))

    def log(self, data: dict[str, float], *, commit: bool) -> None:
        assert not commit
        self.rows.append(data)

    def log_metric(self, run_id: str, key: str, value: float, timestamp: int, step: int) -> None:
        assert run_id == "r1"
        self.logged[key] = value


def test_numbers_for_dashboards_have_their_step_as_axis() -> None:
    table: Any = Table()
    tell(WeightsAndBiases(table))
    tell(MLflow(table, "r1"))
    assert table.logged == pytest.approx(SERIES)
    merged: dict[str, float] = {}
    for row in table.rows:
        merged |= row
    assert merged == pytest.approx(SERIES | {"holdfast/step": 0})
    assert table.defined == [("holdfast/step", None), ("holdfast/*", "holdfast/step")]
    assert len(EVENTS) > len(table.rows) > 0
