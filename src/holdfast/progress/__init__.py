"""Progress of long work, shown only at a terminal. A process that draws no bar imports neither rich nor torch here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock, Thread
from typing import Final

from holdfast.io.meter import Meter

#: Saves and loads that end sooner than this show no bar.
PATIENCE_S: Final = 3.0
_LOOK_S = 0.1


@contextmanager
def progress(description: str, *, shown: bool = True, after_s: float = 0.0) -> Iterator[Meter]:
    """Show a bar on standard error while the block runs, fed by the meter that the block gets.

    Shows nothing where standard error is no terminal or `shown` is false. The bar appears after `after_s` seconds and
    disappears when the block ends. A thread of its own reads the meter and draws the bar, so the work does not wait
    for it.
    """
    meter = Meter()
    if not shown or not _is_at_terminal():
        yield meter
        return
    over = Event()
    thread = Thread(target=_show, args=(description, meter, over, after_s), name="holdfast-progress", daemon=True)
    try:
        thread.start()
        yield meter
    finally:
        over.set()
        if thread.ident is not None:  # it was started
            thread.join()


@contextmanager
def counted(
    description: str, total: int, *, shown: bool = True, after_s: float = PATIENCE_S
) -> Iterator[Callable[[int], None]]:
    """Show a bar as `progress` does, of `total` bytes. Gives a function that advances it by bytes, from any thread."""
    done, lock = 0, Lock()

    def advance(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes

    with progress(description, shown=shown, after_s=after_s) as meter:
        meter.follow(total, lambda: done)
        yield advance


def of_first_rank(what: str, world_size: int) -> str:
    """The description `what`, with a note that only rank 0's bytes are counted where there are several ranks."""
    return what if world_size == 1 else f"{what} (rank 0 of {world_size})"


def _is_at_terminal() -> bool:
    return sys.stderr is not None and not sys.stderr.closed and sys.stderr.isatty()


def _show(description: str, meter: Meter, over: Event, after_s: float) -> None:
    if over.wait(after_s):
        return
    from holdfast.progress.bar import bar

    with bar() as shown:
        task = shown.add_task(description, total=None)
        is_over = False
        while True:
            shown.update(task, total=meter.total, completed=meter.done, refresh=True)
            if is_over:
                return
            is_over = over.wait(_LOOK_S)  # then once more: the work may have been too quick for the last look
