"""Real processes that start in an instant: a warm process without threads, which has imported everything, forks them.

Each lives until it ends or is killed, or until the tests end: the kernel kills it when the warm process is gone.
"""

from __future__ import annotations

import atexit
import codecs
import ctypes
import multiprocessing
import os
import pickle
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVarTuple

import tests.support.ranks  # noqa: F401 - the fork server that it makes has torch
from tests.support.namespaces import children_inside, enter

Ts = TypeVarTuple("Ts")

_PR_SET_PDEATHSIG = 1
_START_TIMEOUT_S = 60.0


class Process:
    """A process that runs a function. Its exit status is 0, that of a `SystemExit`, or 1 if the function raised
    something else; then the traceback is in `err`."""

    def __init__(self, pid: int, err: Path) -> None:
        self.pid = pid
        self._err = err
        self._pidfd = os.pidfd_open(pid)
        self._status: int | None = None

    @property
    def is_running(self) -> bool:
        return self._status is None and not _is_readable(self._pidfd, 0)

    @property
    def err(self) -> str:
        """The text that the process wrote to standard error."""
        return self._err.read_text(errors="replace")

    def send(self, number: int) -> None:
        """Send the process a signal, if it still runs."""
        if self.is_running:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def stop(self) -> None:
        """Stop the process, as SIGSTOP does, and return when it has stopped."""
        self.send(signal.SIGSTOP)
        while _state(self.pid) not in "TZ":
            time.sleep(0.001)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait until the process ends. Returns its exit status, or the negative number of the signal that ended it."""
        if self._status is None:
            assert _is_readable(self._pidfd, timeout_s), f"process {self.pid} does not end: {self.err}"
            self._status = os.waitstatus_to_exitcode(_nurse().ask(_Wait(self.pid)))
            os.close(self._pidfd)
        return self._status

    def kill(self) -> int:
        """Kill the process, and wait until it ends. Returns its exit status."""
        self.send(signal.SIGKILL)
        return self.wait()


def start(function: Callable[[*Ts], object], *args: *Ts, err: Path, inside: int | None = None) -> Process:
    """Start a process that calls a top-level function; it appends its standard error to the file `err`. It lives in the
    namespaces of the process `inside`, if given (see `tests.support.nodes`)."""
    err.touch()
    return Process(_nurse().ask(_Fork(pickle.dumps((function, args)), str(err), inside)), err)


@dataclass(frozen=True)
class Ended:
    """The exit status of a script, or the negative number of the signal that ended it; and what it printed."""

    status: int
    out: str
    err: str


def run_script(script: str, *arguments: str, timeout_s: float = 60.0) -> Ended:
    """Run the text of a script as a program of its own that has imported torch and holdfast already: in milliseconds
    instead of the seconds that a new interpreter takes. For what a new interpreter does at its start and at its end,
    start one."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = start(_execute, script, arguments, str(out), err=err)
        try:
            status = process.wait(timeout_s)
        finally:
            process.send(signal.SIGKILL)
        return Ended(status, out.read_text(errors="replace"), process.err)


def until(condition: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    """Wait until `condition` is true. Fails after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


@dataclass(frozen=True)
class _Fork:
    call: bytes
    err: str
    inside: int | None


@dataclass(frozen=True)
class _Wait:
    pid: int


class _Nurse:
    """The warm process."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), name="nursery", daemon=True)
        self._process.start()
        theirs.close()
        assert self._connection.poll(_START_TIMEOUT_S), "the nursery does not start"
        self._connection.recv_bytes()
        atexit.register(self._process.kill)

    def ask(self, order: _Fork | _Wait) -> int:
        """Send an order. Returns the pid of the forked process, or the status of the process that was waited for."""
        self._connection.send_bytes(pickle.dumps(order))
        return int(self._connection.recv_bytes())


_only: list[_Nurse] = []


def _nurse() -> _Nurse:
    if not _only:
        _only.append(_Nurse())
    return _only[0]


def _is_readable(descriptor: int, timeout_s: float) -> bool:
    return bool(select.select([descriptor], [], [], timeout_s)[0])


def _state(pid: int) -> str:
    """The letter of a process's state in /proc; Z for a process that is gone."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "Z"


def _die_with_parent() -> None:
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError("prctl(PR_SET_PDEATHSIG) failed")


def _serve(connection: Connection) -> None:
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests' own process
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may not resolve
    _prepare()
    connection.send_bytes(b"")
    while True:
        try:
            order: _Fork | _Wait = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        if isinstance(order, _Wait):
            answer = os.waitpid(order.pid, 0)[1]
        else:
            with children_inside(order.inside):
                answer = os.fork()
                if not answer:
                    os._exit(_run(connection, order))
        connection.send_bytes(b"%d" % answer)


def _prepare() -> None:
    import tests.support.preloaded  # noqa: F401 - the fork server has, unless it started in another folder

    codecs.lookup("ascii")  # a part of Python, which may be where only root reads
    assert len(os.listdir("/proc/self/task")) == 1, "what has threads cannot be forked"


def _execute(script: str, arguments: tuple[str, ...], out: str) -> None:
    with open(out, "wb") as file:
        os.dup2(file.fileno(), 1)
    sys.argv = ["-c", *arguments]
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
    sys.stdout.flush()


def _run(connection: Connection, order: _Fork) -> int:
    try:
        _die_with_parent()
        connection.close()
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
        descriptor = os.open(order.err, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        if order.inside is not None:
            enter(order.inside)
        function, args = pickle.loads(order.call)
        function(*args)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - whatever it is, it is the caller's to judge
        os.write(2, traceback.format_exc().encode())
        return 1
    return 0
