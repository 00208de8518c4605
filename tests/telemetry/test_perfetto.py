"""The trace has the form that Perfetto reads."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import msgspec
import pytest

from holdfast.telemetry.perfetto import trace_of
from holdfast.telemetry.rank_saves import job_events
from tests.support.recorded_job import PHASES, RankClock, recorded_job, recorded_save

#: The keys that the description of the format asks of an event, by its kind.
NEEDED = {"X": {"name", "ph", "pid", "tid", "ts", "dur"}, "M": {"name", "ph", "pid", "args"}}


def trace(*, num_ranks: int = 4, num_saves: int = 3) -> dict[str, Any]:
    document = msgspec.json.encode(trace_of(job_events(recorded_job(num_ranks=num_ranks, num_saves=num_saves))))
    read: dict[str, Any] = json.loads(document)
    return read


def test_the_document_has_the_form_of_the_format() -> None:
    document = trace()
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    for event in document["traceEvents"]:
        assert NEEDED[event["ph"]] <= event.keys()
        assert isinstance(event["name"], str)
        assert all(isinstance(event[name], int) for name in ("pid", "tid"))
        assert event["ts"] >= 0
        assert event["dur"] >= 0


def test_events_of_one_track_nest() -> None:
    tracks = defaultdict(list)
    for event in trace()["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append((event["ts"], event["dur"]))
    for events in tracks.values():
        open_ends: list[int] = []
        for begun, duration in sorted(events, key=lambda each: (each[0], -each[1])):
            while open_ends and open_ends[-1] <= begun:
                open_ends.pop()
            assert not open_ends or begun + duration <= open_ends[-1]
            open_ends.append(begun + duration)


def test_every_phase_of_every_save_and_load_is_there() -> None:
    events = [each for each in trace(num_ranks=2, num_saves=3)["traceEvents"] if each["cat"] == "phase"]
    names = [each["name"] for each in events if each["pid"] == 1]
    assert sorted(names) == sorted([*list(PHASES) * 3, "open", "plan", "read"])
    copies = [each["dur"] for each in events if each["name"] == "copy"]
    assert copies == pytest.approx([1e6 * PHASES["copy"]] * 6, abs=1)


def test_ranks_and_tracks_have_names() -> None:
    names = {
        (each["pid"], each["tid"]): each["args"]["name"]
        for each in trace(num_ranks=2)["traceEvents"]
        if each["ph"] == "M" and "name" in each["args"]
    }
    assert names[0, 0] == "rank 0 on node0"
    assert names[1, 1] == "training"
    assert names[1, 2] == "background saves"


def test_saves_that_overlap_have_different_tracks() -> None:
    rank = RankClock(0, 1)
    first = list(recorded_save(rank, 0))
    second = [msgspec.structs.replace(each, step=100, clock_s=each.clock_s + 0.1) for each in first]
    records = sorted([*first, *second], key=lambda each: each.clock_s)
    events = msgspec.to_builtins(trace_of(job_events(records)))["traceEvents"]
    assert {each["tid"] for each in events if each["cat"] == "whole"} == {2, 3}


def test_a_job_without_events_has_an_empty_trace() -> None:
    assert trace_of(job_events([])).trace_events == []
