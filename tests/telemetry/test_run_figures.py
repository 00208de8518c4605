"""The figures of a run are those of its events."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from holdfast.telemetry.rank_saves import UNDER_WAY, RankSteps, job_events
from holdfast.telemetry.run_figures import heat_rows, job_saves, recovery_points, step_figures
from tests.support.recorded_job import BEGUN_S, EVERY_S, NBYTES, PHASES, RankClock, recorded_job, recorded_save

WHOLE_S = sum(PHASES.values())


def test_what_ranks_recorded_of_a_save_is_one_save_of_the_job() -> None:
    saves = job_saves(job_events(recorded_job(num_ranks=4, num_saves=3)).saves)
    assert [(save.step, save.place, save.nbytes, len(save.ranks)) for save in saves] == [
        (99, "1.1", 4 * NBYTES, 4),
        (199, "1.2", 4 * NBYTES, 4),
        (299, "1.3", 4 * NBYTES, 4),
    ]
    assert [save.outcome for save in saves] == ["committed"] * 3
    assert saves[0].durable_s == pytest.approx(WHOLE_S)
    assert saves[0].blocked_s == pytest.approx(0.004)


def test_the_heat_map_shows_the_slow_rank_in_its_phase_alone() -> None:
    rows = {row.phase: row for row in heat_rows(job_events(recorded_job(slow_rank=2)).saves)}
    assert list(rows) == ["blocked", "agree", "copy", "seal", "store", "durable"]
    assert rows["copy"].seconds == pytest.approx({0: 0.05, 1: 0.05, 2: 0.2, 3: 0.05})
    assert rows["copy"].typical_s == pytest.approx(0.05)
    assert rows["store"].seconds == pytest.approx(dict.fromkeys(range(4), 1.0))


def test_the_age_of_the_recovery_point_rises_until_a_checkpoint_is_durable() -> None:
    points = recovery_points(job_saves(job_events(recorded_job(num_ranks=1, num_saves=3)).saves))
    assert [point.at_s - BEGUN_S for point in points] == pytest.approx(
        [WHOLE_S, EVERY_S + WHOLE_S, EVERY_S + WHOLE_S, 2 * EVERY_S + WHOLE_S, 2 * EVERY_S + WHOLE_S]
    )
    high = EVERY_S + WHOLE_S
    assert [point.age_s for point in points] == pytest.approx([WHOLE_S, high, WHOLE_S, high, WHOLE_S])


def test_a_save_that_is_durable_on_one_rank_is_durable() -> None:
    first, second = RankClock(0, 2), RankClock(1, 2)
    records = [*recorded_save(first, 0), *recorded_save(second, 0, is_over=False)]
    (save,) = job_saves(job_events(records).saves)
    assert save.outcome == "committed"


def test_steps_are_slower_while_a_save_is_under_way() -> None:
    steps = step_figures(job_events(recorded_job()).steps)
    assert steps is not None
    assert steps.slowdown == pytest.approx(0.1)
    assert step_figures([]) is None


def steps_of(process: int, quiet_s: Sequence[float], saving_s: Sequence[float]) -> list[RankSteps]:
    """Steps of one job, ten of each kind in each of its events."""
    found = [RankSteps("node", process, 0, 9, 10.0 * process, 10, each, 0, 0.0) for each in quiet_s]
    return found + [RankSteps("node", process, 0, 9, 10.0 * process, 0, 0.0, 10, each) for each in saving_s]


def test_jobs_with_other_steps_do_not_give_saves_a_negative_cost() -> None:
    """A job whose steps took 2 ms, most of them with a save under way, and one of 100 ms made it -47.7 %."""
    slow, fast = steps_of(1, [0.100] * 9, [0.110]), steps_of(2, [0.002], [0.0022] * 9)
    steps = step_figures([*slow, *fast])
    assert steps is not None
    assert (steps.quiet_s, steps.num_saving) == (0.002, 100)
    assert steps.slowdown == pytest.approx(0.1)
    lonely = [*steps_of(3, [0.5], []), *steps_of(4, [], [0.001])]
    assert step_figures([*slow, *lonely]) == step_figures(slow)
    assert step_figures(lonely) is None


@pytest.mark.parametrize("saving_s", [[0.097, 0.098], [0.100], [0.1006]], ids=["faster", "equal", "within chance"])
def test_a_slow_down_that_chance_may_explain_is_not_measurable(saving_s: list[float]) -> None:
    steps = step_figures(steps_of(1, [0.098, 0.099, 0.100, 0.101, 0.102], saving_s))
    assert steps is not None
    assert (steps.slowdown, steps.slowdown_text) == (None, "not measurable")


def test_ranks_that_have_not_agreed_yet_belong_to_the_save_of_the_others() -> None:
    ahead, behind = list(recorded_save(RankClock(0, 2), 0)), list(recorded_save(RankClock(1, 2), 0))
    (save,) = job_saves(job_events([*ahead[:4], *behind[:2]]).saves)
    assert (save.place, [each.phase_now for each in save.ranks]) == ("1.1", ["seal", "agree"])


def test_a_step_that_is_saved_again_after_a_restart_is_another_save() -> None:
    before = [record for rank in range(2) for record in list(recorded_save(RankClock(rank, 2), 0))[:2]]
    after = [
        msgspec.structs.replace(record, process=9000 + rank, clock_s=record.clock_s + 300, unix_s=record.unix_s + 300)
        for rank in range(2)
        for record in recorded_save(RankClock(rank, 2), 0)
    ]
    saves = job_saves(job_events([*before, *after]).saves)
    assert [(save.place, save.outcome, len(save.ranks)) for save in saves] == [
        ("", UNDER_WAY, 2),
        ("1.1", "committed", 2),
    ]
