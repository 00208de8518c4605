"""``python -m holdfast.proving SCRIPT [ARGUMENTS]``: a script as ``holdfast prove`` runs it.

The script gets another `holdfast.Checkpointer`, which saves into a folder of the proof and may kill the process.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, SupportsFloat

import numpy as np
import torch

import holdfast
from holdfast.checkpointer import Checkpointer
from holdfast.checkpointer.handle import Handle
from holdfast.checkpointer.memory_option import Memory
from holdfast.control.torch_store import global_rank
from holdfast.policy.when import EverySteps
from holdfast.proving.rehearsal import Rehearsal

_SEED: Final = 0


def checkpointer_of(rehearsal: Rehearsal) -> type[Checkpointer]:
    """The `Checkpointer` of a script that rehearses."""
    num_made = 0

    class RehearsingCheckpointer(Checkpointer):
        """Saves into a run of the proof, as often as that asks for, and dies when it says so."""

        def __init__(self, run: object, state: Mapping[str, object], **options: Any) -> None:
            nonlocal num_made
            folder = f"{rehearsal.folder}/run-{num_made}"
            num_made += 1
            if options.get("memory", Memory()) is not None:
                options["memory"] = Memory(node_dir=Path(rehearsal.node_dir))
            options.pop("keep", None)  # all that is saved is compared
            if options.get("save") is not None:
                options["save"] = EverySteps(rehearsal.every)
            super().__init__(folder, state, **options)
            self._last_s = time.monotonic()
            self._dies = False

        def step(self, step: int, *, metrics: Mapping[str, SupportsFloat] | None = None) -> Handle | None:
            handle = super().step(step, metrics=metrics)
            self._maybe_die(step)
            return handle

        def save(
            self, step: int, *, metrics: Mapping[str, SupportsFloat] | None = None, memory_only: bool = False
        ) -> Handle:
            handle = super().save(step, metrics=metrics)  # to storage too: all that is saved is compared
            if self._policy is None:  # else `step` counts
                self._maybe_die(step)
            return handle

        def _maybe_die(self, step: int) -> None:
            now_s = time.monotonic()
            is_due = rehearsal.dies_after is not None and step >= rehearsal.dies_after
            if is_due and not self._dies and global_rank() == 0:
                self._dies = True
                delay_s = rehearsal.delay * (now_s - self._last_s)
                threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
            self._last_s = now_s

    return RehearsingCheckpointer


def main(arguments: list[str]) -> None:
    """Run the script in `arguments` as its main program.

    All generators of random numbers are seeded first, so that a script which seeds none, or not all of them, does not
    differ from itself.
    """
    script = arguments[0]
    random.seed(_SEED)
    np.random.seed(_SEED)  # noqa: NPY002 - the global generator, which the script may use
    torch.manual_seed(_SEED)
    vars(holdfast)["Checkpointer"] = checkpointer_of(Rehearsal.of_environment())
    sys.argv = arguments
    sys.path[0] = str(Path(script).resolve().parent)  # as Python does for a script
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
