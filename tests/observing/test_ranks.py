"""Ranks of a job record their events apart, and the picture is of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast.observing import JsonLines
from holdfast.telemetry.event_files import read_events
from holdfast.telemetry.goodput_ledger import Part, goodput_ledger
from holdfast.telemetry.rank_saves import JobEvents, job_events
from holdfast.telemetry.run_figures import heat_rows, job_saves
from tests.support.models import start_new_job
from tests.support.ranks import run_ranks

RANKS = 3


def train(run: str, node_dir: Path | None, num_steps: int) -> None:
    start_new_job()
    memory = None if node_dir is None else holdfast.Memory(node_dir=node_dir)
    state = {"w": holdfast.PerRank(torch.full((100,), float(dist.get_rank())), on_resize="first")}
    policy = holdfast.EverySteps(3)
    with holdfast.Checkpointer(run, state, memory=memory, save=policy, listeners=[JsonLines()]) as checkpointer:
        for step in checkpointer.steps(num_steps):
            checkpointer.step(step)


def recorded(run: str) -> JobEvents:
    folder = Path(f"{run}.events")
    found = read_events(folder)
    assert (found.num_damaged, found.num_cut) == (0, 0)
    return job_events(found.records)


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_a_save_of_all_ranks_is_one_save_with_the_phases_of_each(run: str, node_dir: Path, is_in_memory: bool) -> None:
    run_ranks(RANKS, train, run, node_dir if is_in_memory else None, 5)
    job = recorded(run)
    saves = job_saves(job.saves)
    assert [(save.step, save.place, save.outcome) for save in saves] == [
        (3, "1.1", "committed"),
        (4, "1.2", "committed"),
    ]
    assert all(sorted(each.rank for each in save.ranks) == [0, 1, 2] for save in saves)
    rows = {row.phase: row for row in heat_rows(job.saves)}
    phases = {"agree", "copy", "store"} if is_in_memory else {"describe", "write", "commit"}
    assert {"blocked", "durable", *phases} <= rows.keys()
    # A rank that looks late hears of the commit at once, and so of no seal.
    assert all(row.seconds.keys() == {0, 1, 2} for phase, row in rows.items() if phase != "seal")
    for save in job.saves:
        assert save.durable_s is not None
        assert (
            0 < sum(save.seconds().values()) <= save.durable_s + 0.1
        )  # a busy machine lets time pass between two clocks
        assert all(seconds >= 0 for seconds in save.seconds().values())


def test_a_job_that_goes_on_adds_to_what_is_recorded(run: str) -> None:
    run_ranks(RANKS, train, run, None, 5)
    run_ranks(2, train, run, None, 8)
    job = recorded(run)
    assert [(save.step, save.place, len(save.ranks)) for save in job_saves(job.saves)] == [
        (3, "1.1", 3),
        (4, "1.2", 3),
        (6, "2.1", 2),
        (7, "2.2", 2),
    ]
    assert [each.step for each in job.restores] == [None] * RANKS + [4] * 2


def test_the_ledger_of_time_counts_each_step_of_a_job_once_whatever_the_number_of_its_ranks(run: str) -> None:
    run_ranks(RANKS, train, run, None, 5)
    run_ranks(2, train, run, None, 8)
    ledger = goodput_ledger(read_events(Path(f"{run}.events")).records)
    assert ledger.steps == {Part.GOODPUT: 8, Part.PROVISIONAL: 0, Part.WASTED: 0}
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s, rel=1e-3)
