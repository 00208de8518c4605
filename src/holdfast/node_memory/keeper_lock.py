"""The keeper's lock on a folder, which one process has, and the protocol version of the folder's contents."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from holdfast.errors import ConfigurationError, StorageError
from holdfast.node_memory import file_locks
from holdfast.node_memory.node_folder import NodeFolder, unusable_memory

#: Version of the records of slots and generations, and of the rules by which processes change them.
PROTOCOL: Final = 7

_LOCK_NAME: Final = "keeper.lock"
_PROTOCOL_NAME: Final = "keeper.protocol"
#: Bytes of the lock file: the keeper locks the first one, and a process that wants the keeper to end locks the second
#: one, shared. So a request reaches a keeper in another PID namespace, and never the wrong process; and it ends with
#: the process that made it. A keeper that has signing keys locks the third byte, shared. A process that wants a keeper
#: without keys to end locks the fourth one, shared; a keeper with keys ignores that, so such a request never ends the
#: keeper that follows.
_KEPT: Final = 0
_UNWANTED: Final = 1
_SIGNS: Final = 2
_SIGNER_WANTED: Final = 3
_LOOK_S: Final = 0.05


def try_lock(folder: NodeFolder, *, signs: bool = False) -> int | None:
    """Take the right to be the keeper of `folder`. Returns a descriptor, which holds the right as long as it is open;
    None where another process has it. A keeper that `signs` has signing keys.

    The right ends with this process and the children that it forks, however they end.
    """
    while True:
        fd = open_lock(folder)
        if signs:  # first, so that nobody takes this keeper for one without keys
            file_locks.try_lock(fd, _SIGNS, shared=True, inherited=True)
        if not file_locks.try_lock(fd, _KEPT, inherited=True):
            os.close(fd)
            return None
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)  # a keeper that ended has removed the file


def is_kept(folder: NodeFolder) -> bool:
    """Whether a process keeps `folder`."""
    with _lock_file(folder) as fd:
        return fd is not None and is_locked(fd)


def open_lock(folder: NodeFolder) -> int:
    """Open the file that the keeper of `folder` locks, and return its descriptor. Creates the file if it is missing."""
    return folder.open_or_create(_LOCK_NAME)


def is_locked(fd: int) -> bool:
    """Whether a keeper holds the lock on the open file `fd`; works for a removed file too."""
    return file_locks.is_locked(fd, _KEPT)


def note_keeper(lock: int) -> None:
    """Write the PID of this keeper into the lock file. Only for people: the PID means nothing in other PID
    namespaces."""
    text = b"%d\n" % os.getpid()
    os.pwrite(lock, text, 0)
    os.ftruncate(lock, len(text))


def keeper_pid(folder: NodeFolder) -> int | None:
    """The PID that `note_keeper` wrote last; only for people. None where there is none."""
    with _lock_file(folder) as fd, suppress(ValueError):
        return None if fd is None else int(os.pread(fd, 32, 0))
    return None


def is_unwanted(lock: int, *, signs: bool) -> bool:
    """Whether some process wants the keeper that has the `lock` to end, because it ends all keepers, or those without
    signing keys. This one has some if it `signs`."""
    return file_locks.is_locked(lock, _UNWANTED) or (not signs and file_locks.is_locked(lock, _SIGNER_WANTED))


def end_keeper(folder: NodeFolder, *, timeout_s: float) -> bool:
    """Ask the keeper of `folder` to make its slots durable and to end, and wait for up to `timeout_s`. Returns whether
    no keeper is left."""
    with _lock_file(folder) as fd:
        if fd is None:
            return True
        file_locks.try_lock(fd, _UNWANTED, shared=True)
        end = time.monotonic() + timeout_s
        while is_locked(fd) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        return not is_locked(fd)


def require_signer(folder: NodeFolder, *, timeout_s: float) -> None:
    """Return when no keeper without signing keys keeps `folder`. Asks one that does to make its slots durable and to
    end, and blocks for up to `timeout_s`. For processes that have keys: such a keeper cannot write their checkpoints.

    Raises:
        ConfigurationError: that keeper did not end within `timeout_s`.
    """
    with _lock_file(folder) as fd:
        if fd is None or not is_locked(fd) or file_locks.is_locked(fd, _SIGNS):
            return
        file_locks.try_lock(fd, _SIGNER_WANTED, shared=True)
        end = time.monotonic() + timeout_s
        while is_locked(fd) and not file_locks.is_locked(fd, _SIGNS):
            if time.monotonic() > end:
                raise ConfigurationError(
                    f"A job without a signing key started the keeper of '{folder.path}', and it did not end within "
                    f"{timeout_s:.0f} s. It cannot sign the checkpoints of this job.",
                    code="config.signing_key",
                    action="End it with holdfast node RUN --stop on this node, and start the job again.",
                    path=str(folder.path),
                )
            time.sleep(_LOOK_S)


@contextmanager
def _lock_file(folder: NodeFolder) -> Iterator[int | None]:
    """The descriptor of the lock file; None if there is no such file."""
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
    """Remove the lock file, before the folder is removed. Only for its keeper: the next keeper finds no file, and makes
    a new one."""
    folder.discard(_LOCK_NAME)


def write_protocol(folder: NodeFolder) -> None:
    """Record that the contents of `folder` follow `PROTOCOL`, unless a keeper before this one has: a keeper must start
    where memory is full of slots that it is to write to the run. Only for its keeper.

    Raises:
        StorageError: the memory of this node does not take the record.
    """
    if not folder.has(_PROTOCOL_NAME) or _protocol_of(folder) != PROTOCOL:
        with unusable_memory(folder.path):
            folder.write(_PROTOCOL_NAME, b"%d\n" % PROTOCOL)


def clear_protocol(folder: NodeFolder) -> None:
    """Record that all contents of `folder` are durable, so that a keeper of any protocol may follow. Only for its
    keeper."""
    folder.discard(_PROTOCOL_NAME)


def require_protocol(folder: NodeFolder, *, timeout_s: float) -> None:
    """Return when this version of holdfast can use the contents of `folder`. Asks a keeper of another protocol to end,
    which makes its slots durable first. Blocks for up to `timeout_s`.

    Raises:
        ConfigurationError: that keeper did not end, or could not make everything durable, within `timeout_s`.
        StorageError: the file that holds the protocol is damaged, and there is no keeper.
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
            action=f"Remove '{folder.path}' to give up the snapshots in it; `holdfast node` lists them.",
            path=str(path),
            tier="node memory",
        )
    if protocol != PROTOCOL:
        raise ConfigurationError(
            f"Another version of holdfast staged the snapshots in '{folder.path}' (protocol {protocol}; this one has "
            f"{PROTOCOL}), and they are not durable.",
            code="config.keeper_version",
            action="Run `holdfast keeper` of that version to make them durable, or remove the folder to give them up.",
            path=str(folder.path),
        )


def _protocol_of(folder: NodeFolder) -> int | None:
    """The protocol of the last keeper of `folder`, if it has not cleared it; else this version's. None where the file
    is damaged."""
    try:
        with os.fdopen(folder.open(_PROTOCOL_NAME), "rb") as file:
            return int(file.read())
    except FileNotFoundError:
        return PROTOCOL
    except (ValueError, ConfigurationError):  # damaged, or something else lies in its place
        return None
