"""Real jobs that are killed and go on: their ledger of time knows which steps were in vain."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.observing import JsonLines
from holdfast.policy.when import SavePolicy
from holdfast.run.history import Run
from holdfast.store.urls import location_of, open_store
from holdfast.telemetry.event_files import read_events
from holdfast.telemetry.goodput_ledger import Part, RunLedger, goodput_ledger
from holdfast.telemetry.run_figures import recorded_history
from tests.support.models import start_new_job
from tests.support.nursery import Process, start, until

STEP_S = 0.01
#: Most steps before a kill that no event tells of. One comes each tenth of a second, and a loaded machine is slower.
UNTOLD = 60


@dataclass(frozen=True)
class Loop:
    """A loop on `run` up to step `total`, whose steps take 10 ms."""

    run: str
    node_dir: Path | None
    policy: SavePolicy
    total: int

    def __call__(self) -> None:
        start_new_job()
        memory = None if self.node_dir is None else holdfast.Memory(node_dir=self.node_dir)
        state = {"w": torch.zeros(1000)}
        with (
            holdfast.Checkpointer(
                self.run, state, memory=memory, save=self.policy, listeners=[JsonLines()]
            ) as checkpointer,
            Path(f"{self.run}.steps").open("ab", buffering=0) as done,
        ):
            for step in checkpointer.steps(self.total):
                time.sleep(STEP_S)
                done.write(b"%d %d\n" % (os.getpid(), step))
                checkpointer.step(step)


def begun(loop: Loop, folder: Path) -> Process:
    return start(loop.__call__, err=folder / "stderr")


def steps_of(run: str) -> list[list[int]]:
    """The steps that each job has done, as the jobs themselves noted them."""
    path = Path(f"{run}.steps")
    jobs: dict[int, list[int]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        process, step = map(int, line.split())
        jobs.setdefault(process, []).append(step)
    return list(jobs.values())


def ledger_of(run: str) -> RunLedger:
    history = recorded_history(Run.open(open_store(location_of(run))))
    recorded = read_events(Path(f"{run}.events"))
    assert (recorded.num_damaged, recorded.num_cut) == (0, 0)
    ledger = goodput_ledger(recorded.records, {str(commit.place) for commit in history.commits})
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_s, rel=1e-3)
    assert min(ledger.seconds.values()) >= 0
    for job in ledger.jobs:
        assert sum(job.seconds.values()) == pytest.approx(job.wall_s, rel=1e-3)
    return ledger


def num_in_vain(jobs: list[list[int]]) -> int:
    """The number of steps that a later job did again."""
    return sum(len(steps) for steps in jobs) - len({step for steps in jobs for step in steps})


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_the_steps_that_a_kill_undid_are_wasted(run: str, node_dir: Path, tmp_path: Path, is_in_memory: bool) -> None:
    loop = Loop(run, node_dir if is_in_memory else None, holdfast.EverySteps(40), 100)
    killed = begun(loop, tmp_path)
    until(lambda: any(steps and steps[-1] >= 72 for steps in steps_of(run)))
    killed.kill()
    time.sleep(0.2)  # nobody has noticed yet
    following = begun(loop, tmp_path)
    assert following.wait() == 0, following.err
    jobs, ledger = steps_of(run), ledger_of(run)
    assert jobs[1][0] == 41
    assert ledger.steps[Part.GOODPUT] == 100
    assert ledger.steps[Part.PROVISIONAL] == 0
    assert 0 < ledger.steps[Part.WASTED] <= num_in_vain(jobs)
    assert num_in_vain(jobs) - ledger.steps[Part.WASTED] <= UNTOLD
    assert ledger.seconds[Part.WASTED] >= ledger.steps[Part.WASTED] * STEP_S
    assert [job.end for job in ledger.jobs] == ["unknown", "closed"]
    assert ledger.num_disruptions == 1
    first, second = ledger.jobs
    assert second.seconds[Part.RECOVERY] >= 0.2
    assert first.seconds[Part.RESTORE] > 0
    assert second.seconds[Part.RESTORE] > 0


def test_an_evaluation_leaves_the_ledger_as_it_is(run: str, tmp_path: Path) -> None:
    assert begun(Loop(run, None, holdfast.EverySteps(40), 100), tmp_path).wait() == 0
    before = ledger_of(run)
    state, listeners = {"w": torch.zeros(1000)}, [JsonLines()]
    with holdfast.Checkpointer(run, state, memory=None, listeners=listeners) as evaluates:
        assert evaluates.restore().step == 99
    newest = read_events(Path(f"{run}.events")).records
    assert [record.step for record in newest if record.process == os.getpid()] == [None, 99, None, None]
    assert ledger_of(run) == before


def test_steps_in_memory_alone_are_provisional_and_a_kill_of_the_process_wastes_none_of_them(
    run: str, node_dir: Path, tmp_path: Path
) -> None:
    policy = holdfast.EverySteps(2, memory_only=True) | holdfast.EverySteps(10**6)
    killed = begun(Loop(run, node_dir, policy, 10**5), tmp_path)
    until(lambda: any(steps and steps[-1] >= 60 for steps in steps_of(run)))
    killed.kill()
    recorded = read_events(Path(f"{run}.events")).records
    held = max(record.step or 0 for record in recorded if record.event == "SaveHeld")
    before = goodput_ledger(recorded)  # the keeper may have made it durable by now, which the events do not tell
    assert before.steps[Part.GOODPUT] == 0
    assert before.steps[Part.PROVISIONAL] >= held + 1 >= 30
    following = begun(Loop(run, node_dir, policy, steps_of(run)[-1][-1] + 50), tmp_path)
    assert following.wait() == 0, following.err
    jobs, ledger = steps_of(run), ledger_of(run)
    assert jobs[1][0] >= held + 1
    assert ledger.steps[Part.GOODPUT] == jobs[1][-1] + 1
    assert ledger.steps[Part.PROVISIONAL] == 0
    assert ledger.steps[Part.WASTED] <= num_in_vain(jobs) <= jobs[0][-1] - held
    assert len(ledger.jobs) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_ledger_of_a_run_with_many_kills_adds_up(run: str, node_dir: Path, tmp_path: Path) -> None:
    num_kills, chance = 22, random.Random(7)
    policy = holdfast.Auto(mttf_s=1.5, max_overhead=0.5)
    assert start(time.time, err=tmp_path / "stderr").wait() == 0  # the process that forks the others is warm now
    begun_s = time.time()
    for number in range(num_kills):
        job = begun(Loop(run, node_dir, policy, 10**6), tmp_path)
        until(lambda number=number: len(steps_of(run)) > number)  # type: ignore[misc]
        time.sleep(chance.uniform(0.2, 2.0))
        job.kill()
    newest = steps_of(run)[-1][-1]
    last = begun(Loop(run, node_dir, policy, newest + 50), tmp_path)
    assert last.wait() == 0, last.err
    passed_s = time.time() - begun_s
    jobs, ledger = steps_of(run), ledger_of(run)
    assert ledger.num_disruptions == num_kills
    assert len(ledger.jobs) == num_kills + 1
    # The job notes a step before its call of `step`, and a job may be killed in between.
    assert ledger.steps[Part.GOODPUT] == newest + 50
    assert ledger.steps[Part.PROVISIONAL] == 0
    assert num_in_vain(jobs) - UNTOLD * num_kills <= ledger.steps[Part.WASTED] <= num_in_vain(jobs)
    assert ledger.wall_s == pytest.approx(passed_s, abs=3.0)
    assert ledger.seconds[Part.RECOVERY] > 0
    assert ledger.comparison is not None
    assert 0 < ledger.comparison.predicted < 1
    assert 0 < ledger.comparison.realised < 1
