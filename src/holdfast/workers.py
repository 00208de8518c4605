"""Long work as tasks on a `concurrent.futures.Executor`: processes of this machine, or workers of Ray, Dask and MPI.

A task is a small value that can be pickled. The worker opens what it reads and writes by itself, so no bytes of tensors
travel between processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, Protocol, TypeAlias, TypeVar

from holdfast.errors import ConfigurationError, ErrorWire, HoldfastError, StorageError, from_wire, to_wire
from holdfast.wording import kind_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

#: The result of a task, or its error.
_Outcome: TypeAlias = tuple[T] | ErrorWire
#: Chooses who runs tasks, from their sizes in bytes: None is this process.
Workforce = Callable[[Sequence[int]], AbstractContextManager[Executor | None]]

#: Least bytes for which processes are started without being asked for, and most processes then: three threads of one
#: process keep a disk busy, and each process takes a second to start and up to 512 MiB.
_MUCH_NBYTES: Final = 4 << 30
_MOST_PROCESSES: Final = 8
_MOST_NAMED: Final = 4


class Task(Protocol[T_co]):
    """A part of long work, as a value that can be pickled."""

    @property
    def paths(self) -> Sequence[str]:
        """The full paths of the files that it writes, for messages."""

    def run(self) -> T_co:
        """Do the work. Safe to repeat, also after a worker died in it."""


def on_executor(executor: Executor | None) -> Workforce:
    """The workers of `executor`; this process for None.

    Raises `TypeError` for another object, and `ConfigurationError`, code ``config.executor``, for a pool that forks.
    """
    if executor is not None:
        _check(executor)
    return lambda _: nullcontext(executor)


def on_processes(number: int | None) -> Workforce:
    """So many processes of this machine, which end with this one; for None, as many as pay."""

    def choose(sizes: Sequence[int]) -> AbstractContextManager[Executor | None]:
        wanted = _paying(sum(sizes)) if number is None else number
        several = min(wanted, len(sizes))
        return nullcontext(None) if several < 2 else _process_pool(several)

    return choose


def _paying(nbytes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if nbytes < _MUCH_NBYTES else min(cores // 2, _MOST_PROCESSES)


def run_tasks(tasks: Sequence[Task[T]], executor: Executor, *, finished: Callable[[T], None]) -> None:
    """Run all tasks on `executor`, and call `finished` with the result of each, in this thread, in any order.

    Blocks until all have ended. After an error, tasks that wait are cancelled, and those that run end first, where the
    executor says which ones run; after an interrupt, or on Ray, they may go on, also while a later call works. So tasks
    delete nothing, replace nothing, and look before they publish a file whether it is still wanted.

    Raises the first `HoldfastError` of a task, and `StorageError`, code ``storage.worker``, where a worker died or
    raised anything else: it names the files that were not finished.
    """
    futures: dict[Future[_Outcome[T]], Task[T]] = {}
    done: set[int] = set()
    try:
        for task in tasks:
            futures[_submitted(executor, task)] = task
        for future in as_completed(futures):
            outcome = future.result()
            if isinstance(outcome, ErrorWire):
                raise from_wire(outcome)
            done.add(id(futures[future]))
            finished(outcome[0])
    except HoldfastError:
        _settle(futures)
        raise
    except Exception as error:
        _settle(futures)
        raise _lost(error, futures, [task for task in tasks if id(task) not in done]) from error
    except BaseException:
        for future in futures:
            future.cancel()
        raise


def _submitted(executor: Executor, task: Task[T]) -> Future[_Outcome[T]]:
    future: Future[_Outcome[T]] | None = executor.submit(_attempt, task)
    if future is None:
        raise ConfigurationError(
            f"submit of {kind_of(executor)} returned None in place of a Future.",
            code="config.executor",
            action="Have submit return a concurrent.futures.Future, which gets the result of the task.",
        )
    return future


def _attempt(task: Task[T]) -> _Outcome[T]:
    """Run a task in a worker. Errors travel as values, since executors wrap exceptions each in its own way."""
    try:
        return (task.run(),)
    except HoldfastError as error:
        return to_wire(error)


def _settle(futures: Mapping[Future[Any], object]) -> None:
    # A future that is cancelled ends only where its executor says so, and `wait` would wait for that.
    wait([future for future in futures if not future.cancel()])


def _lost(error: Exception, futures: Mapping[Future[Any], Task[Any]], unfinished: Sequence[Task[Any]]) -> StorageError:
    """The error for a worker that ended or raised `error`, which is not ours.

    A pool of processes ends with any of them, and takes tasks in order. So the files it worked on are named first.
    """
    failed = [task for future, task in futures.items() if not future.cancelled() and future.exception() is not None]
    names = [path for task in failed or unfinished for path in task.paths]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return StorageError(
        f"a worker did not finish its files ({type(error).__name__}: {error!s:.300}). Not finished: "
        f"{', '.join(names[:_MOST_NAMED])}{more}.",
        code="storage.worker",
        action="Repeat the call with the same arguments: it keeps the files that are finished. If a worker dies again, "
        "look whether the kernel killed it for memory, or use fewer workers.",
        path=names[0] if names else None,
        retryable=True,
    )


def unfinished(path: str) -> StorageError:
    """The error for the folder at `path`, which lacks files of tasks that an executor reported as finished."""
    return StorageError(
        f"the workers did not write all files of {path}, though the executor reported the results of all tasks.",
        code="storage.worker",
        action="Look whether the executor gives each task its own result, and whether something deletes files there. "
        "Then repeat the call with the same arguments.",
        path=path,
    )


def _check(executor: Executor) -> None:
    if not isinstance(executor, Executor):
        raise TypeError(f"executor must be a concurrent.futures.Executor, not {type(executor).__name__}")
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise ConfigurationError(
            "this ProcessPoolExecutor forks its workers, and a fork of a process that has threads can hang.",
            code="config.executor",
            action='Make it with mp_context=multiprocessing.get_context("spawn").',
        )


@contextmanager
def _process_pool(number: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that run tasks, for the duration of a ``with`` block. They end with this one, and at an interrupt."""
    context = multiprocessing.get_context("spawn")  # this process has threads: it must not fork
    with _without_sigpipe():
        pool = ProcessPoolExecutor(number, mp_context=context, initializer=_end_with_parent)
        try:
            yield pool
        except BaseException:
            for process in list((getattr(pool, "_processes", None) or {}).values()):
                process.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _without_sigpipe() -> Iterator[None]:
    """Ignore SIGPIPE for the duration of a ``with`` block: a write to a process that died is to be an error. The
    command line, which ends by it as other commands do, works in the main thread, the only one that can set it."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGPIPE) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def _end_with_parent() -> None:
    """Have this worker end when its parent dies: it would wait for tasks for ever. The parent decides at Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="holdfast-parent", daemon=True).start()
