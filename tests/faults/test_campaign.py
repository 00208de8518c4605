"""No mixture: whatever happens beside a background save, the committed checkpoint is the whole state at the instant of
the call of `save`.

Jobs add parameter groups, clear optimizer state, change frozen parameters in place and by ``.data =``, load and
transfer into what is being copied, are interrupted in `save`, and are killed; see `tests/faults/campaign_job.py`.
HOLDFAST_CAMPAIGN_SAVES says how many saves there are, HOLDFAST_CAMPAIGN_SEED repeats a campaign.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import shutil
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

import holdfast
from holdfast.run.history import Run
from holdfast.store.base import Location
from holdfast.store.urls import open_store
from tests.faults.campaign_job import Loop, Place, Truth, found, work
from tests.support import nursery
from tests.support.keepers import end_keepers

NUM_SAVES: Final = 400
SAVES_PER_RUN: Final = 200
#: Time after which a job is killed, at most.
LONGEST_LIFE_S: Final = 4.0


@dataclass
class Campaign:
    """Jobs on one run after another, and what was found."""

    folder: Path
    dice: random.Random
    counts: Counter[str] = field(default_factory=Counter)

    def run(self, num_saves: int) -> None:
        """Have jobs begin at least so many saves."""
        source = str(self.folder / "source")
        holdfast.save(source, Loop(random.Random(0), "").state, 0)
        while self.counts["saves"] < num_saves:
            self._attack_a_run(source, min(SAVES_PER_RUN, num_saves))

    def _attack_a_run(self, source: str, num_saves: int) -> None:
        folder = self.folder / f"run-{self.counts['runs']}"
        (folder / "node").mkdir(parents=True)
        place = Place(folder, source)
        log = place.log
        log.touch()
        while (first := len(truths_in(log))) < num_saves:
            seed = self.dice.randrange(2**31)
            job = nursery.start(work, place, seed, range(first, num_saves), err=folder / "err")
            self._let_live(job)
        end_keepers(folder / "node")
        self._check(place.run, log)
        self.counts["runs"] += 1
        self.counts["saves"] += first
        shutil.rmtree(folder)

    def _let_live(self, job: nursery.Process) -> None:
        """Kill the job at some time; or it ends by itself."""
        end_s = time.monotonic() + self.dice.random() * LONGEST_LIFE_S
        is_spared = self.dice.random() < 0.3
        while job.is_running and (is_spared or time.monotonic() < end_s):
            time.sleep(0.005)
        if job.is_running:
            self.counts["kills"] += 1
        status = job.kill()
        assert status in (0, -signal.SIGKILL), job.err

    def _check(self, run: str, log: Path) -> None:
        """Every checkpoint that was committed is one of the instants."""
        truths = truths_in(log)
        for place in Run.open(open_store(Location(run))).places():
            path = f"{run}@{place}"
            step = holdfast.open(path).step
            assert found(path) == truths[step], f"{path} is not what step {step} was"
            self.counts["commits"] += 1


def truths_in(log: Path) -> dict[int, Truth]:
    """The states that the job meant to save, by step. (A line that a kill cut short was not followed by a save.)"""
    truths: dict[int, Truth] = {}
    for line in log.read_text(encoding="utf-8").splitlines():
        try:
            truth = json.loads(line)
        except json.JSONDecodeError:
            continue
        truths[truth.pop("step")] = truth
    return truths


def conduct(tmp_path: Path, num_saves: int) -> Counter[str]:
    """Have a campaign of `num_saves` and return the counts of what happened; a mixture is an AssertionError."""
    seed = int(os.environ.get("HOLDFAST_CAMPAIGN_SEED", secrets.randbelow(2**31)))
    sys.stderr.write(f"HOLDFAST_CAMPAIGN_SEED={seed}\n")
    campaign = Campaign(tmp_path, random.Random(seed))
    try:
        campaign.run(num_saves)
    finally:
        sys.stderr.write(f"campaign: {dict(campaign.counts)}\n")
    return campaign.counts


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_campaign_finds_no_mixture(tmp_path: Path) -> None:
    num_saves = int(os.environ.get("HOLDFAST_CAMPAIGN_SAVES", NUM_SAVES))
    counts = conduct(tmp_path, num_saves)
    assert counts["saves"] >= num_saves
    assert counts["commits"] > num_saves // 4
