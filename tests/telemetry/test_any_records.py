"""A page, a trace and their figures can be made of any records that a folder may hold."""

from __future__ import annotations

import dataclasses

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from holdfast.decoding import decode_json
from holdfast.format.records import LAST_S
from holdfast.telemetry.event_record import EventRecord
from holdfast.telemetry.goodput_ledger import goodput_ledger
from holdfast.telemetry.moments import moment_text
from holdfast.telemetry.page import page
from holdfast.telemetry.perfetto import trace_of
from holdfast.telemetry.rank_saves import job_events
from tests.support.recorded_history import picture_of
from tests.telemetry.test_page import parsed

EVENTS = (
    *(
        "SaveBegun",
        "SaveMemoryReady",
        "SaveWaiting",
        "SavePlaced",
        "SaveStaged",
        "SaveSealed",
        "SaveProtected",
        "ProtectionDelayed",
        "SaveUnprotected",
        "SaveHeld",
        "SaveDelayed",
        "SaveCommitted",
    ),
    *("SaveSkipped", "SaveUnwatched", "SaveFailed", "SaveReturned", "StateRestored", "StepsTimed", "EventsDropped"),
    *(
        "CheckpointerOpened",
        "RestoreReturned",
        "RestoreFailed",
        "FirstStepEnded",
        "IntervalChosen",
        "CheckpointerClosed",
    ),
    "SomethingOfALaterVersion",
)
names = st.sampled_from(
    ["memory", "blocked", "write", "quiet", "saving", "quiet_total", "age", "took", "waited", "a<b"]
)
counts = st.integers(0, 2**63 - 1)
records = st.builds(
    EventRecord,
    event=st.sampled_from(EVENTS),
    unix_s=st.floats(0, LAST_S),
    clock_s=st.floats(0, 1e9),
    run=st.sampled_from(["/runs/a", "/runs/b"]),
    rank=st.integers(0, 3) | counts,
    world_size=counts,
    host=st.text(max_size=3),
    process=st.integers(0, 2),
    step=st.none() | st.integers(0, 3) | counts,
    place=st.sampled_from(["", "1.1", "1.2"]) | st.text(max_size=3),
    tier=st.sampled_from(["", "node memory", "storage"]),
    seconds=st.dictionaries(names, st.floats(0, 1e9), max_size=3),
    numbers=st.dictionaries(
        st.sampled_from(["nbytes", "quiet", "saving", "dropped", "early", "wasted_ppm", "memory_only"]),
        counts,
        max_size=4,
    ),
    error=st.text(max_size=3),
    message=st.text(max_size=3),
)


@given(st.lists(records, max_size=30))
def test_any_records_make_a_page_and_a_trace(found: list[EventRecord]) -> None:
    job = job_events(found)
    picture = picture_of(num_ranks=1, num_saves=1)
    parsed(page(dataclasses.replace(picture, job=job, ledger=goodput_ledger(found))))
    trace = trace_of(job)
    assert all(event.ts >= 0 and event.dur >= 0 for event in trace.trace_events)
    assert decode_json(msgspec.json.encode(trace), type(trace)) == trace


def test_a_moment_that_no_calendar_has_becomes_the_last_one() -> None:
    assert moment_text(1e12).startswith("9999-12-3")
    assert moment_text(1_790_000_000.0).startswith("2026-09-2")


@given(records)
def test_a_record_is_read_as_it_was_written(record: EventRecord) -> None:
    assert decode_json(msgspec.json.encode(record), EventRecord) == record
