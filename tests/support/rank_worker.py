"""The loop of a warm process of `tests.support.ranks`: it executes one task after another until the tests end."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import pickle
import random
import signal
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"

_PR_SET_PDEATHSIG = 1


def environment_of(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment of a rank whose launcher serves the store for its process group at `port`, as torchrun does. No
    rank serves one, so no port has to be found that is free and stays so."""
    return {
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


class RankError(Exception):
    """Stands for an exception that cannot be pickled or is no `Exception`; says what it said."""


@dataclass(frozen=True)
class Task:
    """One call on one rank: the pickled function and arguments, and the process group to make (none without a port)."""

    call: bytes
    rank: int
    world_size: int
    store_port: int | None
    timeout_s: float
    warning_filters: Sequence[Any]


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call on one rank: its result, or else its exception, pickled."""

    succeeded: bool
    payload: bytes
    traceback: str = ""


def serve(connection: Connection, stacks: Connection) -> None:
    """Execute tasks until the tests end."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the caller's, who kills us
    faulthandler.enable(stacks.fileno())
    faulthandler.register(signal.SIGUSR1, stacks.fileno(), all_threads=True)
    import tests.support.preloaded  # noqa: F401 - the fork server has, unless it started in another folder

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may not resolve
    while True:
        connection.send_bytes(b"")
        try:
            task: Task = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        _execute(connection, task)


def _execute(connection: Connection, task: Task) -> None:
    torch.manual_seed(0)
    random.seed(0)
    with _restored_surroundings(), warnings.catch_warnings():
        warnings.filters = task.warning_filters
        connection.send_bytes(pickle.dumps(_outcome(task)))
        connection.recv_bytes()
        gc.collect()  # wrappers such as DDP hold the process group in cycles
        if dist.is_initialized():
            dist.destroy_process_group()


def _outcome(task: Task) -> Outcome:
    try:
        if task.store_port is not None:
            dist.init_process_group(
                "gloo",
                store=dist.TCPStore(HOST, task.store_port, is_master=False),
                rank=task.rank,
                world_size=task.world_size,
                timeout=timedelta(seconds=task.timeout_s),
            )
        function, args = pickle.loads(task.call)
        return Outcome(succeeded=True, payload=pickle.dumps(function(*args)))
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is the caller's to judge
        return Outcome(succeeded=False, payload=_pickled(error), traceback=traceback.format_exc())


def _pickled(error: BaseException) -> bytes:
    stand_in = pickle.dumps(RankError("".join(traceback.format_exception_only(error)).strip()))
    if not isinstance(error, Exception):
        return stand_in
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:  # noqa: BLE001 - an exception class may fail to pickle in any way
        return stand_in
    return payload


@contextmanager
def _restored_surroundings() -> Iterator[None]:
    environment, directory = dict(os.environ), Path.cwd()
    try:
        yield
    finally:
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(environment)
