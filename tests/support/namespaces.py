"""Entry of a process into the namespaces of an emulated node (see `tests.support.nodes`)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

#: The interface of a node that leads to the others.
INTERFACE = "eth0"
#: The variables in the environment of a node's processes.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": INTERFACE}

_KINDS = ("net", "uts", "mnt")
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def children_inside(init: int | None) -> Iterator[None]:
    """Within the block, a process that this thread forks belongs to the PID namespace of the process `init`, and dies
    with it. Its parent stays this process."""
    if init is None:
        yield
        return
    with ExitStack() as stack:
        inside, outside = (stack.enter_context(_opened(pid, "pid")) for pid in (init, os.getpid()))
        _set(inside)
        try:
            yield
        finally:
            _set(outside)


@contextmanager
def in_network_of(pid: int) -> Iterator[None]:
    """Within the block, this thread is in the network of the process `pid`: sockets that it makes there stay there."""
    with ExitStack() as stack:
        theirs, own = (stack.enter_context(_opened(each, "net")) for each in (pid, os.getpid()))
        _set(theirs)
        try:
            yield
        finally:
            _set(own)


def enter(init: int) -> None:
    """Bring this process, which has one thread, to the network, the host name and the mounts of the process `init`."""
    folder = Path.cwd()
    with ExitStack() as stack:
        for descriptor in [stack.enter_context(_opened(init, kind)) for kind in _KINDS]:
            _set(descriptor)
    os.chdir(folder)
    os.environ.update(ENVIRONMENT)


def entering(init: int) -> list[str]:
    """The start of a command that runs the rest of it with the network, the host name and the mounts of `init`."""
    variables = [f"{name}={value}" for name, value in ENVIRONMENT.items()]
    kinds = [f"--{kind}" for kind in ("net", "uts", "mount")]
    return ["nsenter", f"--target={init}", *kinds, "--", "env", f"--chdir={Path.cwd()}", *variables]


@contextmanager
def _opened(pid: int, kind: str) -> Iterator[int]:
    descriptor = os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _set(descriptor: int) -> None:
    if _libc.setns(descriptor, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns failed")
