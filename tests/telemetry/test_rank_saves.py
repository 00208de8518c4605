"""Recorded events become the saves, restores and steps that they tell of."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.telemetry.rank_saves import UNDER_WAY, job_events
from tests.support.recorded_job import BEGUN_S, EVERY_S, NBYTES, PHASES, RankClock, recorded_job, recorded_save


def test_a_save_has_the_phases_between_its_events() -> None:
    job = job_events(recorded_job(num_ranks=1, num_saves=1))
    (save,) = job.saves
    assert save.seconds() == pytest.approx(PHASES)
    assert save.outcome == "committed"
    assert save.durable_s == pytest.approx(sum(PHASES.values()))
    assert (save.rank, save.step, save.place, save.nbytes) == (0, 99, "1.1", NBYTES)
    assert save.begun_s == pytest.approx(BEGUN_S)
    assert save.blocked is not None
    assert save.blocked.seconds == pytest.approx(0.004)


def test_phases_of_a_save_follow_each_other_without_gaps() -> None:
    (save,) = job_events(recorded_job(num_ranks=1, num_saves=1)).saves
    ends = [span.begun_s + span.seconds for span in save.spans]
    begins = [span.begun_s for span in save.spans]
    assert begins == pytest.approx([save.begun_s, *ends[:-1]])


def test_the_wait_for_memory_is_a_phase_of_its_own() -> None:
    rank = RankClock(0, 1)
    begun, returned, placed, *others = recorded_save(rank, 0)
    waited = rank.record("SaveMemoryReady", 0.008, step=99, seconds={"memory": 0.006})
    (save,) = job_events([begun, waited, returned, placed, *others]).saves
    assert save.seconds() == pytest.approx(
        {"agree": 0.002, "memory": 0.006, "copy": 0.052, "seal": 0.2, "store": 1.0}, abs=1e-6
    )


def test_a_save_to_storage_has_the_phases_of_its_report() -> None:
    rank = RankClock(0, 1)
    phases = {"describe": 0.1, "write": 0.8, "commit": 0.1}
    records = [
        rank.record("SaveBegun", 0.0, step=3, tier="storage"),
        rank.record("SavePlaced", 1.0, step=3, place="1.1"),
        rank.record("SaveStaged", 1.0, step=3, numbers={"nbytes": 5}),
        rank.record("SaveCommitted", 1.0, step=3, numbers={"nbytes": 5}, seconds=phases),
        rank.record("SaveReturned", 1.0, step=3, seconds={"blocked": 1.0}),
    ]
    (save,) = job_events(records).saves
    assert save.seconds() == pytest.approx(phases)
    assert save.spans[0].begun_s == pytest.approx(BEGUN_S)


def test_a_save_that_falls_back_to_storage_is_one_save() -> None:
    rank = RankClock(0, 1)
    begun = [
        rank.record("SaveBegun", 0.1 * number, step=3, tier=tier)
        for number, tier in enumerate(["node memory", "storage"])
    ]
    (save,) = job_events(begun).saves
    assert (save.tier, save.outcome, save.spans) == ("storage", UNDER_WAY, [])


def test_a_step_that_a_new_process_saves_again_is_another_save() -> None:
    first = recorded_job(num_ranks=1, num_saves=1)
    again = [msgspec.structs.replace(each, process=9, unix_s=each.unix_s + 500) for each in first]
    job = job_events([*first, *again])
    assert [save.step for save in job.saves] == [99, 99]
    assert job.saves[1].begun_s - job.saves[0].begun_s == pytest.approx(500)


def test_saves_of_one_process_into_two_runs_are_apart() -> None:
    first = list(recorded_save(RankClock(0, 1), 0))
    second = [msgspec.structs.replace(each, run="/runs/ema") for each in first]
    job = job_events([record for pair in zip(first, second, strict=True) for record in pair])
    assert [save.seconds() for save in job.saves] == [pytest.approx(PHASES, abs=1e-6)] * 2


def test_a_save_under_way_tells_its_phase() -> None:
    events = list(recorded_save(RankClock(0, 1), 0))
    phases = [job_events(events[: number + 1]).saves[0].phase_now for number in range(5)]
    assert phases == ["agree", "agree", "copy", "seal", "store"]


def test_delays_and_failures_are_told_with_their_reasons() -> None:
    rank = RankClock(0, 1)
    records = [
        *recorded_save(rank, 0, is_over=False),
        rank.record("SaveDelayed", 3.0, step=99, message="the disk is full"),
        rank.record("SaveFailed", 4.0, step=99, message="given up"),
    ]
    (save,) = job_events(records).saves
    assert (save.outcome, save.num_delays, save.trouble) == ("failed", 1, "given up")
    assert save.durable_s is None


def test_restores_steps_and_dropped_events_are_found() -> None:
    job = job_events(
        [*recorded_job(num_ranks=2, num_saves=2), RankClock(0, 2).record("EventsDropped", 500, numbers={"dropped": 3})]
    )
    assert [(each.rank, each.step, each.tier) for each in job.restores] == [(0, 7, "storage"), (1, 7, "storage")]
    assert job.restores[0].begun_s == pytest.approx(BEGUN_S - 2)
    assert [each.step for each in job.steps] == [99, 99, 199, 199]
    assert job.num_dropped == 3
    assert [save.begun_s - BEGUN_S for save in job.saves] == pytest.approx([0, 0, EVERY_S, EVERY_S])


def test_a_wall_clock_that_jumps_moves_nothing_within_a_process() -> None:
    records = [
        msgspec.structs.replace(each, unix_s=each.unix_s + 3600) if each.event == "SaveCommitted" else each
        for each in recorded_job(num_ranks=1, num_saves=1)
    ]
    (save,) = job_events(records).saves
    assert save.durable_s == pytest.approx(sum(PHASES.values()))


def test_records_without_a_beginning_are_left_out() -> None:
    assert job_events(list(recorded_save(RankClock(0, 1), 0))[2:]).saves == []
