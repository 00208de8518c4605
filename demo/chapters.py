"""The common parts of the story's chapters: a training from its beginning to its end, and a look at a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from demo.launch import Training, running
from demo.promises import Promise
from demo.show import chapter, say


def train(title: str, training: Training, *, done: int = 0) -> None:
    """Train to the end, when `done` steps are done already."""
    with chapter(title, steps=training.end, done=done) as on_step, running(training, on_step) as processes:
        processes.finish()


def inspect(run: Path) -> Promise:
    """Let the command line speak for itself."""
    statuses = []
    for command in (["ls"], ["verify", "--deep"]):
        say(f"\n$ holdfast {' '.join(command)} {run.relative_to(Path.cwd())}")
        arguments = [sys.executable, "-m", "holdfast.cli", *command, str(run)]
        statuses.append(subprocess.run(arguments, check=False).returncode)
    seen = f"holdfast ls and verify end with status {statuses[0]} and {statuses[1]}"
    return Promise(f"{run.name}: listed and sound, byte by byte", not any(statuses), seen)
