"""Processes that kill themselves in the middle of a file. Torch is not imported here: workers start without it."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

from holdfast.store.base import Bytes, FileWriter
from holdfast.store.posix import PosixStore, PosixWriter


def die_in_file(number: int, at: float) -> None:
    """Have this process kill itself with SIGKILL when it has begun so many files, and written the part `at` of
    another."""
    begin, left = PosixStore.writer, number

    def writer(self: PosixStore, key: str, *, nbytes: int) -> FileWriter:
        nonlocal left
        left -= 1
        made = begin(self, key, nbytes=nbytes)
        return made if left >= 0 else _DyingWriter(made, int(nbytes * at) // 4096 * 4096)

    PosixStore.writer = writer  # type: ignore[assignment,method-assign]


class _DyingWriter:
    """A writer that kills its process once `nbytes` bytes are written."""

    def __init__(self, writer: PosixWriter, nbytes: int) -> None:
        self._writer = writer
        self._left = nbytes
        self.alignment = writer.alignment
        self.in_order = writer.in_order

    def write_at(self, offset: int, *arrays: Bytes) -> None:
        (data,) = arrays
        taken = data[: self._left]
        self._left -= len(taken)
        if len(taken):
            self._writer.write_at(offset, taken)
        if len(taken) < len(data):
            self._die()

    def publish(self, nbytes: int) -> NoReturn:
        self._die()

    def abort(self) -> None:
        self._writer.abort()

    def _die(self) -> NoReturn:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("a killed process goes on")
