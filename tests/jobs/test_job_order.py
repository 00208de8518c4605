"""Jobs that lost their run, and ranks whose calls differ: every rank raises, and the next correct call works."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

import holdfast
from holdfast import FencedError, HoldfastError
from tests.jobs.told import TIMEOUT_S, Told, same_on_all, save_small, small, told
from tests.support.keepers import end_keepers
from tests.support.models import start_new_job
from tests.support.ranks import run_processes, run_ranks

# The owner of the run.


def takeover(index: int, run: str, step: int) -> tuple[Told, str]:
    """Another job saves into a run that it has not loaded from."""
    start_new_job()
    refused = told(lambda: save_small(run, step))
    return refused, holdfast.save(run, small(), step, takeover=True).place


def test_a_run_with_a_history_is_not_saved_into_before_it_was_loaded(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    save_small(run, 1)
    ((refused, place),) = run_processes(1, takeover, run, 2)
    assert (refused.kind, refused.code) == ("ConfigurationError", "config.unloaded_history")
    assert "its head is step 1 at 1.1" in refused.text
    assert "takeover=True" in refused.text
    assert place == "2.1"
    assert holdfast.open(run).step == 2


def test_a_job_that_lost_its_run_is_fenced(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    save_small(run, 1)
    run_processes(1, takeover, run, 2)
    for _ in range(2):
        with pytest.raises(FencedError, match="belongs to another job") as raised:
            save_small(run, 2)
        assert raised.value.code == "fenced.newer_epoch"
    assert holdfast.open(run).place == "2.1"
    holdfast.load(run, into=small(), continues=True)
    assert save_small(run, 3) == "3.1"
    assert holdfast.open(run).place == "3.1"


def overtaken(index: int, run: str, signs: str) -> tuple[str, Told | None]:
    """The older job (0) saves once more between the load and the first save of the one that resumes (1)."""
    start_new_job()

    def await_sign(name: str) -> None:
        while not Path(signs, name).exists():
            time.sleep(0.01)

    if index == 0:
        save_small(run, 1)
        Path(signs, "saved").touch()
        await_sign("loaded")
        place = save_small(run, 2)
        Path(signs, "passed").touch()
        await_sign("resumed")
        return place, told(lambda: save_small(run, 3))
    await_sign("saved")
    state = small()
    holdfast.load(run, into=state, continues=True)
    Path(signs, "loaded").touch()
    await_sign("passed")
    place = holdfast.save(run, state, 2).place
    Path(signs, "resumed").touch()
    return place, None


def test_a_resume_that_the_older_job_overtakes_is_no_rollback(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    (first, error), (second, _) = run_processes(2, overtaken, run, str(tmp_path))
    assert (first, second) == ("1.2", "2.1")
    assert isinstance(error, Told)
    assert error.code == "fenced.newer_epoch"
    assert "by 1 rank, resume)" in error.text
    assert "start it again, with a restore" in error.text
    assert "takeover" not in error.text
    assert [row.abandoned for row in holdfast.ls(run) if row.abandoned] == ["epoch 2 went on from 1.1 (resume)"]


def save_as_before(run: str, step: int) -> str:
    return save_small(run, step)


def save_when_fenced(run: str, step: int, other: str) -> tuple[Told, str]:
    return told(lambda: save_small(run, step)), save_small(other, step)


def test_all_ranks_of_a_fenced_job_are_told(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    run_ranks(2, save_as_before, run, 1)  # the processes stay warm: the calls below are of the same job
    assert run_ranks(2, save_as_before, run, 2) == ["1.2", "1.2"]
    start_new_job()
    holdfast.save(run, small(), 3, takeover=True)
    outcomes = run_ranks(2, save_when_fenced, run, 3, str(tmp_path / "other"))
    error = same_on_all([error for error, _ in outcomes])
    assert (error.kind, error.code) == ("FencedError", "fenced.newer_epoch")
    assert [place for _, place in outcomes] == ["1.1", "1.1"]
    assert holdfast.open(run).place == "2.1"


# The calls.


def save_different_steps(run: str) -> tuple[Told, str]:
    start_new_job()
    return told(lambda: save_small(run, 5 + dist.get_rank())), save_small(run, 7)


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    outcomes = run_ranks(2, save_different_steps, str(tmp_path / "run"))
    # Rank 1, which is ahead, waits for the other in its step, and is told when that goes past it.
    for (error, place), other in zip(outcomes, (5, 7), strict=True):
        assert (error.kind, error.code, error.rank) == ("ConfigurationError", "config.call_order", 1)
        assert f"rank 1 is in 'describe' of save of step 6 while rank 0 is in 'describe' of save of step {other}" in (
            error.text
        )
        assert place == "1.1"


def save_another_step_once(run: str) -> str:
    start_new_job()
    with pytest.raises(HoldfastError) as caught:
        holdfast.save(run, small(), dist.get_rank(), timeout_s=20.0)  # a tenth of it is what the store may be late by
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_waits_in_vain_in_a_later_step_is_told_that_the_steps_differ(tmp_path: Path) -> None:
    at_once, later = run_ranks(2, save_another_step_once, str(tmp_path / "run"))
    cause = "rank 1 is in 'describe' of save of step 1 while rank 0 is in 'describe' of save of step 0"
    assert "[config.call_order]" in at_once
    assert cause in at_once
    assert "[timeout.ranks]" in later
    assert f"the calls of the ranks did not match: {cause}" in later


def save_but_skip_one(run: str, node_dir: Path, skipping: int, verb: str) -> list[str]:
    """The outcomes of five saves. The rank `skipping` leaves out the second, as if by a bug."""
    start_new_job()
    state = small()
    memory = holdfast.Memory(node_dir=node_dir)
    outcomes = []
    with holdfast.Checkpointer(run, state, memory=memory, timeout_s=TIMEOUT_S) as checkpointer:
        for step in (10, 20, 30, 40, 50):
            if step == 20 and dist.get_rank() == skipping:
                continue
            try:
                if verb == "Checkpointer":
                    checkpointer.save(step).durable.wait(TIMEOUT_S)
                else:
                    holdfast.save(run, state, step, timeout_s=TIMEOUT_S)
                outcomes.append(f"{step} saved")
            except HoldfastError as error:
                outcomes.append(str(error))
    return outcomes


@pytest.mark.parametrize("verb", ["save", "Checkpointer"])
@pytest.mark.parametrize("skipping", [0, 1])
@pytest.mark.few(2)
def test_a_rank_that_skips_a_save_costs_that_save_alone(tmp_path: Path, skipping: int, verb: str) -> None:
    start = time.monotonic()
    outcomes = run_ranks(3, save_but_skip_one, str(tmp_path / "run"), tmp_path, skipping, verb)
    end_keepers(tmp_path)
    assert time.monotonic() - start < TIMEOUT_S  # nobody waited for the time to be up
    for rank, told_ in enumerate(outcomes):
        if rank != skipping:
            error = told_.pop(1)
            assert "[config.call_order]" in error
            assert "save of step 20" in error
            assert "save of step 30" in error
        assert told_ == ["10 saved", "30 saved", "40 saved", "50 saved"]


def save_while_others_load(run: str) -> tuple[Told, str]:
    start_new_job()
    saving, loading = (lambda: save_small(run, 2)), (lambda: holdfast.load(run, into=small(), timeout_s=TIMEOUT_S))
    error = told(loading if dist.get_rank() else saving)
    holdfast.load(run, into=small(), continues=True, timeout_s=TIMEOUT_S)
    return error, save_small(run, 2)


def test_ranks_that_save_while_others_load_are_told(tmp_path: Path) -> None:
    save_small(str(tmp_path / "run"), 1)
    outcomes = run_ranks(2, save_while_others_load, str(tmp_path / "run"))
    error = same_on_all([error for error, _ in outcomes])
    assert (error.kind, error.code) == ("ConfigurationError", "config.call_order")
    assert [place for _, place in outcomes] == ["2.1", "2.1"]


def stay_away(run: str, absent: int, is_first: bool) -> tuple[Told, float, str]:
    """One rank comes only when the others have given up, in the first operation of the process group or a later one."""
    start_new_job()
    if not is_first:
        save_small(run, 0)
    if dist.get_rank() == absent:
        dist.barrier()
    start = time.monotonic()
    error = told(lambda: holdfast.save(run, small(), 1, timeout_s=2.0))
    seconds = time.monotonic() - start
    if dist.get_rank() != absent:
        dist.barrier()
    return error, seconds, save_small(run, 2)


def test_a_rank_that_stays_away_is_named_in_time_and_told_when_it_comes(tmp_path: Path) -> None:
    outcomes = run_ranks(3, stay_away, str(tmp_path / "run"), 1, False)
    error = same_on_all([error for error, _, _ in outcomes])
    assert (error.kind, error.code, error.absent) == ("DeadlineError", "timeout.ranks", (1,))
    assert "rank 1 did not reach 'describe' of save of step 1 within 2 s" in error.text
    assert all(seconds < 8 for _, seconds, _ in outcomes)
    assert len({place for _, _, place in outcomes}) == 1


def test_a_rank_that_stays_away_from_the_first_call_joins_the_second(tmp_path: Path) -> None:
    outcomes = run_ranks(3, stay_away, str(tmp_path / "run"), 1, True)
    late = outcomes.pop(1)
    error = same_on_all([error for error, _, _ in outcomes])
    assert (error.kind, error.code, error.absent) == ("DeadlineError", "timeout.ranks", (1,))
    # It meets the others in their next call, while it still makes the one on which they gave up.
    assert (late[0].kind, late[0].code) == ("ConfigurationError", "config.call_order")
    assert "rank 1 is in 'describe' of save of step 1 while rank 0 is in 'describe' of save of step 2" in late[0].text
    assert all(seconds < 8 for _, seconds, _ in (late, *outcomes))
    assert {place for _, _, place in outcomes} == {late[2]}


def test_a_coordinator_that_stays_away_is_named(tmp_path: Path) -> None:
    outcomes = run_ranks(2, leave_without_coordinator, str(tmp_path / "run"))
    assert outcomes[0] is None
    error = outcomes[1]
    assert error is not None
    assert (error.kind, error.absent) == ("DeadlineError", (0,))


def leave_without_coordinator(run: str) -> Told | None:
    start_new_job()
    error = told(lambda: holdfast.save(run, small(), 1, timeout_s=2.0)) if dist.get_rank() else None
    dist.barrier()
    return error
