"""Protection by other nodes, and reasons for its absence, in records, measures, the page, the trace and the screen."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import msgspec
import pytest

from holdfast.checkpointer.save_errors import replaced_unprotected, unprotected
from holdfast.format.records import Place
from holdfast.observing import (
    Event,
    ProtectionDelayed,
    SaveBegun,
    SaveCommitted,
    SaveFailed,
    SaveHeld,
    SavePlaced,
    SaveProtected,
    SaveStaged,
    SaveUnprotected,
)
from holdfast.observing.measures import PROTECTED, UNPROTECTED, Readings
from holdfast.observing.recording import record_of
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from holdfast.telemetry.event_record import EventRecord
from holdfast.telemetry.page import page
from holdfast.telemetry.perfetto import trace_of
from holdfast.telemetry.rank_saves import job_events
from holdfast.telemetry.run_figures import job_saves, protection_figures
from tests.observing.heard import FULL, SOURCE, at
from tests.support.command_line import holdfast_command
from tests.support.recorded_history import picture_of
from tests.support.recorded_job import recorded_job, write_records

WHY = "step 3 was replaced in memory before other nodes had copies of it"


def save(step: int, last: Event) -> list[Event]:
    """A save to memory alone that ends before it is known whether other nodes protect it."""
    begun_s = 10.0 * step
    return [
        SaveBegun(step, "node memory", is_first_rank=True, memory_only=True, at=at(begun_s)),
        SavePlaced(step, Place(1, step), at=at(begun_s + 0.125)),
        SaveStaged(step, 1000, at=at(begun_s + 0.25)),
        SaveHeld(step, 1000, at=at(begun_s + 0.5)),
        last,
    ]


ASKED = [
    *save(1, SaveProtected(1, at=at(10.75))),
    *save(2, SaveProtected(2, at=at(21.25))),
    *save(3, SaveUnprotected(3, replaced_unprotected(3, "node 2 is away"), at=at(31))),
]
UNASKED = [event for step in (1, 2) for event in save(step, SaveUnprotected(step, unprotected(step), at=at(10 * step)))]


def records(events: list[Event]) -> list[EventRecord]:
    return [record_of(event, SOURCE) for event in events]


def test_the_record_of_an_unprotected_save_says_why() -> None:
    """It had neither the code nor the message."""
    last = records(ASKED)[-1]
    assert last.error == "storage.unprotected"
    assert WHY in last.message


def test_measures_count_what_is_protected_how_soon_and_why_the_rest_is_not() -> None:
    readings = Readings()
    found = [each for event in ASKED for each in readings.of(event, SOURCE)]
    assert [each.value for each in found if each.measure == PROTECTED] == [0.75, 1.25]
    assert [each.labels for each in found if each.measure == UNPROTECTED] == [("storage.unprotected",)]
    # A save that failed was never to be protected, and one of a job without protect= lacks nothing.
    for event in (*UNASKED, SaveBegun(9, "node memory", is_first_rank=True, at=at(90)), SaveFailed(9, FULL, at=at(91))):
        assert not [each for each in readings.of(event, SOURCE) if each.measure in (PROTECTED, UNPROTECTED)]
    assert not readings.of(SaveProtected(9, at=at(92)), SOURCE)


def test_measures_keep_nothing_of_saves_to_storage_whose_protection_no_event_tells() -> None:
    readings = Readings()
    for step in range(3):
        if step % 2:  # a save to memory may fall back to storage
            readings.of(SaveBegun(step, "node memory", is_first_rank=True, at=at(step)), SOURCE)
        readings.of(SaveBegun(step, "storage", is_first_rank=True, at=at(step)), SOURCE)
        readings.of(SaveCommitted(step, 1000, at=at(step + 0.5)), SOURCE)
    assert not readings._begun
    assert not readings._unclear


def test_the_page_and_the_trace_tell_of_protection() -> None:
    job = job_events(records(ASKED))
    figures = protection_figures(job_saves(job.saves))
    assert figures is not None
    assert figures[:3] == (3, 2, 1.0)
    assert str(figures).startswith(f"2 of 3 saves protected after 1 s; not protected: {WHY}")
    text = page(dataclasses.replace(picture_of(num_saves=0), job=job))
    assert "<b>2 of 3</b><span>saves protected against the loss of nodes</span>" in text
    assert f"steps 1 to 3: 3 held; 2 of 3 saves protected after 1 s; not protected: {WHY}" in text
    assert "until other nodes protect it" in text
    events = trace_of(job).trace_events
    assert [(each.name, each.ts) for each in events if each.ph == "i"] == [
        ("step 1 is protected", 750_000),
        ("step 2 is protected", 11_250_000),
    ]
    assert [each.name for each in events if WHY in str(each.args.get("unprotected"))] == ["step 3: held"]


def test_a_job_that_asks_for_no_protection_is_not_called_unprotected() -> None:
    job = job_events(records(UNASKED))
    assert protection_figures(job_saves(job.saves)) is None
    assert "protect" not in page(dataclasses.replace(picture_of(num_saves=0), job=job))
    assert all(each.ph != "i" and "unprotected" not in each.args for each in trace_of(job).trace_events)


def test_a_save_whose_protection_is_tried_again_shows_why_until_it_is_protected() -> None:
    """While a peer was away, nothing but the log of the keeper said so."""
    delayed = save(1, ProtectionDelayed(1, "node 2 did not answer", at=at(11)))
    figures = protection_figures(job_saves(job_events(records(delayed)).saves))
    assert str(figures) == "not protected: node 2 did not answer"
    later = [*delayed, SaveProtected(1, at=at(12))]
    assert str(protection_figures(job_saves(job_events(records(later)).saves))) == "protected after 2 s"


@pytest.fixture
def run(tmp_path: Path) -> str:
    run = tmp_path / "gpt"
    Run.create(open_store(Location(str(run))))
    return str(run)


def test_top_has_the_age_of_the_newest_protected_state_and_why_others_are_not(run: str) -> None:
    write_records(Path(f"{run}.events"), records(ASKED))
    (line,) = (each for each in holdfast_command("top", run).lines if "protect" in each)
    assert line.startswith("newest state that other nodes protect: ")
    assert f" old; 2 of 3 saves protected after 1 s; not protected: {WHY}" in line


def test_advise_takes_the_times_of_protection_for_peers(run: str) -> None:
    """It advised copies in the memory of other nodes to a job that had them, and took restores from there for none."""
    protected = [
        msgspec.structs.replace(each, event="SaveProtected", clock_s=each.clock_s + 0.5, unix_s=each.unix_s + 0.5)
        for each in recorded_job()
        if each.event == "SaveSealed"
    ]
    job = [msgspec.structs.replace(each, tier=each.tier.replace("storage", "peer memory")) for each in recorded_job()]
    write_records(Path(f"{run}.events"), [*job, *protected])
    told = holdfast_command("advise", "--from", run, "--mttf", "3h")
    assert "--peers 0.004s,0.76s,1s" in told.lines[0]
