"""Who keeps a folder: one process has its lock, and says by which protocol it understands what is in it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from holdfast.errors import ConfigurationError, StorageError
from holdfast.node_memory import file_locks
from holdfast.node_memory.node_folder import NodeFolder

#: Changes with the records of slots and generations, and with who may do what in which state.
PROTOCOL: Final = 2

_LOCK_NAME: Final = "keeper.lock"
_PROTOCOL_NAME: Final = "keeper.protocol"
#: Bytes of the lock file: the keeper has the first one locked, and who wants it to end the second one, shared. So a
#: request reaches a keeper in another PID namespace, and never another process; and it ends with whoever made it.
_KEPT: Final = 0
_UNWANTED: Final = 1
_LOOK_S: Final = 0.05


def try_lock(folder: NodeFolder) -> int | None:
    """The right to be the keeper of `folder`, as a descriptor, for as long as it is open; None where another has it.

    It goes with the process that holds it, and the children that it forks, however they end.
    """
    while True:
        fd = open_lock(folder)
        if not file_locks.try_lock(fd, _KEPT, inherited=True):
            os.close(fd)
            return None
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # a keeper that ended has removed it


def is_kept(folder: NodeFolder) -> bool:
    """Whether a keeper of `folder` is at work."""
    with _lock_file(folder) as fd:
        return fd is not None and is_locked(fd)


def open_lock(folder: NodeFolder) -> int:
    """A descriptor of the file that the keeper of `folder` locks, made where it is not there."""
    return folder.open_or_create(_LOCK_NAME)


def is_locked(fd: int) -> bool:
    """Whether a keeper holds the lock that `fd` is open for, also where its file was removed since."""
    return file_locks.is_locked(fd, _KEPT)


def note_keeper(lock: int) -> None:
    """Say in the lock file which process keeps the folder, for people: it is not known in other PID namespaces."""
    text = b"%d\n" % os.getpid()
    os.pwrite(lock, text, 0)
    os.ftruncate(lock, len(text))


def keeper_pid(folder: NodeFolder) -> int | None:
    """What `note_keeper` said last; only for people."""
    with _lock_file(folder) as fd, suppress(ValueError):
        return None if fd is None else int(os.pread(fd, 32, 0))
    return None


def is_unwanted(lock: int) -> bool:
    """Whether somebody wants the keeper that has the `lock` to end."""
    return file_locks.is_locked(lock, _UNWANTED)


def end_keeper(folder: NodeFolder, *, timeout_s: float) -> bool:
    """Ask the keeper of `folder` to make durable what is there, and to end; waits for that. Whether there is none."""
    with _lock_file(folder) as fd:
        if fd is None:
            return True
        file_locks.try_lock(fd, _UNWANTED, shared=True)
        end = time.monotonic() + timeout_s
        while is_locked(fd) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return not is_locked(fd)


@contextmanager
def _lock_file(folder: NodeFolder) -> Iterator[int | None]:
    """The lock file, if there is one."""
    try:
        fd = folder.open(_LOCK_NAME)
    except FileNotFoundError:
        yield None
        return
    try:
        yield fd
    finally:
        file_locks.close(fd)


def remove_lock(folder: NodeFolder) -> None:
    """Remove the lock file, with the folder. Only for its keeper: who comes after it finds no name, and makes a new
    one."""
    folder.remove(_LOCK_NAME)


def write_protocol(folder: NodeFolder) -> None:
    """Say that what is in `folder` follows `PROTOCOL`. Only for its keeper."""
    folder.write(_PROTOCOL_NAME, b"%d\n" % PROTOCOL)


def clear_protocol(folder: NodeFolder) -> None:
    """Say that nothing is in `folder` that is not durable: a keeper of any protocol may come. Only for its keeper."""
    folder.remove(_PROTOCOL_NAME)


def require_protocol(folder: NodeFolder, *, timeout_s: float) -> None:
    """Return when `folder` is no other version's: a keeper of another protocol is told to end, and makes durable first
    what is there.

    Raises:
        ConfigurationError: it did not end, or could not make everything durable, within `timeout_s`.
        StorageError: the file that says the protocol is damaged, and there is no keeper.
    """
    protocol = _protocol_of(folder)
    if protocol != PROTOCOL and is_kept(folder):
        end_keeper(folder, timeout_s=timeout_s)
        protocol = _protocol_of(folder)
    if protocol is None:
        path = folder.path / _PROTOCOL_NAME
        raise StorageError(
            f"'{path}' is damaged: it does not say which version of holdfast staged the snapshots beside it.",
            code="storage.memory",
            action=f"Remove '{folder.path}' to give up what it holds; `holdfast node` lists that.",
            path=str(path),
            tier="node memory",
        )
    if protocol != PROTOCOL:
        raise ConfigurationError(
            f"Another version of holdfast staged the snapshots in '{folder.path}' (protocol {protocol}; this one has "
            f"{PROTOCOL}), and they are not durable.",
            code="config.keeper_version",
            action="Run `holdfast keeper` of that version until they are, or remove the folder to give them up.",
            path=str(folder.path),
        )


def _protocol_of(folder: NodeFolder) -> int | None:
    """What the last keeper of `folder` followed, if it left anything that is not durable; else the one of this. None
    where it does not say."""
    try:
        with os.fdopen(folder.open(_PROTOCOL_NAME), "rb") as file:
            return int(file.read())
    except FileNotFoundError:
        return PROTOCOL
    except ValueError:
        return None
