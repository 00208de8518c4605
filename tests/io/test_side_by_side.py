"""Small files are written side by side, large ones one after another; an error or an interrupt ends all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from holdfast.io.side_by_side import NUM_SMALL_TASKS, write_side_by_side


@dataclass(frozen=True)
class SizedTask:
    """A task that writes files."""

    number: int
    is_small: bool


SMALL = [SizedTask(number, is_small=True) for number in range(2 * NUM_SMALL_TASKS)]
LARGE = [SizedTask(100 + number, is_small=False) for number in range(3)]


def no_progress(nbytes: int) -> None:
    assert nbytes > 0


def test_tasks_of_small_files_run_at_the_same_time() -> None:
    met = threading.Barrier(NUM_SMALL_TASKS)
    done: list[int] = []

    def write(task: SizedTask, tell: Callable[[int], None]) -> int:
        met.wait(30)  # raises where fewer tasks run at once
        tell(1)
        return task.number

    write_side_by_side(SMALL, write, finished=done.append, advance=no_progress)
    assert sorted(done) == [task.number for task in SMALL]


def test_a_task_of_a_large_file_is_whole_before_the_next_task_begins() -> None:
    running: set[int] = set()
    done: list[int] = []
    told: list[int] = []

    def write(task: SizedTask, tell: Callable[[int], None]) -> int:
        if not task.is_small:
            assert not running
        running.add(task.number)
        tell(task.number)
        running.remove(task.number)
        return task.number

    tasks = [*LARGE[:2], *SMALL, LARGE[2]]
    write_side_by_side(tasks, write, finished=done.append, advance=told.append)
    assert done[:2] == [100, 101]
    assert done[-1] == 102
    assert sorted(told) == sorted(done) == sorted(task.number for task in tasks)


@pytest.mark.parametrize("error", [OSError("no room"), KeyboardInterrupt()])
def test_the_other_tasks_end_at_their_next_window_after_an_error(error: BaseException) -> None:
    failed = threading.Event()
    begun: list[int] = []

    def write(task: SizedTask, tell: Callable[[int], None]) -> int:
        begun.append(task.number)
        if task.number == 0:
            failed.set()
            raise error
        assert failed.wait(30)
        for _ in range(10**9):  # the task would go on for ever
            tell(1)
        return task.number

    with pytest.raises(type(error)) as raised:
        write_side_by_side(SMALL, write, finished=lambda _: None, advance=no_progress)
    assert raised.value is error
    assert len(begun) <= NUM_SMALL_TASKS
