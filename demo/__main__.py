"""The story: a reference, a job that is killed in the middle of a save, and two jobs that go on from what is there.

Everything that is shown was seen in this run; a promise that was not kept ends it with status 1.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import holdfast
from demo.launch import DemoError, Killed, Training, running
from demo.promises import LOSS_TOLERANCE, bit_identical, close_losses, equal_losses
from demo.show import CONSOLE, Curves, Promise, chapter, draw, say, table_of

_OUT = Path("demo-out")
_NUM_SAVES = 6
#: The job is killed in the first save after this share of its steps in which that succeeds.
_KILL_AFTER = 0.6
_VICTIM = 1
#: How long the survivor waits for the killed rank.
_PATIENCE_S = 10.0


@dataclass(frozen=True)
class Story:
    """The folders of one demo and its length."""

    out: Path
    steps: int

    @property
    def save_every(self) -> int:
        """Steps between saves."""
        return self.steps // _NUM_SAVES

    @property
    def run(self) -> Path:
        """The run of the job, and of the one resumed on 2 ranks."""
        return self.out / "run"

    def copy(self, world_size: int) -> Path:
        """The run ....."""
        return self.out / f"run-{world_size}-ranks"
