"""The last chapters of the story: a job whose policies say when to save and what to keep, the proof that its script
resumes, and the page about its run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import holdfast
from demo.loop import BATCH_SIZE, NUM_SAMPLES
from demo.processes import ROOT, PolicyTraining
from demo.promises import Promise, each_sample_once, kept_the_newest, saved_together
from demo.runs import Runs
from demo.show import say

_STEPS, _SAVE_EVERY, _NUM_KEPT = 40, 6, 2
#: The step after which one rank gets its SIGTERM: no step of the schedule.
_SIGNALLED_RANK, _SIGNALLED_AFTER = 1, 8
_NUM_PROVED_STEPS = 5


def live_by_policies(out: Path, runs: Runs) -> list[Promise]:
    """A job is preempted by a SIGTERM to one of its two ranks, and goes on on four."""
    run = runs.path("run-policies")
    # Two nodes, so that the torchrun of the first rank that ends does not end the other one.
    job = PolicyTraining(out / "policies", 2, _STEPS, save_to=run, save_every=_SAVE_EVERY, nodes=2)
    with job.running(f"Policies: EverySteps({_SAVE_EVERY}) | OnPreemption(), and a SIGTERM to rank {_SIGNALLED_RANK}"):
        job.follow(to=_SIGNALLED_AFTER)
        pids = [note["pid"] for note in job.each("started")]
        os.kill(pids[_SIGNALLED_RANK], signal.SIGTERM)
        job.wait()
    exit_codes = [job.exit_status_of_rank(rank, pid) for rank, pid in enumerate(pids)]
    first = job.saved()
    following = PolicyTraining(out / "policies-resumed", 4, _STEPS, save_to=run, save_every=_SAVE_EVERY)
    following.finish("The job goes on, on 4 ranks", done=first[0][-1] + 1)
    say(f"  saved after steps {first[0]} on 2 ranks, and after steps {following.saved()[0]} on 4")
    return [
        saved_together(
            "One rank gets a SIGTERM: all ranks save after the same step, and exit with 75",
            first,
            exit_codes,
            signalled=_SIGNALLED_AFTER,
            every=_SAVE_EVERY,
        ),
        each_sample_once(
            "On 4 ranks the data goes on: in each epoch every sample comes once",
            [job.samples(), following.samples()],
            num_samples=NUM_SAMPLES,
            num_steps=_STEPS,
            batch_size=BATCH_SIZE,
        ),
        kept_the_newest(
            f"KeepLast({_NUM_KEPT}) deletes all other checkpoints",
            [checkpoint.step for checkpoint in holdfast.ls(run)],
            first[0] + following.saved()[0],
            number=_NUM_KEPT,
        ),
        _prove(out / "proof", runs.path("run-proof")),
        _report(run, out / "report.html"),
    ]


def _prove(folder: Path, run: str) -> Promise:
    """Let `holdfast prove` kill the script and compare."""
    folder.mkdir()
    script = [str(Path("demo") / "loop.py"), f"--witness={folder}", f"--steps={_NUM_PROVED_STEPS}"]
    script += [f"--save-to={run}", f"--save-every={_SAVE_EVERY}"]
    done = _holdfast("prove", "--kills=1", *script)
    say(done.stdout.rstrip())
    lines = (done.stdout + done.stderr).splitlines()
    seen = next((line for line in lines if "roved" in line), "no verdict")
    return Promise("holdfast prove: the script resumes exactly", done.returncode == 0, seen)


def _report(run: str, page: Path) -> Promise:
    """Let `holdfast report` write its page."""
    done = _holdfast("report", run, f"--out={page}")
    say(done.stdout.rstrip())
    has_page = page.exists() and run.rpartition("/")[2] in page.read_text()
    seen = f"{page.stat().st_size / 1e3:.0f} kB: {page}" if has_page else "no page"
    return Promise("holdfast report writes a page about the run", has_page, seen)


def _holdfast(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the command line, at the root of this repository, and show it."""
    say(f"\n$ holdfast {' '.join(arguments)}".replace(f"{Path.cwd()}/", ""))
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "holdfast.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
