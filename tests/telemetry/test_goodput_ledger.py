"""The ledger of time: all its parts together are the time that passed, and each step counts once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.telemetry.event_record import EventRecord
from holdfast.telemetry.goodput_ledger import Part, RunLedger, goodput_ledger
from tests.telemetry.invented_jobs import Job, Restore, Save, Steps, World
from tests.telemetry.test_any_records import records as any_records

times = st.floats(0.001, 500)
restores = st.builds(Restore, times, st.integers(0, 2), st.sampled_from(["storage", "node memory"]))
deeds = st.one_of(
    st.builds(Steps, st.integers(1, 5), times),
    st.builds(Save, times, st.sampled_from(["rank 0", "rank 1", "history", "nobody"])),
    restores,
)
jobs = st.builds(
    Job,
    st.floats(2, 500),
    times,
    restores,
    st.lists(deeds, max_size=8),
    st.sampled_from(["closed", "early", "killed"]),
    times,
)


def lived(*jobs: Job) -> World:
    world = World()
    for job in jobs:
        world.live(job)
    return world


def ledger_of(world: World) -> RunLedger:
    return goodput_ledger(world.records, world.in_history)


def assert_adds_up(ledger: RunLedger) -> None:
    for job in ledger.jobs:
        assert all(seconds >= -1e-9 for seconds in job.seconds.values())
        assert sum(job.seconds.values()) == pytest.approx(job.wall_s, rel=1e-3, abs=1e-5)
        assert all(number >= 0 for number in job.steps.values())
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s, rel=1e-3, abs=1e-5)


@given(st.lists(jobs, min_size=1, max_size=6))
def test_the_parts_are_the_time_that_passed_and_every_step_has_its_true_fate(history: list[Job]) -> None:
    world = lived(*history)
    ledger = ledger_of(world)
    assert_adds_up(ledger)
    assert ledger.steps == world.steps()
    begun_s = world.records[0].unix_s - history[0].age_s
    ended_s = max(record.unix_s for record in world.records)
    assert ledger.wall_s + ledger.paused_s == pytest.approx(ended_s - begun_s, abs=1e-3)
    assert ledger.paused_s == pytest.approx(world.paused_s, abs=1e-3)
    for part in (Part.SAVE, Part.RESTORE):
        assert ledger.seconds[part] == pytest.approx(world.seconds[part], abs=1e-3)


@given(st.lists(jobs, min_size=1, max_size=6))
def test_no_step_counts_as_progress_twice(history: list[Job]) -> None:
    ledger = ledger_of(lived(*history))
    numbers = {done[0] for done in lived(*history).told}
    assert ledger.steps[Part.GOODPUT] + ledger.steps[Part.PROVISIONAL] <= len(numbers)


@given(st.lists(any_records, max_size=30))
def test_any_records_make_a_ledger_that_adds_up(found: list[EventRecord]) -> None:
    assert_adds_up(goodput_ledger(found, {"1.1"}))
