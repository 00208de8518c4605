"""Where a job goes on: at the head, at a chosen checkpoint, or, in a new run, with the checkpoint of another run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import Checkpointer, EverySteps, Memory
from holdfast.errors import ConfigurationError, NotFoundError
from holdfast.store.urls import location_of
from tests.support.models import start_new_job


def state_of(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


def train(run: str, steps: range, memory: Memory | None) -> None:
    """A job that saves after each of `steps`, whose number is the value of the state."""
    start_new_job()
    state = state_of()
    with Checkpointer(run, state, memory=memory) as own:
        own.restore()
        for step in steps:
            state["w"].fill_(step)
            own.save(step)


def lineage(run: str) -> list[int]:
    from holdfast.run.history import Run
    from holdfast.store.urls import open_store

    return [commit.step for commit in Run.open(open_store(location_of(run))).lineage()]


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
