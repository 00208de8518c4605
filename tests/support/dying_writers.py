"""Processes that kill themselves in the middle of a file. Torch is not imported here: workers start without it."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np

from holdfast.exporting import file_tasks
from holdfast.importing import data_file_task


def die_in_file(number: int, at: float) -> None:
    """Have this process kill itself with SIGKILL when it has written so many files, and the part `at` of another."""
    for module in (file_tasks, data_file_task):
        module.write_file = _Dying(module.write_file, number, at)  # type: ignore[attr-defined]


class _Dying:
    """`write_file`, until the process kills itself."""

    def __init__(self, write: Any, number: int, at: float) -> None:
        self._write = write
        self._left = number
        self._at = at

    def __call__(self, writer: Any, sources: Any, **options: Any) -> bytes:
        self._left -= 1
        if self._left >= 0:
            return self._write(writer, sources, **options)  # type: ignore[no-any-return]
        self._write_part(writer, sources)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process goes on")

    def _write_part(self, writer: Any, sources: Any) -> None:
        nbytes = int(sources[0].nbytes * self._at) // 4096 * 4096
        data = np.zeros(nbytes, np.uint8)
        if nbytes:
            sources[0].read_into(0, data)
            writer.write_at(4096, data)
