"""Small files written at the same time by the threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Final, Protocol, TypeVar

from holdfast.io.buffers import NUM_THREADS, run_threads

#: Number of small tasks that run at the same time: some fill windows, while others wait until their files are durable.
NUM_SMALL_TASKS: Final = 2 * NUM_THREADS

T = TypeVar("T", bound="_SizedTask")
S = TypeVar("S")


class _SizedTask(Protocol):
    @property
    def is_small(self) -> bool:
        """Whether each of the files that a task writes fits into one window."""


class _StoppedError(Exception):
    """Another thread failed."""


def write_side_by_side(
    tasks: Sequence[T],
    write: Callable[[T, Callable[[int], None]], S],
    *,
    finished: Callable[[S], None],
    advance: Callable[[int], None],
) -> None:
    """Call `write` for each task in turn, and `finished` with each result. Blocks until all have returned.

    Tasks of small files are done a few at a time: else the device would wait while a small file begins, ends, and is
    made durable. A task of a large file is done alone, by several threads, and is whole before the next one begins.
    `write` gets a function to call with the number of bytes of each finished window. That passes them on to `advance`,
    and ends the task with an error after another one failed. `finished` and `advance` are called by one thread at a
    time. Raises the first error, when no task runs any more.
    """
    for are_small, group in groupby(tasks, key=lambda task: task.is_small):
        _write_some(list(group), write, NUM_SMALL_TASKS if are_small else 1, finished, advance)


def _write_some(
    tasks: Sequence[T],
    write: Callable[[T, Callable[[int], None]], S],
    num_threads: int,
    finished: Callable[[S], None],
    advance: Callable[[int], None],
) -> None:
    waiting = iter(tasks)
    lock = threading.Lock()
    stopped = threading.Event()

    def tell(nbytes: int) -> None:
        if stopped.is_set():
            raise _StoppedError
        with lock:
            advance(nbytes)

    def take_turns() -> None:
        while not stopped.is_set():
            with lock:
                task = next(waiting, None)
            if task is None:
                return
            outcome = write(task, tell)
            with lock:
                finished(outcome)

    run_threads(min(num_threads, len(tasks)), take_turns, stop=stopped.set)
