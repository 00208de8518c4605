"""Signals that announce a preemption, at random instants of a job under torchrun: each leaves a state to resume."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holdfast
from tests.checkpointer.test_policies import SCRIPT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

NUM_SIGNALS = 100
#: A job is started anew after so many signals, so that starts are hit too.
NUM_PER_RUN = 5
#: Time from the signal to the end of the job; schedulers give 30 s and more.
DEADLINE_S = 30.0


def preempted(script: Path, run: Path, node_dir: Path, delay_s: float, *, trains: bool) -> tuple[set[int], str]:
    """Start or resume the job, send SIGTERM to torchrun after `delay_s` (from the first steps on, if it `trains`), and
    return the last steps that the ranks report."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    with subprocess.Popen(
        [*command, str(run), str(node_dir)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        if trains:
            assert job.stdout.readline() == "trains\n"
        time.sleep(delay_s)
        job.send_signal(signal.SIGTERM)
        out, err = job.communicate(timeout=DEADLINE_S)
    return {int(line.split()[-1]) for line in out.splitlines() if line.startswith("ends")}, err


def test_signals_at_any_instant_leave_a_state_to_resume_from(tmp_path: Path, node_dir: Path) -> None:
    script, draw = tmp_path / "train.py", random.Random(NUM_SIGNALS)
    script.write_text(SCRIPT)
    num_saved, start_s = 0, 0.0
    for number in range(NUM_SIGNALS):
        run, is_new = tmp_path / f"run{number // NUM_PER_RUN}", number % NUM_PER_RUN == 0
        before = -1 if is_new else holdfast.open(run).step
        # A resumed job is hit from its first moment on: imports, rendezvous and restore included. A new one starts,
        # trains for a second on average, and ends; in twice that time, half of the resumed jobs have begun to train.
        delay_s = draw.uniform(0, 2) if is_new else draw.uniform(0, 2 * start_s)
        begin_s = time.monotonic()
        ends, err = preempted(script, run, node_dir, delay_s, trains=is_new)
        start_s = time.monotonic() - begin_s if is_new else start_s
        head = holdfast.open(run).step
        assert ends <= {head}, f"signal {number}: the ranks ended after {ends}, the head is {head}\n{err}"
        assert head >= before
        num_saved += head > before
    assert num_saved >= NUM_SIGNALS // 3  # the others came before the first step of a resumed job
