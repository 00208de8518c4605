"""A line at the terminal that tells how the save under way goes on."""

from __future__ import annotations

import shutil
import sys

from holdfast.checkpointer.events import (
    Event,
    EventSource,
    SaveBegun,
    SaveCommitted,
    SaveDelayed,
    SaveFailed,
    SavePlaced,
    SaveSealed,
    SaveSkipped,
    SaveStaged,
    SaveUnwatched,
    SaveWaiting,
)
from holdfast.errors import printable
from holdfast.reports import size

_ERASE = "\r\x1b[2K"


class TerminalLine:
    """Shows on standard error, on rank 0 at a terminal, what the newest save into memory is doing: one line, written
    over by the next, and erased when the checkpoint is durable. (A save to storage shows a bar by itself.) Where
    standard error is no terminal, as in a log, it shows nothing.
    """

    def __init__(self) -> None:
        self._step: int | None = None

    def hear(self, event: Event, source: EventSource) -> None:
        """Write the line anew."""
        if source.rank != 0 or sys.stderr is None or not sys.stderr.isatty():
            return
        match event:
            case SaveBegun(tier="node memory", memory_only=False):
                self._step = event.step
                self._show(f"saving step {event.step} to {event.tier}")
            case SaveBegun() if event.step == self._step:
                self._end()
            case SaveWaiting() if event.step == self._step:
                self._show(f"saving step {event.step}: waiting for a slot: {event.why}")
            case SavePlaced() if event.step == self._step:
                self._show(f"saving step {event.step}: all ranks agree on {event.place}; copying")
            case SaveStaged() if event.step == self._step:
                self._show(f"saving step {event.step}: {size(event.nbytes)} copied; training goes on")
            case SaveSealed() if event.step == self._step:
                self._show(f"saving step {event.step}: hashed; storage is written")
            case SaveDelayed() if event.step == self._step:
                self._show(f"saving step {event.step}: trying again after: {printable(event.trouble)}")
            case SaveCommitted() | SaveSkipped() | SaveFailed() | SaveUnwatched() if event.step == self._step:
                self._end()

    def _end(self) -> None:
        self._step = None
        self._write(_ERASE)

    def _show(self, text: str) -> None:
        width = shutil.get_terminal_size().columns - 1  # a line that the terminal wraps could not be erased
        self._write(_ERASE + f"holdfast: {text}"[:width])

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
