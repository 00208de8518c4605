"""Reports print in a few lines, saves and loads are one line of the log, and a step has one meaning."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from tests.support.ranks import run_ranks

MANY = 1500


@pytest.fixture
def state() -> dict[str, object]:
    return {"tensors": {f"a.long.name.of.a.tensor.{n}": torch.zeros(2) for n in range(MANY)}, "progress": {"epoch": 1}}


def test_reports_handles_and_views_print_in_a_few_lines(tmp_path: Path, state: dict[str, object]) -> None:
    run, tensors = tmp_path / "run", [f"a.long.name.of.a.tensor.{n}" for n in range(MANY)]
    saved = holdfast.save(run, state, 4)
    loaded = holdfast.load(run, into=state)
    partly = holdfast.load(run, into={"tensors": {"a.long.name.of.a.tensor.0": torch.zeros(2)}, "x": 1}, strict=False)
    plan = holdfast.plan_load(run, into={"tensors": {}})
    target = {"tensors": {name: torch.ones(2) for name in tensors}, "progress": {"epoch": 0}}
    moved = holdfast.transfer(state, target)
    with holdfast.Checkpointer(run, state, memory=None) as checkpointer:
        restored = checkpointer.restore()
        handle = checkpointer.save(5)
    for thing in (saved, loaded, partly, plan, moved, restored, handle, holdfast.open(run)):
        for text in (repr(thing), str(thing)):
            assert len(text.splitlines()) <= 8, text
            assert len(text) <= 800, text
    assert "1,500 tensors" in repr(saved)
    assert "step 4 at 1.1" in repr(loaded)
    assert "1 missing: x" in repr(partly)
    assert "1,500 unexpected: " in repr(partly)


def test_every_report_says_the_next_step(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2)}
    run = tmp_path / "run"
    assert holdfast.save(run, state, 0).next_step == 1
    assert holdfast.load(run, into=state).next_step == 1
    with holdfast.Checkpointer(run, state, memory=None) as checkpointer:
        assert checkpointer.restore().next_step == 1
    with holdfast.Checkpointer(tmp_path / "fresh", state, memory=None) as checkpointer:
        assert checkpointer.restore().next_step == 0


def test_every_save_and_load_is_one_line_of_info(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="holdfast")

    def lines() -> list[str]:
        found = [record.getMessage() for record in caplog.records if record.name == "holdfast"]
        caplog.clear()
        return found

    state = {"w": torch.zeros(2)}
    holdfast.save(tmp_path / "run", state, 3)
    (line,) = lines()
    assert line.startswith("saved step 3 at 1.1: 1 tensor, ")
    holdfast.load(tmp_path / "run", into=state)
    (line,) = lines()
    assert line.startswith("loaded step 3 at 1.1")
    with holdfast.Checkpointer(tmp_path / "run", state, memory=holdfast.Memory(node_dir=tmp_path)) as checkpointer:
        checkpointer.restore()
        lines()
        checkpointer.save(4)
        checkpointer.save(5)
    assert [line.partition(":")[0] for line in lines()] == ["saved step 4 at 1.2", "saved step 5 at 1.3"]


class Counter(logging.Handler):
    """Counts the lines that the logger itself is given."""

    number = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.number += record.name == "holdfast"


def lines_of_ranks(run: str) -> int:
    log, counter = logging.getLogger("holdfast"), Counter()
    log.addHandler(counter)
    log.setLevel(logging.INFO)
    state = {"w": torch.zeros(2)}
    holdfast.save(run, state, 1)
    holdfast.load(run, into=state)
    log.removeHandler(counter)
    log.setLevel(logging.NOTSET)
    return counter.number + 10 * dist.get_rank()


def test_the_first_rank_logs_for_all(tmp_path: Path) -> None:
    assert run_ranks(2, lines_of_ranks, str(tmp_path / "run")) == [2, 10]


@pytest.mark.parametrize(("step", "warned"), [(3, True), (2, True), (4, False), (10, False)])
def test_a_save_that_repeats_the_step_that_was_loaded_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, *, warned: bool
) -> None:
    state = {"w": torch.zeros(2)}
    run = tmp_path / "run"
    for number in (3, 4):
        holdfast.save(run, state, number)
    holdfast.load(f"{run}@step=3", into=state)
    holdfast.save(run, state, step)
    assert (f"step {step} is saved after step 3 was loaded" in caplog.text) == warned
    assert ("report.next_step, which was 4" in caplog.text) == warned
    caplog.clear()
    holdfast.save(run, state, step)
    assert caplog.text == "", "once per resume"


def test_a_save_of_a_lower_step_than_the_one_before_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"w": torch.zeros(2)}
    for step in (7, 7, 9):
        holdfast.save(tmp_path / "run", state, step)
    assert caplog.text == ""
    holdfast.save(tmp_path / "run", state, 8)
    assert "step 8 is saved after step 9" in caplog.text
