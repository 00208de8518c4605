"""Jobs that resume one checkpoint, one after the other, and die before they commit a newer one: they are counted, and a
limit ends the loop."""

from __future__ import annotations

import logging
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from holdfast import Checkpointer, Memory, RestoreReport
from holdfast.errors import ConfigurationError, CorruptError, NotFoundError
from holdfast.format.records import Place
from holdfast.format.resume_records import Resume, parse_resume_name, resume_key
from holdfast.run.history import Run
from holdfast.run.resumes import ResumeCounts
from holdfast.run.rollback import rollback
from holdfast.store.urls import location_of, open_store
from tests.checkpointer.test_resuming import state_of, train
from tests.support.models import start_new_job
from tests.support.nursery import run_script
from tests.support.ranks import RanksFailedError, run_ranks

#: A job that restores, prints its report, and is killed: before its first save, or after it has opened an epoch.
KILLED = """
import os, signal, sys, torch, holdfast
run, node_dir, when = sys.argv[1:4]
state = {"w": torch.zeros(1000)}
memory = holdfast.Memory(node_dir=node_dir) if node_dir else None
checkpointer = holdfast.Checkpointer(run, state, memory=memory)
report = checkpointer.restore()
print(report.step, report.earlier_resumes, report.tier, flush=True)
if when == "in the first save":
    from holdfast.run.complete import seal_and_commit
    import holdfast.saving.stored_place as place
    place.seal_and_commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.save(report.next_step)
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(run: str, *, when: str = "before the first save", node_dir: Path | None = None) -> str:
    """Run a job that is killed. Returns the step that it resumed, the count of jobs before it, and the tier."""
    job = run_script(KILLED, run, "" if node_dir is None else str(node_dir), when)
    assert job.status == -signal.SIGKILL, job.err
    return job.out.strip()


def counted(run: str) -> dict[Place, int]:
    return dict(ResumeCounts.of(Run.open(open_store(location_of(run)))).counted)


def restored(run: str, *, max_resumes: int | None = None) -> Checkpointer:
    start_new_job()
    return Checkpointer(run, state_of(), memory=None, max_resumes=max_resumes)


def crashed(run: str, *, fallback: bool = False, max_resumes: int | None = None) -> RestoreReport:
    """The report of a job that an exception ends right after its restore."""
    with suppress(ZeroDivisionError), restored(run, max_resumes=max_resumes) as own:
        report = own.restore(fallback=fallback)
        raise ZeroDivisionError
    return report


@pytest.mark.parametrize("when", ["before the first save", "in the first save"])
def test_each_job_that_is_killed_counts_wherever_it_dies(run: str, when: str, caplog: pytest.LogCaptureFixture) -> None:
    train(run, range(2))
    assert [killed(run, when=when) for _ in range(3)] == ["1 0 storage", "1 1 storage", "1 2 storage"]
    own = restored(run)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        report = own.restore()
    assert (report.step, report.earlier_resumes) == (1, 3)
    assert "3 earlier jobs" in repr(report)
    (warning,) = [record.message for record in caplog.records if "have resumed" in record.message]
    assert warning.startswith("3 jobs have resumed step 1 (place 1.2)")
    own.close()


def test_two_jobs_are_no_loop_yet(run: str, caplog: pytest.LogCaptureFixture) -> None:
    train(run, range(2))
    killed(run)
    with caplog.at_level(logging.WARNING, logger="holdfast"), restored(run) as own:
        assert own.restore().earlier_resumes == 1
    assert [record for record in caplog.records if "have resumed" in record.message] == []


@pytest.mark.timeout(120)
def test_a_checkpoint_in_memory_counts_too_and_is_passed_over_with_one_warning(
    run: str, memory: Memory, caplog: pytest.LogCaptureFixture
) -> None:
    train(run, range(2), memory)
    assert [killed(run, node_dir=memory.node_dir) for _ in range(2)] == ["1 0 node memory", "1 1 node memory"]
    start_new_job()
    with (
        Checkpointer(run, state_of(), memory=memory, max_resumes=2) as own,
        pytest.raises(ConfigurationError, match="2 jobs have resumed it") as caught,
    ):
        own.restore()
    assert caught.value.code == "config.restart_loop"
    start_new_job()
    with Checkpointer(run, state_of(), memory=memory, max_resumes=2) as own:
        report = own.restore(fallback=True)
    assert (report.step, report.tier) == (0, "storage")
    (warning,) = [record.getMessage() for record in caplog.records if "ends the jobs" in record.getMessage()]
    assert warning.startswith("checkpoint 1.2 ends the jobs that resume it, falling back to an older one: 2 jobs")


def test_a_commit_ends_the_count(run: str) -> None:
    train(run, range(2))
    killed(run)
    killed(run)
    train(run, range(2, 4))
    assert counted(run) == {}
    with restored(run) as own:
        assert own.restore().earlier_resumes == 0
    assert Run.open(open_store(location_of(run))).storage.list("resumes") == [], "and old records are deleted"


def test_a_job_that_ends_in_an_orderly_way_does_not_count(run: str) -> None:
    train(run, range(2))
    for _ in range(3):
        with restored(run) as own:
            assert own.restore().earlier_resumes == 0
    assert counted(run) == {}


def test_a_job_that_an_exception_ends_counts(run: str) -> None:
    train(run, range(2))
    crashed(run)
    assert counted(run) == {Place(1, 2): 1}


def test_a_job_that_restores_twice_counts_once(run: str) -> None:
    train(run, range(2))
    own = restored(run)
    assert [own.restore().earlier_resumes for _ in range(3)] == [0, 0, 0]
    assert counted(run) == {Place(1, 2): 1}


def test_a_restore_that_says_what_is_wrong_does_not_count(run: str) -> None:
    train(run, range(2))
    start_new_job()
    with pytest.raises(Exception, match="shape"):
        Checkpointer(run, {"w": torch.zeros(7)}, memory=None).restore()
    assert counted(run) == {}
    next(Path(run).glob("checkpoints/*1-*/data-00000.safetensors")).unlink()
    with pytest.raises(CorruptError):
        restored(run).restore()
    assert counted(run) == {}


class TestLimit:
    @pytest.fixture
    def looping(self, run: str) -> str:
        """A run of which two jobs have resumed the head, step 2, and died."""
        train(run, range(3))
        killed(run)
        killed(run, when="in the first save")
        return run

    def test_below_it_a_job_resumes(self, looping: str) -> None:
        with restored(looping, max_resumes=3) as own:
            assert own.restore().step == 2

    def test_at_it_restore_raises_and_says_what_to_do(self, looping: str) -> None:
        with pytest.raises(ConfigurationError, match=r"checkpoint 1\.3 .* 2 jobs have resumed it") as caught:
            restored(looping, max_resumes=2).restore()
        assert caught.value.code == "config.restart_loop"
        for advice in ("logs", "at=", "fallback=True", "max_resumes", "rollback"):
            assert advice in caught.value.action
        assert counted(looping) == {Place(1, 3): 2}, "a job that is refused has not resumed"

    def test_with_fallback_it_goes_on_from_the_next_older_one(self, looping: str) -> None:
        own = restored(looping, max_resumes=2)
        report = own.restore(fallback=True)
        assert (report.step, report.earlier_resumes) == (1, 0)
        assert report.load is not None
        ((place, reason),) = report.load.skipped
        assert place == "1.3"
        assert "2 jobs have resumed it" in reason
        own.save(2)
        run = Run.open(open_store(location_of(looping)))
        assert [commit.step for commit in run.lineage()] == [2, 1, 0]
        assert run.epoch(3).why == "resume"
        assert counted(looping) == {}

    def test_the_older_one_has_a_count_of_its_own(self, looping: str) -> None:
        reports = [crashed(looping, fallback=True, max_resumes=2) for _ in range(4)]
        assert [(each.step, each.earlier_resumes) for each in reports] == [(1, 0), (1, 1), (0, 0), (0, 1)]
        with pytest.raises(ConfigurationError, match=r"1\.3: .*; 1\.2: .*; 1\.1: ") as caught:
            restored(looping, max_resumes=2).restore(fallback=True)
        assert caught.value.code == "config.restart_loop"

    def test_a_checkpoint_that_the_user_chose_is_never_refused(self, looping: str) -> None:
        with restored(looping, max_resumes=1) as own:
            report = own.restore(at="1.3")
            assert (report.step, report.earlier_resumes) == (2, 2)

    def test_a_rollback_begins_the_count_anew(self, looping: str) -> None:
        rollback(Run.open(open_store(location_of(looping))), Place(1, 3))
        with restored(looping, max_resumes=1) as own:
            assert own.restore().step == 2

    @pytest.mark.parametrize("wrong", [0, -1])
    def test_it_is_at_least_one(self, run: str, wrong: int) -> None:
        with pytest.raises(ValueError, match="max_resumes"):
            Checkpointer(run, state_of(), max_resumes=wrong)


def test_the_name_of_a_record_says_what_it_holds() -> None:
    resume = Resume(place=Place(3, 12), newest_epoch=5, created=1.0, holder="me")
    key = resume_key(resume, "0123456789abcdef")
    assert key == "resumes/9999999996-9999999987.9999999994-0123456789abcdef.json"
    assert parse_resume_name(key.removeprefix("resumes/")) == (Place(3, 12), 5)
    for name in ("9999999996-9999999987.json", "9999999999-9999999987.9999999994-0123456789abcdef.json", "x"):
        assert parse_resume_name(name) is None


def resume_and_raise(run: str, limit: int | None) -> tuple[int | None, int]:
    start_new_job()
    own = Checkpointer(run, state_of(), memory=None, max_resumes=limit, timeout_s=30)
    report = own.restore()
    return report.step, report.earlier_resumes


def test_all_ranks_know_the_count_and_are_refused_alike(run: str) -> None:
    train(run, range(2))
    assert run_ranks(3, resume_and_raise, run, None) == [(1, 0)] * 3
    assert run_ranks(3, resume_and_raise, run, 2) == [(1, 1)] * 3
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(3, resume_and_raise, run, 2)
    assert str(caught.value).count("[config.restart_loop]") >= 3


def test_a_run_without_checkpoints_counts_nothing(run: str) -> None:
    with restored(run, max_resumes=1) as own:
        assert own.restore().earlier_resumes == 0
    assert not (Path(run) / "resumes").exists()


def test_a_run_that_cannot_be_written_is_restored_without_a_record(run: str) -> None:
    train(run, range(2))
    (Path(run) / "resumes").write_text("not a folder")
    with restored(run) as own:
        assert own.restore().step == 1
    with pytest.raises(NotFoundError):
        restored(run + "x").restore(at="1.1")
