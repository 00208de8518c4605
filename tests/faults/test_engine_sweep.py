"""SIGKILL at random instants of a job that saves every step: of one trainer, of all, of keepers, of everything. Some
jobs save most of their steps to memory alone.

Each job goes on from what the one before it left. It never goes back behind a step of which a handle said that it is
durable, nor, while the nodes live, behind the newest one that was whole in memory; and what it restores is bit for bit
what that step was. The seed is printed; set HOLDFAST_SWEEP_SEED to use it again.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import pytest

from tests.faults.engine_job import SMALL_NUMEL, WORLD_SIZE, Job, Spec, Truth, job, node_memory, whole_in_memory
from tests.faults.test_crash_points import revision
from tests.support.keepers import end_keepers

NUM_KILLS: Final = 300
KILLS_PER_RUN: Final = 25
LONGEST_DELAY_S: Final = 0.5
#: The longest time between the deaths of processes that die together; and the time until a launcher ends the others.
LONGEST_GAP_S: Final = 0.02
LAUNCHER_S: Final = 0.1
#: The share of jobs that are killed before they have saved anything.
EARLY: Final = 0.2
#: The share of nodes that lose their memory, too, of those that have lost all their processes.
LOSS: Final = 0.2

WHO: Final = ("one trainer", "all trainers", "the keepers", "everything")


@dataclass
class Sweep:
    """A run whose jobs are killed, one after another."""

    spec: Spec
    truth: Truth
    dice: random.Random
    #: The last step of which a handle said that it is durable.
    durable: int = -1
    #: The step that the next job must restore; -1 for none.
    newest: int = -1
    kills: Counter[str] = field(default_factory=Counter)
    num_saved: int = 0

    def kill_a_job(self) -> None:
        """Have a job go on, and kill some of its processes again and again until it is dead."""
        name = f"log-{self.kills.total()}"
        with job(replace(self.spec, log=self.spec.log / name)) as training:
            if self.dice.random() > EARLY:
                training.until_told("saved")
            who = self._kill_somebody(training)
            while who == "the keepers":
                who = self._kill_somebody(training)
            self._check_restored(training)
            self.durable = max(self.durable, training.durable())
            self.num_saved += len(training.log.told("rank-0", "saved"))
        if who == "everything" and self.dice.random() < LOSS:
            self._lose_memory()
        head = self.truth.loaded(self.spec.run)
        assert head >= self.durable
        self.newest = max(whole_in_memory(self.spec), default=head)
        assert self.newest >= self.durable

    def finish(self) -> None:
        """Have a job go on undisturbed: in the end all that it saved is durable."""
        stop = self.newest + 4
        last = replace(self.spec, log=self.spec.log / "last", stop=stop, when_full="wait", durable_every=1)
        with job(last) as training:
            assert training.restored(self.truth).step == self.newest
            training.ended_well()
        assert self.truth.loaded(self.spec.run) == stop - 1

    def _kill_somebody(self, training: Job) -> str:
        """Kill somebody after a while, and say who it was. Without one of its ranks a launcher ends a job."""
        who = self.dice.choice(WHO)
        self.kills[who] += 1
        time.sleep(self.dice.uniform(0, LONGEST_DELAY_S))
        if who in ("the keepers", "everything"):
            self._kill_keepers()
        if who != "the keepers":
            gap_s = LAUNCHER_S if who == "one trainer" else LONGEST_GAP_S
            ranks = self.dice.sample(training.ranks, WORLD_SIZE)
            for process in ranks:
                process.send(signal.SIGKILL)
                time.sleep(self.dice.uniform(0, gap_s))
            assert [process.wait() for process in ranks] == [-signal.SIGKILL] * WORLD_SIZE, ranks[0].err + ranks[1].err
        return who

    def _kill_keepers(self) -> None:
        """Kill the keepers that are at work."""
        for node_dir in self.spec.node_dirs:
            for lock in node_dir.glob("holdfast-*/*/keeper.lock"):
                with suppress(ValueError, FileNotFoundError, ProcessLookupError):
                    pid = int(lock.read_text())
                    if str(node_dir) in Path(f"/proc/{pid}/cmdline").read_text():
                        os.kill(pid, signal.SIGKILL)

    def _check_restored(self, training: Job) -> None:
        """Check that the job restored the newest checkpoint there was, unless it was killed before."""
        if all(training.log.told(f"rank-{rank}", "restored") for rank in range(WORLD_SIZE)):
            assert training.restored(self.truth).step == self.newest

    def _lose_memory(self) -> None:
        for node_dir in self.spec.node_dirs:
            end_keepers(node_dir)
            for folder in node_dir.iterdir():
                shutil.rmtree(folder)


def sweep(folder: Path, num_kills: int, capsys: pytest.CaptureFixture[str]) -> int:
    """Kill so often, in runs of their own on one node or two; returns how many saves there were."""
    seed = int(os.environ.get("HOLDFAST_SWEEP_SEED") or secrets.randbelow(2**32))
    with capsys.disabled():
        sys.stdout.write(f"\nengine kills: seed={seed} revision={revision()}\n")
    dice, truth = random.Random(seed), Truth(SMALL_NUMEL)
    kills: Counter[str] = Counter()
    num_saved = 0
    while kills.total() < num_kills:
        runs = folder / f"run-{kills.total()}"
        (runs / "log").mkdir(parents=True)
        with node_memory(runs, count=dice.choice((1, 2))) as node_dirs:
            spec = Spec(
                str(runs / "run"),
                node_dirs,
                runs / "log",
                numel=SMALL_NUMEL,
                when_full=dice.choice(("wait", "skip")),
                generations=dice.choice((2, 2, 3)),
                durable_every=dice.choice((1, 1, 4)),
            )
            swept = Sweep(spec, truth, dice)
            while swept.kills.total() < min(KILLS_PER_RUN, num_kills - kills.total()):
                swept.kill_a_job()
            swept.finish()
        kills += swept.kills
        num_saved += swept.num_saved
        shutil.rmtree(runs)
    with capsys.disabled():
        sys.stdout.write(f"engine kills: {kills.total()} ({dict(kills)}), saves={num_saved}\n")
    return num_saved


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_after_deaths_at_random_instants_nothing_is_lost_that_was_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(tmp_path, NUM_KILLS, capsys) >= NUM_KILLS
