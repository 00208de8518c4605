"""The number of keepers of a run that started on this node one after another, and died before they made anything
durable.

A trainer starts a keeper where there is none. If each keeper dies soon after its start (a defect, say, or a machine
that has no memory for it), trainers must not start keepers for ever. So each keeper counts its start in a file of the
folder, and removes that file once a checkpoint is durable, or when the keeper ends in order. Trainers pause before a
start, longer each time, and after `MAX_STARTS` they take it that no keeper starts. `FORGOTTEN_S` later, or after a
boot, they try again. The time is that since the boot: somebody may set the wall clock back.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Final, NamedTuple

from holdfast.errors import ConfigurationError
from holdfast.node_memory.node_folder import NodeFolder, boot_id

#: Number of starts in a row after which no more keeper is started.
MAX_STARTS: Final = 5
#: Time after which a start counts no more.
FORGOTTEN_S: Final = 600.0
_FIRST_PAUSE_S: Final = 0.25
_NAME: Final = "keeper.starts"


class Starts(NamedTuple):
    """The `number` of keepers that came to nothing, and the time since the last of them started."""

    number: int
    age_s: float

    @property
    def pause_s(self) -> float:
        """The time to wait before the next keeper is started."""
        if not 0 < self.number < MAX_STARTS:
            return 0.0
        return max(_FIRST_PAUSE_S * (1 << (self.number - 1)) - self.age_s, 0.0)


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def note_start(folder: NodeFolder) -> None:
    """Count the start of a keeper of `folder`. Only for that keeper."""
    with suppress(OSError):  # a folder that takes no file holds no snapshots that a keeper could care for
        line = f"{starts(folder).number + 1} {_since_boot_s():.3f} {boot_id()}\n"
        folder.write(_NAME, line.encode("ascii"))


def clear_starts(folder: NodeFolder) -> None:
    """Forget all starts: the keeper of `folder` works. Only for that keeper."""
    folder.discard(_NAME)


def starts(folder: NodeFolder) -> Starts:
    """The starts that the file of `folder` counts. None are counted where the file is damaged."""
    try:
        with os.fdopen(folder.open(_NAME), "rb") as file:
            number, at_s, boot = file.read(128).split()
        if boot.decode("ascii") != boot_id():
            return Starts(0, 0.0)
        age_s = max(_since_boot_s() - float(at_s), 0.0)
        return Starts(int(number), age_s) if age_s < FORGOTTEN_S else Starts(0, age_s)
    except (FileNotFoundError, ConfigurationError, ValueError):
        return Starts(0, 0.0)
