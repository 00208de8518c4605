"""The ledger of time: all its parts together are the time that passed, and each step counts once."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.telemetry.event_record import EventRecord
from holdfast.telemetry.goodput_ledger import Part, RunLedger, goodput_ledger
from tests.support.recorded_job import RankClock
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
    passed_s = 0.0 if world.begun_s is None else world.ended_s - world.begun_s
    assert ledger.wall_s + ledger.paused_s == pytest.approx(passed_s, abs=1e-3)
    assert ledger.paused_s == pytest.approx(world.paused_s, abs=1e-3)
    least_s, most_s = world.kept_s()
    assert least_s - 1e-3 <= ledger.seconds[Part.GOODPUT] + ledger.seconds[Part.PROVISIONAL] <= most_s + 1e-3
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


KEPT = Save(1.0, "rank 0")
BEGIN = Restore(2.0, 0, "storage")


def test_steps_that_a_kill_undoes_are_wasted_and_later_steps_are_provisional_until_they_are_saved() -> None:
    first = Job(5.0, 3.0, BEGIN, [Steps(10, 1.0), KEPT, Steps(4, 1.0), Save(1.0, "nobody")], "killed", 0.0)
    second = Job(60.0, 3.0, BEGIN, [Steps(6, 1.0)], "closed", 7.0)
    ledger = ledger_of(lived(first, second))
    assert ledger.steps == {Part.GOODPUT: 10, Part.PROVISIONAL: 6, Part.WASTED: 4}
    assert ledger.seconds == pytest.approx(
        {
            Part.GOODPUT: 10.0,
            Part.PROVISIONAL: 6.0,
            Part.SLOW_DOWN: 0.0,
            Part.SAVE: 9.0,
            Part.WASTED: 4.0,
            Part.RESTORE: 4.0,
            Part.RECOVERY: 60.0,
            Part.START: 6.0,
            Part.OTHER: 0.0,
        },
        abs=1e-5,
    )
    assert [job.end for job in ledger.jobs] == ["unknown", "closed"]
    assert [job.wall_s for job in ledger.jobs] == pytest.approx([21.0, 78.0])
    assert ledger.num_disruptions == 1


def test_a_step_is_safe_in_a_checkpoint_that_the_newest_state_does_not_descend_from() -> None:
    saves: list[Steps | Save] = [Steps(5, 1.0), Save(1.0, "nobody"), Steps(3, 1.0), KEPT]
    back = Restore(2.0, 1, "node memory")
    goes_back = Job(5.0, 3.0, back, [Steps(1, 1.0)], "killed", 0.0)
    ledger = ledger_of(lived(Job(5.0, 3.0, BEGIN, saves, "killed", 0.0), goes_back))
    assert ledger.steps == {Part.GOODPUT: 5, Part.PROVISIONAL: 1, Part.WASTED: 3}


def test_a_pause_after_a_job_that_ended_on_purpose_is_no_badput() -> None:
    ledger = ledger_of(lived(*(Job(1000.0, 3.0, BEGIN, [Steps(3, 1.0), KEPT], "closed", 1.0) for _ in range(2))))
    assert ledger.paused_s == pytest.approx(1000.0)
    assert ledger.seconds[Part.RECOVERY] == 0
    assert ledger.num_disruptions == 0


def records_of(job: int, *events: tuple[str, float, Mapping[str, object]]) -> list[EventRecord]:
    """Events of rank 0 of a job, each at its second."""
    clock = RankClock(0, 1)
    return [msgspec.structs.replace(clock.record(event, at_s), process=job, **fields) for event, at_s, fields in events]


def opened(at_s: float, age_s: float) -> tuple[str, float, Mapping[str, object]]:
    return "CheckpointerOpened", at_s, {"seconds": {"age": age_s}}


def timed(
    at_s: float, step: int, quiet: tuple[int, float], saving: tuple[int, float]
) -> tuple[str, float, Mapping[str, object]]:
    """Steps up to `step`, given by the number and the time of each."""
    (num_quiet, quiet_s), (num_saving, saving_s) = quiet, saving
    totals = {"quiet_total": num_quiet * quiet_s, "saving_total": num_saving * saving_s}
    seconds = {"quiet": quiet_s, "saving": saving_s, **totals}
    return "StepsTimed", at_s, {"step": step, "seconds": seconds, "numbers": {"quiet": num_quiet, "saving": num_saving}}


def test_the_time_that_steps_take_longer_while_a_save_is_under_way_is_a_part_of_its_own() -> None:
    ledger = goodput_ledger(records_of(1, opened(0.0, 1.0), timed(30.0, 19, (10, 1.0), (10, 1.5))))
    assert ledger.seconds[Part.SLOW_DOWN] == pytest.approx(5.0)
    assert ledger.seconds[Part.PROVISIONAL] == pytest.approx(20.0)
    assert ledger.seconds[Part.START] == pytest.approx(6.0)


def test_a_process_that_only_restores_is_no_job() -> None:
    trains = Job(5.0, 3.0, BEGIN, [Steps(5, 1.0), KEPT, Steps(3, 1.0)], "early", 0.0)
    evaluates = Job(10.0, 3.0, BEGIN, [], "closed", 0.0)
    alone, evaluated = ledger_of(lived(trains)), ledger_of(lived(trains, evaluates))
    assert evaluated == alone
    assert alone.steps == {Part.GOODPUT: 5, Part.PROVISIONAL: 3, Part.WASTED: 0}
    (_, following) = ledger_of(lived(trains, evaluates, trains)).jobs
    assert following.seconds[Part.RECOVERY] == pytest.approx(10.0 + 3.0 + 2.0 + 5.0)


def test_an_evaluation_beside_a_job_takes_none_of_its_time() -> None:
    trains = records_of(1, opened(0.0, 0.0), timed(100.0, 99, (100, 1.0), (0, 0.0)))
    restored = ("StateRestored", 51.0, {"step": 49, "place": "1.1", "tier": "storage"})
    evaluates = records_of(2, opened(50.0, 5.0), restored, ("RestoreReturned", 51.0, {"seconds": {"took": 1.0}}))
    assert goodput_ledger([*trains, *evaluates]) == goodput_ledger(trains)


def test_a_job_that_is_started_beside_another_one_has_its_turn_when_that_one_ends() -> None:
    trains = records_of(1, opened(0.0, 0.0), timed(100.0, 99, (100, 1.0), (0, 0.0)))
    waits = records_of(2, opened(110.0, 100.0), timed(120.0, 9, (10, 1.0), (0, 0.0)))
    ledger = goodput_ledger([*trains, *waits])
    assert [(job.wall_s, job.seconds[Part.START]) for job in ledger.jobs] == [(100.0, 0.0), (20.0, 10.0)]


def test_a_job_that_does_not_notice_that_it_is_replaced_has_no_time_of_its_own_any_more() -> None:
    replaced = records_of(1, opened(0.0, 0.0), timed(100.0, 99, (100, 1.0), (0, 0.0)))
    replaces = records_of(2, opened(50.0, 5.0), timed(90.0, 39, (40, 1.0), (0, 0.0)))
    ledger = goodput_ledger([*replaced, *replaces])
    assert [job.wall_s for job in ledger.jobs] == [50.0, 40.0]
    assert [job.seconds[Part.WASTED] for job in ledger.jobs] == [50.0, 0.0]


def test_the_predicted_waste_stands_beside_the_realised_one() -> None:
    chosen = (
        "IntervalChosen",
        10.0,
        {"seconds": {"interval": 60.0, "mttf": 3600.0}, "numbers": {"wasted_ppm": 20_000}},
    )
    saved = ("SaveReturned", 30.0, {"step": 29, "seconds": {"blocked": 3.0}})
    rest = timed(97.0, 96, (67, 1.0), (0, 0.0))
    ledger = goodput_ledger(records_of(1, opened(0.0, 1.0), timed(30.0, 29, (30, 1.0), (0, 0.0)), chosen, rest))
    assert ledger.comparison == (0.02, 0.0)
    timed_until = timed(27.0, 26, (27, 1.0), (0, 0.0))
    ledger = goodput_ledger(records_of(1, opened(0.0, 1.0), chosen, timed_until, saved, rest))
    assert ledger.comparison is not None
    assert ledger.comparison.realised == pytest.approx(3 / 97)


def test_a_loop_that_saves_without_calls_of_step_does_steps_between_saves() -> None:
    saves = [
        ("SaveReturned", at_s, {"step": step, "seconds": {"blocked": 1.0}}) for at_s, step in ((11.0, 9), (22.0, 19))
    ]
    restored = ("StateRestored", 0.5, {"step": 4, "place": "1.1", "tier": "storage"})
    returned = ("RestoreReturned", 0.5, {"seconds": {"took": 0.5}})
    ledger = goodput_ledger(records_of(1, opened(0.0, 1.0), restored, returned, *saves))
    assert ledger.steps == {Part.GOODPUT: 0, Part.PROVISIONAL: 15, Part.WASTED: 0}
    assert ledger.seconds[Part.PROVISIONAL] == pytest.approx(9.5 + 10.0)


def test_a_restore_that_fails_takes_the_time_of_a_restore() -> None:
    failed = ("RestoreFailed", 8.0, {"seconds": {"took": 5.0}, "error": "storage.timeout", "message": "no answer"})
    ledger = goodput_ledger(records_of(1, opened(1.0, 1.0), failed, timed(20.0, 9, (10, 1.0), (0, 0.0))))
    assert ledger.seconds[Part.RESTORE] == pytest.approx(5.0)


def test_nothing_is_recorded() -> None:
    ledger = goodput_ledger([])
    assert (ledger.wall_s, ledger.comparison, sum(ledger.seconds.values())) == (0, None, 0)
