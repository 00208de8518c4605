"""Saves and restores as spans, with the real SDK of OpenTelemetry."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.errors import ConfigurationError
from holdfast.format.records import Place
from holdfast.observing import (
    CheckpointerClosed,
    Event,
    OpenTelemetryTraces,
    PrometheusMetrics,
    RestoreFailed,
    SaveBegun,
    SaveCommitted,
    SaveHeld,
    SavePlaced,
    SaveReturned,
    SaveStaged,
)
from tests.observing.heard import DURABLE_SAVE, EVENTS, FAILED_SAVE, FULL, SOURCE, at, tell
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks

pytest.importorskip("opentelemetry.sdk")
trace = importlib.import_module("opentelemetry.sdk.trace")
export = importlib.import_module("opentelemetry.sdk.trace.export")
in_memory = importlib.import_module("opentelemetry.sdk.trace.export.in_memory_span_exporter")
status = importlib.import_module("opentelemetry.trace").StatusCode

#: The moment 0 of `at`, in nanoseconds.
BEGUN_NS = 1_790_000_000 * 10**9


class Spans:
    """A provider whose spans stay in memory."""

    def __init__(self) -> None:
        self.exporter = in_memory.InMemorySpanExporter()
        self.provider = trace.TracerProvider()
        self.provider.add_span_processor(export.SimpleSpanProcessor(self.exporter))

    @property
    def roots(self) -> list[Any]:
        return [span for span in self.exporter.get_finished_spans() if span.parent is None]

    def children(self, root: Any) -> list[Any]:
        spans = self.exporter.get_finished_spans()
        return [span for span in spans if span.parent is not None and span.parent.span_id == root.context.span_id]


@pytest.fixture
def spans() -> Iterator[Spans]:
    made = Spans()
    yield made
    made.provider.shutdown()


def times(span: Any) -> tuple[float, float]:
    """The begin and the length of a span, in seconds, as exact as a wall clock's."""
    return round((span.start_time - BEGUN_NS) / 1e9, 5), round((span.end_time - span.start_time) / 1e9, 5)


def test_a_save_is_a_span_whose_children_are_its_phases(spans: Spans) -> None:
    tell(OpenTelemetryTraces(spans.provider), DURABLE_SAVE)
    (root,) = spans.roots
    assert (root.name, times(root)) == ("holdfast.save", (0.0, 2.0))
    assert dict(root.attributes) == {
        "run": "/runs/gpt",
        "rank": 0,
        "step": 99,
        "place": "1.2",
        "tier": "node memory",
        "nbytes": 1000,
        "outcome": "committed",
        "delays": 1,
    }
    assert root.status.status_code == status.UNSET
    found = {child.name: times(child) for child in spans.children(root)}
    assert list(found) == [f"holdfast.save.{phase}" for phase in ("agree", "copy", "seal", "store")]
    expected = [(0.0, 0.01), (0.01, 0.49), (0.5, 0.25), (0.75, 1.25)]
    assert list(found.values()) == expected
    assert {child.context.trace_id for child in spans.children(root)} == {root.context.trace_id}


def test_a_save_that_failed_has_the_status_and_the_reason(spans: Spans) -> None:
    tell(OpenTelemetryTraces(spans.provider), FAILED_SAVE)
    (root,) = spans.roots
    assert (root.status.status_code, root.status.description) == (status.ERROR, "the disk is full.")
    assert (root.attributes["outcome"], root.attributes["error.type"]) == ("failed", "storage.full")
    assert times(root) == (60.0, 1.0)


def test_a_restore_that_failed_has_the_status_and_the_reason(spans: Spans) -> None:
    tell(OpenTelemetryTraces(spans.provider), [RestoreFailed(5.0, FULL, at=at(30))])
    (root,) = spans.roots
    assert (root.name, times(root)) == ("holdfast.restore", (25.0, 5.0))
    assert (root.status.status_code, root.status.description) == (status.ERROR, "the disk is full.")
    assert dict(root.attributes) == {"run": "/runs/gpt", "rank": 0, "outcome": "failed", "error.type": "storage.full"}


