"""Rounds: work that a background thread does again and again while a training loop lasts."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import Final
from weakref import finalize

#: Time that `Rounds.close` waits for the present round.
_JOIN_S: Final = 1.0


class Rounds:
    """Calls `look` in a background thread, round after round; each returns the seconds until the next one, or None to
    end. After the rounds it calls `last`, if there is one. Neither must raise, nor refer to this object.

    The rounds end with `close`, when this object is gone, and at the latest when the interpreter ends: no thread may be
    inside torch then.
    """

    def __init__(self, look: Callable[[], float | None], *, name: str, last: Callable[[], None] | None = None) -> None:
        #: True asks for a round at once, False for the end.
        self._bell: SimpleQueue[bool] = SimpleQueue()
        thread = Thread(target=_run, args=(look, last, self._bell), name=name, daemon=True)
        self._stop = finalize(self, _stop, thread, self._bell)
        thread.start()

    def hurry(self) -> None:
        """Have the next round begin as soon as the present one has ended."""
        self._bell.put(True)

    def close(self) -> None:
        """End after the present round. Does not wait for a long one."""
        self._stop()


def _run(look: Callable[[], float | None], last: Callable[[], None] | None, bell: SimpleQueue[bool]) -> None:
    goes_on = True
    while goes_on and (pause_s := look()) is not None:
        try:
            goes_on = bell.get(timeout=pause_s)
        except Empty:
            continue
    if last is not None:
        last()


def _stop(thread: Thread, bell: SimpleQueue[bool]) -> None:
    bell.put(False)
    if thread is not current_thread():
        thread.join(_JOIN_S)
