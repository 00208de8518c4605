"""Workers of a `DataLoader` that outlive the signals of a preemption, which a launcher sends to them too."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Final

import torch

#: The signals by which schedulers and launchers announce the end of a job.
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)

#: Interval at which a worker looks whether its rank is alive.
_LOOK_S: Final = 1.0


def outlive_signals(worker_id: int) -> None:  # noqa: ARG001 - as `DataLoader` calls it
    """Ignore SIGTERM, SIGINT, SIGUSR1 and SIGUSR2 in this process, except from the process that started it: the
    ``worker_init_fn`` of a `DataLoader` in a job that saves on a preemption (`OnPreemption`).

    ``torchrun`` sends such a signal to all processes of a rank. Workers that end then make the next batch an error, so
    that the last step is not saved. A worker still ends with its loader and with its rank. `follow` of the orders and
    streams of `holdfast.data` sees to it by itself.
    """
    # A handler does not hear who sent a signal; a thread that waits for it does. The process ends with its rank, which
    # terminates it, and multiprocessing then waits for it for ever.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_IGN)  # for threads that were there before
    Thread(target=_end_with_parent, name="holdfast-worker", daemon=True).start()


def keep_random_state(loader: object, *, seed: int) -> None:
    """Give `loader` a generator of its own, seeded with `seed`, unless it has one: each iteration of a loader draws a
    number, which a resumed job would draw once more."""
    if getattr(loader, "generator", loader) is None:
        loader.generator = torch.Generator().manual_seed(seed)  # type: ignore[attr-defined]  # a DataLoader


def keep_workers(loader: object) -> None:
    """Have the workers that `loader` starts from now on outlive signals, after its own ``worker_init_fn``."""
    before: Callable[[int], None] | None = getattr(loader, "worker_init_fn", None)
    if getattr(loader, "num_workers", 0) and getattr(before, "func", before) not in (_start, outlive_signals):
        loader.worker_init_fn = partial(_start, before)  # type: ignore[attr-defined]  # a DataLoader, or one like it


def _start(before: Callable[[int], None] | None, worker_id: int) -> None:
    if before is not None:
        before(worker_id)
    outlive_signals(worker_id)


def _end_with_parent() -> None:
    """End this process when the process that started it sends a signal, or is dead."""
    parent, adopter = multiprocessing.parent_process(), os.getppid()
    pid = adopter if parent is None else parent.pid
    while os.getppid() == adopter and (parent is None or parent.is_alive()):
        told = signal.sigtimedwait(_SIGNALS, _LOOK_S)
        if told is not None and told.si_pid == pid:
            break
    os._exit(0)