def test_a_save_to_memory_alone_ends_when_it_is_held(spans: Spans) -> None:
    held: list[Event] = [
        SaveBegun(7, "node memory", is_first_rank=True, memory_only=True, at=at(0)),
        SavePlaced(7, Place(1, 2), at=at(1)),
        SaveStaged(7, 10, at=at(2)),
        SaveHeld(7, 10, at=at(4)),
    ]
    tell(OpenTelemetryTraces(spans.provider), held)
    (root,) = spans.roots
    assert root.attributes["outcome"] == "held"
    assert [child.name for child in spans.children(root)] == [
        f"holdfast.save.{phase}" for phase in ("agree", "copy", "seal")
    ]


def test_a_save_that_falls_back_to_storage_has_the_phases_of_storage(spans: Spans) -> None:
    seconds = {"write": 2.0, "commit": 1.0}
    events: list[Event] = [
        SaveBegun(7, "node memory", is_first_rank=True, at=at(0)),
        SaveBegun(7, "storage", is_first_rank=True, at=at(1)),
        SaveCommitted(7, 10, seconds, at=at(5)),
        SaveReturned(7, 5.0, at=at(5)),
    ]
    tell(OpenTelemetryTraces(spans.provider), events)
    (root,) = spans.roots
    assert (root.attributes["tier"], times(root)) == ("storage", (0.0, 5.0))
    found = [(child.name, *times(child)) for child in spans.children(root)]
    assert found == [
        ("holdfast.save.write", 2.0, 2.0),
        ("holdfast.save.commit", 4.0, 1.0),
    ]


def test_saves_that_are_under_way_at_the_end_have_their_span(spans: Spans) -> None:
    listener = OpenTelemetryTraces(spans.provider)
    tell(listener, DURABLE_SAVE[:4])
    tell(listener, [CheckpointerClosed(1.0, is_early=True, at=at(9))], SOURCE._replace(rank=1))
    assert spans.roots == []
    tell(listener, [CheckpointerClosed(1.0, is_early=True, at=at(9))])
    (root,) = spans.roots
    assert (root.attributes["outcome"], times(root)[0]) == ("under way", 0.0)


def test_a_step_that_is_saved_again_and_other_events_do_no_harm(spans: Spans) -> None:
    listener = OpenTelemetryTraces(spans.provider)
    tell(listener, [*EVENTS, *EVENTS])
    assert [root.attributes["step"] for root in spans.roots] == [99, 199] * 2


def train(run: str) -> list[list[tuple[str, str]]]:
    """Save and restore on each rank. Returns each span of this rank, and its phases: the names and outcomes."""
    found: list[list[tuple[str, str]]] = []
    spans = Spans()
    state = {"w": holdfast.PerRank(torch.full((100,), float(dist.get_rank())), on_resize="first")}
    listeners = [OpenTelemetryTraces(spans.provider)]
    for first in (0, 5):
        start_new_job()
        with holdfast.Checkpointer(run, state, memory=None, listeners=listeners) as checkpointer:
            checkpointer.restore()
            checkpointer.save(first)
    for root in spans.roots:
        children = spans.children(root)
        assert root.attributes["rank"] == dist.get_rank()
        assert all(root.start_time <= each.start_time <= each.end_time <= root.end_time for each in children)
        assert all(one.end_time == other.start_time for one, other in pairwise(children))
        found.append([(span.name, str(span.attributes.get("outcome", ""))) for span in (root, *children)])
    spans.provider.shutdown()
    return found


def test_each_rank_of_a_real_job_has_a_span_for_each_save_and_restore(run: str) -> None:
    for found in run_ranks(2, train, run):
        roots = [span[0] for span in found]
        assert roots == [
            ("holdfast.restore", "nothing to restore"),
            ("holdfast.save", "committed"),
            ("holdfast.restore", "restored"),
            ("holdfast.save", "committed"),
        ]
        for root, *phases in found:
            names = {name for name, _ in phases}
            if root == ("holdfast.save", "committed"):
                assert {"holdfast.save.write", "holdfast.save.commit"} <= names
        assert "holdfast.restore.read" in {name for name, _ in found[2]}


def test_without_its_package_a_listener_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for listener, extra in ((OpenTelemetryTraces, "opentelemetry"), (PrometheusMetrics, "prometheus")):
        with pytest.raises(ConfigurationError, match="is not installed") as caught:
            listener()
        assert caught.value.code == "config.extra"
        assert caught.value.action == f"pip install 'holdfast[{extra}]'"
