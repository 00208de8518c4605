"""A job goes on at the head, at a chosen checkpoint, or, in a new run, with the checkpoint of another run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from msgspec import UNSET

import holdfast
from holdfast import Checkpointer, EverySteps, Memory
from holdfast.errors import ConfigurationError, CorruptError, IncompatibleError, NotFoundError
from holdfast.format.records import Fork, Place
from holdfast.run.history import Run
from holdfast.store.urls import location_of, open_store
from tests.support.command_line import damage, folder_of, holdfast_command
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks


def state_of(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


def train(run: str, steps: range, memory: Memory | None = None) -> None:
    """A job that saves after each of `steps`, whose number is the value of the state."""
    start_new_job()
    state = state_of()
    with Checkpointer(run, state, memory=memory) as own:
        own.restore()
        for step in steps:
            state["w"].fill_(step)
            own.save(step)


def opened(run: str) -> Run:
    return Run.open(open_store(location_of(run)))


def lineage(run: str) -> list[int]:
    return [commit.step for commit in opened(run).lineage()]


@pytest.mark.parametrize("at", ["step=2", "1.3"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_a_chosen_checkpoint_is_restored_and_saves_continue_from_it(
    run: str, memory: Memory, at: str, *, in_memory: bool
) -> None:
    tier = memory if in_memory else None
    train(run, range(5), tier)
    start_new_job()
    state = state_of()
    with Checkpointer(run, state, memory=tier, save=EverySteps(1)) as own:
        report = own.restore(at=at)
        assert (report.step, report.place, report.tier) == (2, "1.3", "storage")
        assert state["w"].eq(2).all()
        for step in own.steps(5):
            assert state["w"].eq(step - 1).all()
            state["w"].fill_(step)
            own.step(step)
    assert lineage(run) == [4, 3, 2, 1, 0]
    assert [holdfast.open(f"{run}@{place}").step for place in ("1.5", "2.1", "2.2")] == [4, 3, 4]
    train(run, range(5, 6), tier)
    assert lineage(run) == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("at", ["", "2", "step", "head", "step=x", "0.1", "../other@1.1"])
def test_a_text_that_selects_nothing_is_refused(run: str, at: str) -> None:
    train(run, range(1), None)
    with pytest.raises(ConfigurationError) as error:
        Checkpointer(run, state_of(), memory=None).restore(at=at)
    assert error.value.code == "config.path"


def test_a_chosen_checkpoint_that_is_not_there_is_an_error_and_not_a_fresh_start(run: str) -> None:
    with pytest.raises(NotFoundError):
        Checkpointer(run, state_of(), memory=None).restore(at="step=3")
    train(run, range(2), None)
    with pytest.raises(NotFoundError, match="step 3"):
        Checkpointer(run, state_of(), memory=None).restore(at="step=3")


class TestDamage:
    @pytest.fixture
    def damaged(self, tmp_path: Path) -> str:
        """A run whose head, step 2 at 1.3, has a flipped bit."""
        path = tmp_path / "damaged"
        train(str(path), range(3))
        damage(folder_of(path, 2) / "data-00000.safetensors", at=0.999)
        start_new_job()
        return str(path)

    @pytest.mark.parametrize("at", [None, "step=2"])
    def test_the_error_advises_a_call_that_restore_has(self, damaged: str, at: str | None) -> None:
        with pytest.raises(CorruptError) as caught:
            Checkpointer(damaged, state_of(), memory=None).restore(at=at)
        assert caught.value.code == "corrupt.file"
        assert "restore(at='1.2') (step 1) or restore(fallback=True)" in caught.value.action
        assert "load" not in caught.value.action.lower()
        assert Checkpointer(damaged, state_of(), memory=None).restore(at="1.2").step == 1

    def test_the_error_about_an_initial_checkpoint_advises_another_one(self, run: str, damaged: str) -> None:
        with pytest.raises(CorruptError) as caught:
            Checkpointer(run, state_of(), memory=None, initial=damaged).restore()
        assert f"initial='{damaged}@1.2' (step 1), call restore(fallback=True)" in caught.value.action
        assert "load" not in caught.value.action.lower()


class TestInitial:
    @pytest.fixture
    def base(self, tmp_path: Path) -> str:
        base = str(tmp_path / "base")
        train(base, range(10), None)
        return base

    def test_a_new_run_begins_with_it_at_step_0(self, run: str, base: str, memory: Memory) -> None:
        start_new_job()
        state = state_of()
        with Checkpointer(run, state, memory=memory, initial=f"{base}@step=7", save=EverySteps(1)) as own:
            for step in own.steps(3):
                assert state["w"].eq(7 + step).all()
                state["w"].add_(1)
                own.step(step)
        assert lineage(run) == [2, 1]
        assert lineage(base) == list(reversed(range(10)))

    def test_a_run_with_a_checkpoint_goes_on_with_its_own(self, run: str, base: str) -> None:
        train(run, range(3), None)
        start_new_job()
        state = state_of()
        report = Checkpointer(run, state, memory=None, initial=base).restore()
        assert report.next_step == 3
        assert state["w"].eq(2).all()

    def test_one_that_does_not_fit_is_told_with_the_call_that_loads_it(self, run: str, base: str) -> None:
        start_new_job()
        state = {"w": torch.zeros(2, dtype=torch.float64)}
        with pytest.raises(IncompatibleError) as caught:
            Checkpointer(run, state, memory=None, initial=base).restore()
        assert "leave it out, and only where restore().step is None call" in caught.value.action
        assert f"holdfast.load('{base}', into=state, ...)" in caught.value.action
        assert run not in caught.value.action

    def test_the_report_names_it(self, run: str, base: str) -> None:
        start_new_job()
        report = Checkpointer(run, state_of(), memory=None, initial=base).restore()
        assert (report.step, report.next_step, report.tier) == (None, 0, "storage")
        assert report.load is not None
        assert report.load.path.startswith(base)
        assert "new run" in repr(report)

    def test_one_that_is_not_there_is_an_error(self, run: str, tmp_path: Path) -> None:
        start_new_job()
        with pytest.raises(NotFoundError, match="none"):
            Checkpointer(run, state_of(), memory=None, initial=tmp_path / "none").restore()


class TestFork:
    """A run that goes on from a checkpoint of another run, with its steps."""

    @pytest.fixture
    def base(self, tmp_path: Path) -> str:
        base = str(tmp_path / "base")
        train(base, range(10), None)
        return base

    def fork(self, run: str, base: str, memory: Memory | None, *, total: int) -> list[int]:
        """A job that trains up to `total` steps. Returns the numbers of its steps."""
        start_new_job()
        state, steps = state_of(), []
        path = f"{base}@step=7"
        with Checkpointer(run, state, memory=memory, initial=path, fork=True, save=EverySteps(1)) as own:
            for step in own.steps(total):
                assert state["w"].eq(step - 1).all()
                state["w"].fill_(step)
                own.step(step)
                steps.append(step)
        return steps

    @pytest.mark.parametrize("in_memory", [True, False])
    def test_it_goes_on_at_the_next_step_and_later_jobs_with_its_own_head(
        self, run: str, base: str, memory: Memory, *, in_memory: bool
    ) -> None:
        tier = memory if in_memory else None
        assert self.fork(run, base, tier, total=10) == [8, 9]
        assert self.fork(run, base, tier, total=12) == [10, 11]
        assert lineage(run) == [11, 10, 9, 8]
        assert lineage(base) == list(reversed(range(10)))

    def test_its_first_epoch_names_the_checkpoint(self, run: str, base: str) -> None:
        self.fork(run, base, None, total=9)
        self.fork(run, base, None, total=10)
        forked, origin = opened(run), opened(base)
        first, second = forked.epoch(1), forked.epoch(2)
        assert (first.why, first.opened_from) == ("start", None)
        assert first.forked_from == Fork(origin.run_id, Place(1, 8), 7, holdfast.open(f"{base}@step=7").path)
        assert second.forked_from is UNSET
        assert origin.epoch(1).forked_from is UNSET

    def test_a_job_that_dies_before_its_first_commit_is_followed_by_another_fork(self, run: str, base: str) -> None:
        forked = Run.create(open_store(location_of(run)))
        forked.open_epoch(after=0, opened_from=None, why="start", world_size=1)
        assert self.fork(run, base, None, total=9) == [8]
        assert forked.epoch(2).forked_from is not UNSET

    def test_the_report_says_where_it_goes_on(self, run: str, base: str, caplog: pytest.LogCaptureFixture) -> None:
        start_new_job()
        own = Checkpointer(run, state_of(), memory=None, initial=f"{base}@step=7", fork=True)
        with caplog.at_level(logging.INFO, logger="holdfast"):
            report = own.restore()
        assert (report.step, report.next_step, report.place, report.tier) == (7, 8, None, "storage")
        assert "a fork" in repr(report)
        assert "training goes on at step 8" in caplog.text

    def test_ls_names_it(self, run: str, base: str) -> None:
        self.fork(run, base, None, total=10)
        line = f"a fork of step 7 at 1.8 of run {opened(base).run_id}: {base}/checkpoints/"
        assert line in holdfast_command("ls", run).out
        assert "fork" not in holdfast_command("ls", base).out

    def test_a_folder_outside_any_history_can_be_forked_too(self, run: str, base: str) -> None:
        start_new_job()
        path = holdfast.open(f"{base}@step=7").path
        with Checkpointer(run, state_of(), memory=None, initial=path, fork=True) as own:
            assert own.restore().next_step == 8
            own.save(8)
        fork = opened(run).epoch(1).forked_from
        assert isinstance(fork, Fork)
        assert (fork.run_id, fork.place) == (opened(base).run_id, Place(1, 8))

    def test_another_run_of_the_same_job_is_no_fork(self, run: str, base: str, tmp_path: Path) -> None:
        start_new_job()
        state = state_of()
        with Checkpointer(run, state, memory=None, initial=base, fork=True) as own:
            own.restore()
            holdfast.save(tmp_path / "best", state, 10)
        assert opened(str(tmp_path / "best")).epoch(1).forked_from is UNSET

    def test_a_source_that_is_not_there_is_an_error_at_once(self, run: str, tmp_path: Path) -> None:
        start_new_job()
        with pytest.raises(NotFoundError, match="none"):
            Checkpointer(run, state_of(), memory=None, initial=tmp_path / "none", fork=True).restore()

    def test_it_needs_a_source(self, run: str) -> None:
        with pytest.raises(ValueError, match="initial"):
            Checkpointer(run, state_of(), fork=True)


def fork_on_ranks(run: str, base: str) -> tuple[int, list[float], object]:
    """Restore a fork, draw random numbers, and save. Returns the step, the numbers, and the position in the data."""
    start_new_job()
    torch.manual_seed(99)
    position = {"sample": 0}
    state = {"random": holdfast.RandomState(), "position": position}
    with Checkpointer(run, state, memory=None, initial=base, fork=True) as own:
        report = own.restore()
        drawn = torch.rand(2).tolist()
        own.save(report.next_step)
    return report.next_step, drawn, position["sample"]


def begin_on_ranks(base: str) -> list[float]:
    """Save step 5, and return the random numbers that this rank draws next."""
    start_new_job()
    torch.manual_seed(dist.get_rank())
    holdfast.save(base, {"random": holdfast.RandomState(), "position": {"sample": 320}}, 5)
    drawn: list[float] = torch.rand(2).tolist()
    return drawn


def test_all_ranks_of_a_fork_go_on_with_random_state_and_position(run: str, tmp_path: Path) -> None:
    base = str(tmp_path / "base")
    drawn = run_ranks(2, begin_on_ranks, base)
    assert run_ranks(2, fork_on_ranks, run, base) == [(6, each, 320) for each in drawn]
    fork = opened(run).epoch(1).forked_from
    assert isinstance(fork, Fork)
    assert (fork.step, fork.place) == (5, Place(1, 1))
